#pragma once
// Exact attention backward in Real. Three runs of one kernel: grad_query (a block per query tile, over the keys), grad_key and
// grad_value (a block per key tile, over the queries of all heads that read it). A block owns kOut columns and writes each element once.

#include "attention_fma_launch.h"
#include "attention_fma_pair_grads.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

enum class Gradient { kQuery, kKey, kValue };

template <class Tile, Gradient kOf, class Product>
constexpr int kBackwardBytes =
    kPairBytes<PairTiles<Tile, kOf != Gradient::kQuery, Product>, Tile> + Tile::kValues * int(sizeof(typename Tile::Real)) + int(sizeof(int));

template <class Tile, Gradient kOf, class Product>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_fma_bwd_kernel(AttentionBackwardParams params, RowTable table, ListingQueries listing, RowStats<typename Tile::Real> stats, Product product) {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  constexpr bool kKeyRows = kOf != Gradient::kQuery;
  constexpr PairValue kWanted = kOf == Gradient::kValue ? PairValue::kWeight : PairValue::kGradProduct;
  constexpr int kVector = Tile::kVector;
  using Pairs = PairTiles<Tile, kKeyRows, Product>;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  Real* const values = carve.template take<Real>(Tile::kValues);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);
  unsigned char* const product_memory = carve.template take<unsigned char>(Product::template kBytes<Tile>);
  int* const not_finite = carve.template take<int>(1);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t group = p.num_heads / p.num_heads_kv, heads = kKeyRows ? p.num_heads_kv : p.num_heads;
  const int64_t cols = kOf == Gradient::kValue ? p.head_dim_v : p.head_dim;
  const int64_t pieces = (cols + Tile::kOut - 1) / Tile::kOut, tiles = ((kKeyRows ? p.seqlen_kv : p.seqlen_q) + Tile::kRows - 1) / Tile::kRows;
  // Where the mask is causal, late queries and early keys meet most of the others: they start first.
  const int64_t first_col = int64_t(blockIdx.x) % pieces * Tile::kOut, block = int64_t(blockIdx.x) / pieces, item = block / tiles;
  const int64_t first_row = (kKeyRows ? block % tiles : tiles - 1 - block % tiles) * Tile::kRows, batch = item / heads, head = item % heads;
  const Segment of_rows = kKeyRows ? key_segment(p, batch) : query_segment(p, batch);
  const int64_t seqlen = of_rows.length;
  if (first_row >= seqlen) return;

  if (threadIdx.x == 0) *not_finite = 0;
  typename Tile::Results result;
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++)
#pragma unroll
    for (int c = 0; c < Tile::kResultCols; c++) result[i][c] = 0;

#pragma unroll 1
  for (int64_t query_head = kKeyRows ? head * group : head; query_head < (kKeyRows ? (head + 1) * group : head + 1); query_head++) {
    const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, query_head);
    const Rows<const T>& summed = kOf == Gradient::kQuery ? pairs.key : kOf == Gradient::kKey ? pairs.query : pairs.grad_out;
    const int64_t seqlen_of_columns = kKeyRows ? pairs.seqlen_q : pairs.seqlen_kv;
    RowBounds bounds;
    if constexpr (!kKeyRows) bounds = table.bounds_of(batch, first_row, Pairs::kQueries);
#pragma unroll 1
    for (int64_t first = 0; first < seqlen_of_columns; first += Tile::kCols) {
      if constexpr (kKeyRows) {
        if (!listing.sees(batch, query_head, first, first_row)) continue;
        bounds = table.bounds_of(batch, first, Pairs::kQueries);
        if (!bounds.sees(first_row, first_row + Pairs::kKeys)) continue;
      } else {
        const int tile = pairs.pairs.list.template next_tile<Tile::kCols>(bounds, first_row, int(first / Tile::kCols));
        if (tile < 0) break;
        first = int64_t(tile) * Tile::kCols;
      }
      const int64_t first_query = kKeyRows ? first : first_row, first_key = kKeyRows ? first_row : first;
      const bool edge = pairs.edge(bounds, first_query, first_key);
      __syncthreads();  // all have left the tiles of the step before
      stage_values<Tile>(values, not_finite, summed, first_col, cols, RowRange{first, seqlen_of_columns});
      pairs.template compute<kWanted>(first_query, first_key, edge, left, right, kept, at, product, product_memory);
      __syncwarp();
      add_weighted<Tile>(result, right, values, seqlen_of_columns - first, edge, not_finite, at);
    }
  }

  const TensorView& view = kOf == Gradient::kQuery ? params.grad_query : kOf == Gradient::kKey ? params.grad_key : params.grad_value;
  const Rows<T> to = rows_from<T>(p, view, batch, head, of_rows.begin);
  const Real factor = kOf == Gradient::kValue && p.dropout.p > 0 ? Real(inverse_keep_of(p.dropout.p)) : Real(1);
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++) {
    const int64_t row = first_row + at.result_row(i);
    if (row >= seqlen) continue;
#pragma unroll
    for (int j = 0; j < Tile::kResultCols; j += kVector) {
      const int64_t col = first_col + at.result_col(j);
      Real part[kVector];
#pragma unroll
      for (int c = 0; c < kVector; c++) part[c] = result[i][j + c] * factor;
      if (col < cols) store_part<T, kVector>(to, row, col, cols, part);
    }
  }
}

