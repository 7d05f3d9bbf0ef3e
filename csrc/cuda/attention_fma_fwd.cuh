#pragma once
// Exact attention forward in Real: one block per (batch item, query head, 64 queries, kOut columns of out). More columns than
// kOut are more blocks, which compute the same scores again.

#include "attention_fma_launch.h"
#include "attention_fma_tile.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

// max + log(sum), rounded once.
SIMT_DEVICE float natural_lse(float max, float sum) { return sum == 0 ? minus_infinity(0.0f) : float(double(max) + double(logf(sum))); }
SIMT_DEVICE double natural_lse(double max, double sum) { return sum == 0 ? minus_infinity(0.0) : max + log(sum); }

template <class Tile>
struct ForwardHead {
  using T = typename Tile::T;
  Segment queries, keys;
  Rows<const T> query, key, value;
  HeadScores<typename Tile::Real> pairs;
  Dropout dropout;

  SIMT_DEVICE ForwardHead(const AttentionParams& p, const RowTable& table, int64_t batch, int64_t head)
      : queries(query_segment(p, batch)),
        keys(key_segment(p, batch)),
        query(rows_from<const T>(p, p.query, batch, head, queries.begin)),
        key(rows_from<const T>(p, p.key, batch, head / (p.num_heads / p.num_heads_kv), keys.begin)),
        value(rows_from<const T>(p, p.value, batch, head / (p.num_heads / p.num_heads_kv), keys.begin)),
        pairs(p, table, batch, head),
        dropout(p.dropout, batch, head) {}
};

template <class Tile>
using ForwardKept = KeptTile<Tile::kRows, Tile::kCols>;
template <class Tile, class Product>
constexpr int kForwardBytes =
    Product::template kBytes<Tile> + Tile::kScoreBytes + (Tile::kValues + SoftmaxRows<Tile>::kElements) * int(sizeof(typename Tile::Real)) +
    ForwardKept<Tile>::kBytes + int(sizeof(ForwardHead<Tile>) + sizeof(int));

template <class Tile, class Product>
__global__ void __launch_bounds__(Tile::kThreads, Product::kFewRegisters && sizeof(typename Tile::Real) == 8 && Tile::kOut == 32 ? 3 : 2)
    attention_fma_fwd_kernel(AttentionParams p, RowTable table, Product product) {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  constexpr int kVector = Tile::kVector;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const queries = carve.template take<Real>(Tile::kLeft);
  Real* const keys = carve.template take<Real>(Tile::kRight);  // then the weights
  Real* const values = carve.template take<Real>(Tile::kValues);
  Real* const state = carve.template take<Real>(SoftmaxRows<Tile>::kElements);
  uint8_t* const kept_bytes = carve.template take<uint8_t>(ForwardKept<Tile>::kBytes);
  ForwardHead<Tile>* const shared_head = carve.template take<ForwardHead<Tile>>(1);
  unsigned char* const product_memory = carve.template take<unsigned char>(Product::template kBytes<Tile>);
  int* const not_finite = carve.template take<int>(1);

  const typename Tile::Place at;
  // Late query tiles see most keys where the mask is causal: they start first.
  const int64_t pieces = max_of(int64_t(1), (p.head_dim_v + Tile::kOut - 1) / Tile::kOut), tiles = (p.seqlen_q + Tile::kRows - 1) / Tile::kRows;
  const int64_t first_col = int64_t(blockIdx.x) % pieces * Tile::kOut, block = int64_t(blockIdx.x) / pieces, item = block / tiles;
  const int64_t batch = item / p.num_heads, head = item % p.num_heads;
  const RowRange query_rows{(tiles - 1 - block % tiles) * Tile::kRows, query_segment(p, batch).length};
  if (query_rows.first >= query_rows.end) return;
  const RowBounds bounds = table.bounds_of(batch, query_rows.first, Tile::kRows);
  if (threadIdx.x == 0) *not_finite = 0;
  const ForwardHead<Tile>& of = in_shared(shared_head, p, table, batch, head);

  SoftmaxRows<Tile> softmax(p, head, state, at);
  typename Tile::Results out;
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++)
#pragma unroll
    for (int c = 0; c < Tile::kResultCols; c++) out[i][c] = 0;

  bool queries_stay = false;
