#pragma once
// The weights of chosen rows, computed again from lse: one block per (batch item, head, 64 rows, kCols keys), or per batch item where heads are
// averaged.

#include "attention_fma_launch.h"
#include "attention_fma_stats.cuh"

namespace tiled_attention {
namespace cuda {

struct WeightsScratch {
  RowTable table;
  void *shift, *lse;  // Real [batch][num_heads][num_rows]

  WeightsScratch(const AttentionWeightsParams& params, Scratch* scratch) {
    const AttentionParams& p = params.forward;
    const int64_t bytes = p.batch * p.num_heads * params.num_rows * (p.dtype == DType::kFloat64 ? 8 : 4);
    table = take_row_table(p, scratch, false);
    shift = scratch->take<char>(bytes);
    lse = scratch->take<char>(bytes);
  }
};

namespace {

// Blocks of a multiprocessor that the registers must leave room for: unless told, ptxas aims at more, and spills.
template <class Tile, class Product>
constexpr int kWeightsBlocks = Tile::kTensorCores || !Product::kFewRegisters || sizeof(typename Tile::Real) == 8 ? 2 : 3;

template <class Tile, class Product>
__global__ void __launch_bounds__(Tile::kThreads, (kWeightsBlocks<Tile, Product>))
    attention_weights_kernel(AttentionWeightsParams params, RowTable table, RowStats<typename Tile::Real> stats, Product product) {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const queries = carve.template take<Real>(Tile::kLeft);
  Real* const keys = carve.template take<Real>(Tile::kRight);
  unsigned char* const product_memory = carve.template take<unsigned char>(Product::template kBytes<Tile>);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t key_tiles = (p.seqlen_kv + Tile::kCols - 1) / Tile::kCols, row_tiles = (params.num_rows + Tile::kRows - 1) / Tile::kRows;
  const int64_t block = int64_t(blockIdx.x) / key_tiles, item = block / row_tiles, heads = params.average ? 1 : p.num_heads;
  const int64_t batch = item / heads, first_head = item % heads, last_head = params.average ? p.num_heads : first_head + 1;
  const RowRange key_rows{int64_t(blockIdx.x) % key_tiles * Tile::kCols, p.seqlen_kv};
  const ChosenRows query_rows{params.rows, block % row_tiles * Tile::kRows, params.num_rows, p.seqlen_q};
  const bool seen = params.rows || table.bounds_of(batch, query_rows.first, Tile::kRows).sees(key_rows.first, key_rows.first + Tile::kCols);

  typename Tile::ThreadPairs sum;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) sum[i][j] = 0;
#pragma unroll 1
  for (int64_t head = first_head; seen && head < last_head; head++) {
    const Rows<const T> query = rows_of<const T>(p, p.query, batch, head), key = rows_of<const T>(p, p.key, batch, head / (p.num_heads / p.num_heads_kv));
    const HeadScores<Real> pairs(p, table, batch, head);
    if (!params.rows && pairs.list.state(query_rows.first, key_rows.first) == kListHidden) continue;
    const Dropout dropout(p.dropout, batch, head);
    const Real share = Real(dropout.inverse_keep) / Real(params.average ? p.num_heads : 1);
    const int64_t first_row = (batch * p.num_heads + head) * params.num_rows + query_rows.first;
    typename Tile::Scores scores;
    __syncthreads();
    product.template add<Tile>(scores, head, query, query_rows, key, key_rows, p.head_dim, false, queries, keys, product_memory, at);
    __syncthreads();
    put_scores<Tile>(keys, scores, at);
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++) {
      const int r = at.row(i);
      const int64_t row = query_rows(r);
      if (row < 0) continue;
      const RowView visible = pairs.row_at(row, key_rows.first);
      const Real shift = stats.shift[first_row + r], lse = stats.lse[first_row + r];
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) {
        const int64_t column = key_rows.first + at.x + 16 * j;
        Real& x = keys[r * Tile::kStride + at.x + 16 * j];
        const Real score = pairs(x, row, column, true, visible);
        const bool counts = score != minus_infinity(Real()) && (!dropout.active || dropout.keeps(row, column));
        x = counts ? exp((score - shift) - lse) * share : Real(0);
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) sum[i][j] += keys[at.row(i) * Tile::kStride + at.x + 16 * j];
  }

  const Matrix<Real> to = matrix<Real>(p, params.weights, batch, first_head);
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++) {
    const int64_t row = query_rows.first + at.row(i);
    if (row >= params.num_rows) continue;
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) {
      const int64_t column = key_rows.first + at.x + 16 * j;
      if (column < p.seqlen_kv) to.row(row)[column * to.col_stride] = sum[i][j];
    }
  }
}

}  // namespace

template <class T, Products kProducts, class Product>
void launch_weights(const AttentionWeightsParams& params, const Product& product, void* memory, Stream stream) {
  using Tile = FmaTile<T, 64, kProducts>;
  const AttentionParams& p = params.forward;
  Scratch scratch(memory);
  const WeightsScratch parts(params, &scratch);
  fill_row_table(p, parts.table, stream);
  const RowStats<Real<T>> stats{(Real<T>*)parts.shift, (Real<T>*)parts.lse, nullptr};
  StatsParams request;
  request.forward = p;
  request.rows = params.rows, request.num_rows = params.num_rows;
  request.unknown_sinks = true;
  launch_fma_stats<T, kProducts>(request, parts.table, stats, product, stream);
  const int64_t key_tiles = (p.seqlen_kv + Tile::kCols - 1) / Tile::kCols, row_tiles = (params.num_rows + Tile::kRows - 1) / Tile::kRows;
  SIMT_LAUNCH((attention_weights_kernel<Tile, Product>), unsigned(key_tiles * row_tiles * p.batch * (params.average ? 1 : p.num_heads)), Tile::kThreads,
              (Tile::kScoreBytes + Product::template kBytes<Tile>), stream, params, parts.table, stats, product);
}

template <class T, Products kProducts>
void launch_attention_weights(const AttentionWeightsParams& params, void* memory, Stream stream) {
  launch_weights<T, kProducts>(params, DotProduct(), memory, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
