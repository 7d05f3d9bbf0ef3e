#pragma once
// What computes weights again from lse needs of each row: weight = exp((score - shift) - lse). Backward: also delta = grad_out . out - grad_lse.

#include "attention_fma_tile.cuh"
#include "kernels.h"

namespace tiled_attention {
namespace cuda {

// [batch][num_heads][num_rows] each; of packed sequences as lse.
template <class Real>
struct RowStats {
  Real *shift, *lse;
  Real* delta;  // null without gradients
};

struct StatsParams {
  AttentionParams forward;
  const int64_t* rows = nullptr;  // [num_rows], null: all in order
  int64_t num_rows = 0;
  bool unknown_sinks = false;  // lse may hold a sink that is not in `forward`
  TensorView grad_out;
  const void* grad_lse = nullptr;
  // Real, as RowStats
  void* sink_sums = nullptr;  // -(weight of the sink) delta: what a row adds to the gradient of its sink; null: not wanted
  void* row_sums = nullptr;   // the sum of a row's score gradients, which is grad_lse less that; null: not wanted
};

namespace {

// exp(score - lse) is as inexact as lse, whose last bit grows with its size. A row of large scores is normalised again from its own maximum
// and sum: where what lse has lost would show beside the rounding of a score, and for 16 bit beside that of a weight.
template <class T>
SIMT_DEVICE bool is_coarse(Real<T> lse) {
  const Real<T> limit = sizeof(T) == 2 ? Real<T>(710) : Real<T>(44);
  return (lse > limit || lse < -limit) && is_finite(lse);
}

template <class Tile, class Product>
constexpr int kStatsBytes =
    Product::template kBytes<Tile> + Tile::kScoreBytes + (SoftmaxRows<Tile>::kElements + 2 * Tile::kRows) * int(sizeof(typename Tile::Real));

// Blocks of a multiprocessor: conversions from 16 bit take registers that three do not leave.
template <class Tile, class Product>
constexpr int kStatsBlocks = sizeof(typename Tile::T) == 2 || !Product::kFewRegisters ? 2 : 3;

template <class Tile, class Product>
__global__ void __launch_bounds__(Tile::kThreads, (kStatsBlocks<Tile, Product>))
    attention_fma_stats_kernel(StatsParams params, RowTable table, RowStats<typename Tile::Real> stats, Product product) {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const queries = carve.template take<Real>(Tile::kLeft);
  Real* const keys = carve.template take<Real>(Tile::kRight);
  Real* const state = carve.template take<Real>(SoftmaxRows<Tile>::kElements);
  Real* const shift = carve.template take<Real>(Tile::kRows);
  Real* const rest = carve.template take<Real>(Tile::kRows);
  unsigned char* const product_memory = carve.template take<unsigned char>(Product::template kBytes<Tile>);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t tiles = (params.num_rows + Tile::kRows - 1) / Tile::kRows, item = int64_t(blockIdx.x) / tiles;
  const int64_t batch = item / p.num_heads, head = item % p.num_heads, kv_head = head / (p.num_heads / p.num_heads_kv);
  const Segment of_queries = query_segment(p, batch), of_keys = key_segment(p, batch);
  const int64_t end = p.cu_seqlens_q ? of_queries.length : params.num_rows, first_lse = lse_offset(p, batch, head) + of_queries.begin;
  const ChosenRows query_rows{params.rows, int64_t(blockIdx.x) % tiles * Tile::kRows, end, of_queries.length};
  if (query_rows.first >= end) return;
  const Real* const lse = (const Real*)p.lse + first_lse;
  const auto lse_of = [&](int r) {
    const int64_t query = query_rows(r);
    return query < 0 ? minus_infinity(Real()) : lse[query];
  };

  // Every warp looks at all rows, so that the block agrees without a barrier. A row without keys gets +inf: weights of 0.
  bool coarse = false;
  for (int r = int(threadIdx.x) % 32; r < Tile::kRows; r += 32) coarse = coarse || is_coarse<T>(lse_of(r));
  if (threadIdx.x < Tile::kRows) {
    const Real known = lse_of(int(threadIdx.x));
    shift[threadIdx.x] = 0, rest[threadIdx.x] = known == minus_infinity(Real()) ? -known : known;
  }
  if (__ballot_sync(0xffffffffu, coarse) != 0) {
    const Rows<const T> query = rows_from<const T>(p, p.query, batch, head, of_queries.begin);
    const Rows<const T> key = rows_from<const T>(p, p.key, batch, kv_head, of_keys.begin);
    const HeadScores<Real> pairs(p, table, batch, head);
    SoftmaxRows<Tile> softmax(p, head, state, at);
#pragma unroll 1
    for (int64_t first_key = 0; first_key < of_keys.length; first_key += Tile::kCols) {
      const RowRange key_rows{first_key, of_keys.length};
      typename Tile::Scores scores;
      __syncthreads();
      product.template add<Tile>(scores, head, query, query_rows, key, key_rows, p.head_dim, false, queries, keys, product_memory, at);
      __syncthreads();
      put_scores<Tile>(keys, scores, at);
#pragma unroll 1
      for (int i = 0; i < Tile::kThreadRows; i++) {
        const int r = at.row(i);
        const int64_t row = query_rows(r);
        const RowView visible = pairs.row_at(row, first_key);
        Real x[Tile::kThreadCols];
#pragma unroll
        for (int j = 0; j < Tile::kThreadCols; j++) x[j] = pairs(keys[r * Tile::kStride + at.x + 16 * j], row, first_key + at.x + 16 * j, true, visible);
        softmax.add(i, x, at);
      }
      __syncwarp();
      softmax.next_tile();
    }
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++) {
      const int r = at.row(i);
      const Real sum = log(row_sum(softmax.sum[i * Tile::kThreads])), known = lse_of(r), max = softmax.max[r];
      if (at.x != 0 || !is_coarse<T>(known)) continue;
      // A larger lse is that of a sink, and stays.
      const Real tolerance = (known < 0 ? -known : known) * Real(sizeof(Real) == 4 ? 1e-6 : 1e-15);
      if (!params.unknown_sinks || known <= max + sum + tolerance) shift[r] = max, rest[r] = sum;
    }
  }
  __syncthreads();