#pragma unroll 1
  for (int tile = -1; (tile = of.pairs.list.template next_tile<Tile::kCols>(bounds, query_rows.first, tile + 1)) >= 0;) {
    static_assert(Tile::kRows == kListTile, "a tile of queries of the list");
    const RowRange key_rows{int64_t(tile) * Tile::kCols, of.keys.length};
    const int shown = of.pairs.list.state(query_rows.first, key_rows.first);
    const bool edge = of.pairs.hides || shown != kListFull || !bounds.covers(key_rows.first, key_rows.first + Tile::kCols);
    __syncthreads();  // all have left the weights and values of the tile before
    stage_values<Tile>(values, not_finite, of.value, first_col, p.head_dim_v, key_rows);
    const auto kept = ForwardKept<Tile>::template draw<Tile::kThreads>(of.dropout, query_rows.first, key_rows.first, kept_bytes);
    typename Tile::Scores scores;
    product.template add<Tile>(scores, head, of.query, query_rows, of.key, key_rows, p.head_dim, queries_stay, queries, keys, product_memory, at);
    queries_stay = p.head_dim <= Tile::kDepth;

    __syncthreads();  // all have left the keys; values and dropout are there
    put_scores<Tile>(keys, scores, at);
    const HeadScores<Real> pairs = of.pairs;
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++) {
      const int r = at.row(i);
      const int64_t row = query_rows.first + r;
      const RowView visible = edge ? pairs.row(row, shown) : RowView{{0, 0, 0, 0}, 0};
      Real* const weights = keys + r * Tile::kStride + at.x;
      Real x[Tile::kThreadCols];
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) x[j] = pairs(weights[16 * j], row, key_rows.first + at.x + 16 * j, edge, visible);
      softmax.add(i, x, at);
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) weights[16 * j] = !is_hidden(x[j]) && !kept(r, at.x + 16 * j) ? Real(0) : Tile::operand(x[j]);
    }
    __syncwarp();
    softmax.next_tile();
#pragma unroll
    for (int i = 0; i < Tile::kProductRows; i++) {
      const Real shrink = softmax.shrink[at.result_row(i)];
#pragma unroll
      for (int c = 0; c < Tile::kResultCols; c++) out[i][c] *= shrink;
    }
    add_weighted<Tile>(out, keys, values, key_rows.end - key_rows.first, edge, not_finite, at);
  }

  const int64_t packed = of.queries.begin;
  const Rows<T> to = rows_from<T>(p, p.out, batch, head, packed), residual = rows_from<T>(p, p.residual, batch, head, packed);
  const Real keep = Real(of.dropout.inverse_keep);
  __syncwarp();  // all have taken up the last factors
#pragma unroll 1
  for (int i = 0; i < Tile::kThreadRows; i++) {
    const int64_t row = query_rows.first + at.row(i);
    const Real sum = row_sum(softmax.sum[i * Tile::kThreads]);
    if (at.x != 0) continue;
    softmax.shrink[at.row(i)] = sum == Real(0) ? Real(0) : keep / sum;
    if (p.lse && first_col == 0 && row < query_rows.end) ((Real*)p.lse)[lse_offset(p, batch, head) + packed + row] = natural_lse(softmax.max[at.row(i)], sum);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++) {
    const int64_t row = query_rows.first + at.result_row(i);
    const Real factor = softmax.shrink[at.result_row(i)];
    if (row >= query_rows.end) continue;
#pragma unroll
    for (int j = 0; j < Tile::kResultCols; j += kVector) {
      const int64_t col = first_col + at.result_col(j);
      Real part[kVector];
#pragma unroll
      for (int c = 0; c < kVector; c++) part[c] = out[i][j + c] * factor;
      if (col >= p.head_dim_v) continue;
      store_part<T, kVector>(to, row, col, p.head_dim_v, part);
      if (!residual.data) continue;
#pragma unroll
      for (int c = 0; c < kVector; c++) {
        const Real rest = part[c] - to_real(from_real<T>(part[c]));
        part[c] = rest == rest ? rest : Real(0);  // inf - inf
      }
      store_part<T, kVector>(residual, row, col, p.head_dim_v, part);
    }
  }
}

template <class T, int kOut, Products kProducts, class Product>
void launch_fma_fwd(const AttentionParams& p, const RowTable& table, const Product& product, Stream stream) {
  using Tile = FmaTile<T, kOut, kProducts>;
  const int64_t pieces = max_of(int64_t(1), (p.head_dim_v + kOut - 1) / kOut), tiles = (p.seqlen_q + Tile::kRows - 1) / Tile::kRows;
  SIMT_LAUNCH((attention_fma_fwd_kernel<Tile, Product>), unsigned(pieces * tiles * p.batch * p.num_heads), Tile::kThreads, (kForwardBytes<Tile, Product>),
              stream, p, table, product);
}

}  // namespace

// Results of a block: twice the columns halve how often scores are computed again, and cost registers.
template <class T>
constexpr int kFmaOut = sizeof(T) == 8 ? 64 : 128;

template <class T, Products kProducts, class Product>
void launch_fma_fwd(const AttentionParams& p, const Product& product, void* memory, Stream stream) {
  Scratch scratch(memory);
  const RowTable table = take_row_table(p, &scratch, false);
  fill_row_table(p, table, stream);
  if constexpr (sizeof(T) > 2) {
    if (p.head_dim_v <= kFmaOut<T> / 2) return launch_fma_fwd<T, kFmaOut<T> / 2, kProducts>(p, table, product, stream);
  }
  launch_fma_fwd<T, kFmaOut<T>, kProducts>(p, table, product, stream);
}

template <class T, Products kProducts>
void launch_attention_fma_fwd(const AttentionParams& p, void* memory, Stream stream) {
  launch_fma_fwd<T, kProducts>(p, DotProduct(), memory, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