template <class Tile, Gradient kOf, class Product>
void launch_fma_gradient(const AttentionBackwardParams& params, const RowTable& table, const ListingQueries& listing,
                         const RowStats<typename Tile::Real>& stats, const Product& product, Stream stream) {
  const AttentionParams& p = params.forward;
  const bool of_queries = kOf == Gradient::kQuery;
  const int64_t cols = kOf == Gradient::kValue ? p.head_dim_v : p.head_dim, rows = of_queries ? p.seqlen_q : p.seqlen_kv;
  const int64_t pieces = (cols + Tile::kOut - 1) / Tile::kOut, tiles = (rows + Tile::kRows - 1) / Tile::kRows;
  const int64_t blocks = pieces * tiles * p.batch * (of_queries ? p.num_heads : p.num_heads_kv);
  if (blocks == 0) return;
  SIMT_LAUNCH((attention_fma_bwd_kernel<Tile, kOf, Product>), unsigned(blocks), Tile::kThreads, (kBackwardBytes<Tile, kOf, Product>), stream, params, table,
              listing, stats, product);
}

template <class T, Products kProducts, Gradient kOf, class Product>
void launch_fma_gradient_of(const AttentionBackwardParams& params, int64_t cols, const RowTable& table, const ListingQueries& listing,
                            const RowStats<Real<T>>& stats, const Product& product, Stream stream) {
  constexpr int kOut = sizeof(T) == 8 || (sizeof(T) == 2 && !Product::kFewRegisters) ? 64 : 128;
  if constexpr (sizeof(T) > 2) {
    if (cols <= kOut / 2) return launch_fma_gradient<FmaTile<T, kOut / 2, kProducts>, kOf>(params, table, listing, stats, product, stream);
  }
  launch_fma_gradient<FmaTile<T, kOut, kProducts>, kOf>(params, table, listing, stats, product, stream);
}

}  // namespace

template <class T, Products kProducts>
void launch_attention_fma_bwd(const AttentionBackwardParams& params, void* memory, Stream stream) {
  const AttentionParams& p = params.forward;
  Scratch scratch(memory);
  const FmaBackwardScratch parts(params, &scratch);
  const RowTable& table = parts.table;
  fill_row_table(p, table, stream);
  if (params.grad_key.data || params.grad_value.data) fill_listing_queries(p, parts.listing, stream);

  const RowStats<Real<T>> stats{(Real<T>*)parts.shift, (Real<T>*)parts.lse, (Real<T>*)parts.delta};
  StatsParams request;
  request.forward = p;
  request.num_rows = p.seqlen_q;
  request.grad_out = params.grad_out, request.grad_lse = params.grad_lse;
  request.sink_sums = parts.sink_sums, request.row_sums = parts.row_sums;
  launch_fma_stats<T, kProducts>(request, table, stats, DotProduct(), stream);

  if (params.grad_query.data) launch_fma_gradient_of<T, kProducts, Gradient::kQuery>(params, p.head_dim, table, parts.listing, stats, DotProduct(), stream);
  if (params.grad_key.data) launch_fma_gradient_of<T, kProducts, Gradient::kKey>(params, p.head_dim, table, parts.listing, stats, DotProduct(), stream);
  if (params.grad_value.data) launch_fma_gradient_of<T, kProducts, Gradient::kValue>(params, p.head_dim_v, table, parts.listing, stats, DotProduct(), stream);
  launch_fma_pair_grads<T, kProducts>(params, parts, stats, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