  // Eight threads a row. In double: an error of delta is the same in all keys of the row, and does not average out where rows are summed.
  const Rows<const T> grad_out = rows_from<const T>(p, params.grad_out, batch, head, of_queries.begin),
                      out = rows_from<const T>(p, p.out, batch, head, of_queries.begin),
                      residual = rows_from<const T>(p, p.residual, batch, head, of_queries.begin);
#pragma unroll 1
  for (int r = int(threadIdx.x) / 8; r < Tile::kRows; r += Tile::kThreads / 8) {
    const int64_t row = query_rows.first + r, query = query_rows(r), index = p.cu_seqlens_q ? first_lse + row : item * params.num_rows + row;
    const int lane = int(threadIdx.x) % 8;
    double sum = 0;
    if (stats.delta) {
      if (query >= 0) {
#pragma unroll 1
        for (int64_t col = lane * kVec<T>; col < p.head_dim_v; col += 8 * kVec<T>) {
          Real grad[kVec<T>], x[kVec<T>], lost[kVec<T>];
          load_vec<T>(grad_out, query, col, p.head_dim_v, grad);
          load_vec<T>(out, query, col, p.head_dim_v, x);
#pragma unroll
          for (int k = 0; k < kVec<T>; k++) sum += double(grad[k]) * double(x[k]);
          if (!residual.data) continue;
          load_vec<T>(residual, query, col, p.head_dim_v, lost);
#pragma unroll
          for (int k = 0; k < kVec<T>; k++) sum += double(grad[k]) * double(lost[k]);
        }
      }
#pragma unroll
      for (int lanes = 1; lanes < 8; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (query < 0 || lane != 0) continue;
    stats.shift[index] = shift[r], stats.lse[index] = rest[r];
    if (!stats.delta) continue;
    // d lse / d score is the weight: a gradient of lse only shifts delta.
    const double grad_lse = params.grad_lse ? double(((const Real*)params.grad_lse)[index]) : 0.0;
    const Real delta = Real(Real(sum) - Real(grad_lse));
    stats.delta[index] = delta;
    if (!params.sink_sums && !params.row_sums) continue;
    const bool empty = lse[query] == minus_infinity(Real());
    const double sink = p.sinks ? double(((const Real*)p.sinks)[head]) : minus_infinity(0.0);
    const double of_sink = empty || sink == minus_infinity(0.0) ? 0.0 : -exp(sink - double(shift[r]) - double(rest[r])) * double(delta);
    if (params.sink_sums) ((Real*)params.sink_sums)[index] = Real(of_sink);
    if (params.row_sums) ((Real*)params.row_sums)[index] = empty ? Real(0) : Real(grad_lse - of_sink + double(delta - delta));  // NaN where delta is not finite
  }
}

template <class T, Products kProducts, class Product>
void launch_fma_stats(const StatsParams& params, const RowTable& table, const RowStats<Real<T>>& stats, const Product& product, Stream stream) {
  using Tile = FmaTile<T, 64, kProducts>;
  const int64_t tiles = (params.num_rows + Tile::kRows - 1) / Tile::kRows;
  SIMT_LAUNCH((attention_fma_stats_kernel<Tile, Product>), unsigned(tiles * params.forward.batch * params.forward.num_heads), Tile::kThreads,
              (kStatsBytes<Tile, Product>), stream, params, table, stats, product);
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
