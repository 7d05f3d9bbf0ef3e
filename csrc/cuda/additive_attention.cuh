#pragma once
// Additive attention: the kernels of exact attention without tensor cores on other scores, and the gradients that those do not have. A block of
// additive_gradient_kernel owns 64 queries or 64 keys and kOut columns, computes gradients of scores G tile by tile and adds up
//
//   grad_query_id = w_d sum_j G_ij (1 - t_ijd^2)   grad_key_jd = w_d sum_i G_ij (1 - t_ijd^2)   grad_w_d = sum_ij G_ij t_ijd
//
// with t = N/D, D = N + 1, 1 - t^2 = (N + D) / D^2, four 1/D from one reciprocal. Blocks of queries write their share of grad_w, which a second kernel
// adds in one order.

#include "additive_attention_launch.h"
#include "additive_product.cuh"
#include "attention_fma_bwd.cuh"
#include "attention_fma_fwd.cuh"
#include "attention_weights.cuh"

namespace tiled_attention {
namespace cuda {

namespace {

template <class Tile, bool kKeyRows>
constexpr int kAdditiveGradientBytes = kPairBytes<PairTiles<Tile, kKeyRows, AdditiveProduct<typename Tile::Real, kKeyRows>>, Tile> +
                                       (Tile::kValues + Tile::kRows * Tile::kOutStride) * int(sizeof(typename Tile::Real));

// Rows whose sums a thread holds in registers at a time.
template <class Real>
constexpr int kRowsOfSweep = sizeof(Real) == 8 ? 2 : 4;

// The quad of columns that the thread owns, of one row of a tile.
template <class Tile>
SIMT_DEVICE void load_columns(typename Tile::Real (&to)[kQuad], const typename Tile::Real* row, typename Tile::Place at) {
  constexpr int kVector = Tile::kVector;
#pragma unroll
  for (int c = 0; c < kQuad; c += kVector) {
    const auto part = *reinterpret_cast<const Vec16<typename Tile::Real>*>(row + kVector * at.x + 16 * c);
#pragma unroll
    for (int k = 0; k < kVector; k++) to[c + k] = part.x[k];
  }
}

// kKeyRows: grad_key of a tile of keys, over the queries of all heads that read it; otherwise grad_query and the share of grad_score_weight.
template <class Tile, bool kKeyRows>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    additive_gradient_kernel(AttentionBackwardParams params, RowTable table, RowStats<typename Tile::Real> stats,
                             AdditiveProduct<typename Tile::Real, kKeyRows> product, double* weight_parts) {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  using Product = AdditiveProduct<Real, kKeyRows>;
  using Pairs = PairTiles<Tile, kKeyRows, Product>;
  constexpr int kVector = Tile::kVector, kRowsOf = Tile::kThreadRows, kSweepRows = kRowsOfSweep<Real>;
  static_assert(Tile::kResultCols == kQuad && Tile::kRows == kAdditiveRows, "a thread owns one quad of columns in each of its rows");
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  Real* const columns = carve.template take<Real>(Tile::kValues);
  Real* const sums = carve.template take<Real>(Tile::kRows * Tile::kOutStride);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);
  static_assert(Tile::kCols * Tile::kOutStride <= Tile::kLeft, "while columns are swept, the left tile holds the other exponential of the columns");
  Real* const less_ones = left;
  unsigned char* const product_memory = carve.template take<unsigned char>(Pairs::kProductBytes);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t group = p.num_heads / p.num_heads_kv, heads = kKeyRows ? p.num_heads_kv : p.num_heads;
  const int64_t cols = p.head_dim, seqlen = kKeyRows ? p.seqlen_kv : p.seqlen_q;
  const int64_t pieces = (cols + Tile::kOut - 1) / Tile::kOut, tiles = (seqlen + Tile::kRows - 1) / Tile::kRows;
  const int64_t first_col = int64_t(blockIdx.x) % pieces * Tile::kOut, block = int64_t(blockIdx.x) / pieces, item = block / tiles;
  const int64_t tile_of_rows = kKeyRows ? block % tiles : tiles - 1 - block % tiles;
  const int64_t first_row = tile_of_rows * Tile::kRows, batch = item / heads, head = item % heads;
  const auto column = [&](int c) { return first_col + kVector * (at.x + 16 * (c / kVector)) + c % kVector; };

  // Sums wait in shared memory, each thread's own, while the scores need the registers.
  const Rows<const T> own = rows_of<const T>(p, kKeyRows ? p.key : p.query, batch, head);
  double of_weight[kQuad] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = 0; i < kRowsOf; i++)
#pragma unroll
    for (int c = 0; c < kQuad; c++) sums[(at.row(i)) * Tile::kOutStride + int(column(c) - first_col)] = 0;

#pragma unroll 1
  for (int64_t query_head = kKeyRows ? head * group : head; query_head < (kKeyRows ? (head + 1) * group : head + 1); query_head++) {
    const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, query_head);
    const Rows<const T>& other = kKeyRows ? pairs.query : pairs.key;
    const int64_t seqlen_of_columns = kKeyRows ? p.seqlen_q : p.seqlen_kv;
    Real weight[kQuad];
#pragma unroll
    for (int c = 0; c < kQuad; c++) weight[c] = column(c) < cols ? product.weights[query_head * product.head_stride + column(c)] : Real(0);
    RowBounds bounds;
    if constexpr (!kKeyRows) bounds = table.bounds_of(batch, first_row, Pairs::kQueries);
#pragma unroll 1
    for (int64_t first = 0; first < seqlen_of_columns; first += Tile::kCols) {
      const int64_t first_query = kKeyRows ? first : first_row, first_key = kKeyRows ? first_row : first;
      if constexpr (kKeyRows) bounds = table.bounds_of(batch, first_query, Pairs::kQueries);
      if (!bounds.sees(first_key, first_key + Pairs::kKeys)) continue;
      const bool edge = pairs.edge(bounds, first_query, first_key);
      __syncthreads();  // all have left the tiles of the step before
      pairs.template compute<PairValue::kGradScore>(first_query, first_key, edge, left, right, kept, at, product, product_memory);
      __syncthreads();  // all have left the scores
      stage_exponentials<Tile::kCols, Tile::kOut, Tile::kOutStride, Tile::kThreads, true>(columns, less_ones, other, first_col, cols,
                                                                                          RowRange{first, seqlen_of_columns}, Real(-1), [](int, bool) {});
      __syncthreads();

      Real of_tile[kQuad] = {0, 0, 0, 0};
      const int count = int(min_of(int64_t(Tile::kCols), seqlen_of_columns - first));
#pragma unroll 1
      for (int i0 = 0; i0 < kRowsOf; i0 += kSweepRows) {
        // Exponentials of the thread's own rows, u = -1 where out of range.
        Real u[kSweepRows][kQuad], m[kSweepRows][kQuad], sum[kSweepRows][kQuad];
#pragma unroll
        for (int i = 0; i < kSweepRows; i++) {
          const int64_t row = first_row + at.row(i0 + i);
#pragma unroll
          for (int c = 0; c < kQuad; c++) {
            const Real x = row < seqlen && column(c) < cols ? to_real(*own.at(row, column(c))) : Real(0);
            const Exponential<Real> both = exponential<false>(x, Real(-1));
            u[i][c] = both.value, m[i][c] = both.less_one;
          }
          load_columns<Tile>(sum[i], sums + (at.row(i0 + i)) * Tile::kOutStride, at);
        }
#pragma unroll 1
        for (int j = 0; j < count; j++) {
          Real e[kQuad], positive[kQuad], negative[kQuad];
          load_columns<Tile>(e, columns + j * Tile::kOutStride, at);
          load_columns<Tile>(negative, less_ones + j * Tile::kOutStride, at);
          const bool missing = e[0] < 0 || e[1] < 0 || e[2] < 0 || e[3] < 0;
#pragma unroll
          for (int c = 0; c < kQuad; c++) positive[c] = larger(negative[c], Real(0)), negative[c] = smaller(negative[c], Real(0));
#pragma unroll
          for (int i = 0; i < kSweepRows; i++) {
            const Real grad = right[(at.row(i0 + i)) * Tile::kStride + j];
            Real t[kQuad], curve[kQuad];
            if (missing || u[i][0] < 0 || u[i][1] < 0 || u[i][2] < 0 || u[i][3] < 0) {
              if (is_hidden(grad)) continue;
              const int64_t row = first_row + at.row(i0 + i);
#pragma unroll
              for (int c = 0; c < kQuad; c++) {
                const bool exists = row < seqlen && column(c) < cols;
                t[c] = exists ? tanh(to_real(*own.at(row, column(c))) + to_real(*other.at(first + j, column(c)))) : Real(0);
                curve[c] = Real(1) - t[c] * t[c];
              }
            } else {
              Real n[kQuad], d[kQuad];
#pragma unroll
              for (int c = 0; c < kQuad; c++) n[c] = half_excess(u[i][c], m[i][c], e[c], positive[c], negative[c]), d[c] = n[c] + Real(1);
              const Real low = d[0] * d[1], high = d[2] * d[3], inverse = reciprocal(low * high);
              const Real inverse_low = high * inverse, inverse_high = low * inverse;
              const Real r[kQuad] = {d[1] * inverse_low, d[0] * inverse_low, d[3] * inverse_high, d[2] * inverse_high};
#pragma unroll
              for (int c = 0; c < kQuad; c++) t[c] = n[c] * r[c], curve[c] = r[c] * (r[c] * (n[c] + d[c]));
            }
#pragma unroll
            for (int c = 0; c < kQuad; c++) {
              sum[i][c] = multiply_add(grad * weight[c], curve[c], sum[i][c]);
              if constexpr (!kKeyRows) of_tile[c] = multiply_add(grad, t[c], of_tile[c]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kSweepRows; i++)
#pragma unroll
          for (int c = 0; c < kQuad; c++) sums[(at.row(i0 + i)) * Tile::kOutStride + int(column(c) - first_col)] = sum[i][c];
      }
      if constexpr (!kKeyRows) {
#pragma unroll
        for (int c = 0; c < kQuad; c++) of_weight[c] += double(of_tile[c]);
      }
    }
  }

  const TensorView& view = kKeyRows ? params.grad_key : params.grad_query;
  if (view.data) {
    const Rows<T> to = rows_of<T>(p, view, batch, head);
#pragma unroll 1
    for (int i = 0; i < kRowsOf; i++) {
      const int64_t row = first_row + at.row(i);
      if (row >= seqlen) continue;
      Real sum[kQuad];
      load_columns<Tile>(sum, sums + (at.row(i)) * Tile::kOutStride, at);
#pragma unroll
      for (int c = 0; c < kQuad; c += kVector) {
        Real part[kVector];
#pragma unroll
        for (int k = 0; k < kVector; k++) part[k] = sum[c + k];
        if (column(c) < cols) store_part<T, kVector>(to, row, column(c), cols, part);
      }
    }
  }
  if constexpr (!kKeyRows) {
    if (!weight_parts) return;
    // The eight threads of a column, in order.
    double* const shares = (double*)left;  // [8][kOut]
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kQuad; c++) shares[at.y * Tile::kOut + int(column(c) - first_col)] = of_weight[c];
    __syncthreads();
    const int64_t col = first_col + threadIdx.x;
    if (int(threadIdx.x) >= Tile::kOut || col >= cols) return;
    double total = 0;
#pragma unroll 1
    for (int y = 0; y < 8; y++) total += shares[y * Tile::kOut + threadIdx.x];
    weight_parts[(item * tiles + tile_of_rows) * cols + col] = total;
  }
}

constexpr int kWeightThreads = 128;

// grad_score_weight [head_dim] or [num_heads][head_dim]: a thread per element adds its parts up.
template <class Real>
__global__ void __launch_bounds__(kWeightThreads)
    additive_weight_kernel(const double* parts, int64_t batch, int64_t num_heads, int64_t tiles, int64_t head_dim, bool per_head, Real* grad) {
  const int64_t index = int64_t(blockIdx.x) * kWeightThreads + threadIdx.x;
  if (index >= (per_head ? num_heads : 1) * head_dim) return;
  const int64_t first = per_head ? index / head_dim : 0, last = per_head ? first + 1 : num_heads;
  double sum = 0;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t head = first; head < last; head++)
      for (int64_t tile = 0; tile < tiles; tile++) sum += parts[((b * num_heads + head) * tiles + tile) * head_dim + index % head_dim];
  grad[index] = Real(sum);
}

template <class T, bool kKeyRows>
void launch_additive_gradient(const AttentionBackwardParams& params, const RowTable& table, const RowStats<Real<T>>& stats,
                              const AdditiveProduct<Real<T>, kKeyRows>& product, double* weight_parts, Stream stream) {
  using Tile = FmaTile<T, 64, Products::kFma>;
  const AttentionParams& p = params.forward;
  const int64_t rows = kKeyRows ? p.seqlen_kv : p.seqlen_q, pieces = (p.head_dim + Tile::kOut - 1) / Tile::kOut;
  const int64_t blocks = pieces * ((rows + Tile::kRows - 1) / Tile::kRows) * p.batch * (kKeyRows ? p.num_heads_kv : p.num_heads);
  if (blocks == 0) return;
  SIMT_LAUNCH((additive_gradient_kernel<Tile, kKeyRows>), unsigned(blocks), Tile::kThreads, (kAdditiveGradientBytes<Tile, kKeyRows>), stream, params, table,
              stats, product, weight_parts);
}

}  // namespace

template <class T>
void launch_additive_fwd(const AdditiveAttentionParams& params, void* memory, Stream stream) {
  launch_fma_fwd<T, Products::kFma>(params.attention, AdditiveProduct<Real<T>>{(const Real<T>*)params.score_weight, params.weight_head_stride}, memory, stream);
}

template <class T>
void launch_additive_weights(const AdditiveAttentionWeightsParams& params, void* memory, Stream stream) {
  launch_weights<T, Products::kFma>(params.attention, AdditiveProduct<Real<T>>{(const Real<T>*)params.score_weight, params.weight_head_stride}, memory, stream);
}

template <class T>
void launch_additive_bwd(const AdditiveAttentionBackwardParams& additive, void* memory, Stream stream) {
  const AttentionBackwardParams& params = additive.attention;
  const AttentionParams& p = params.forward;
  Scratch scratch(memory);
  const AdditiveBackwardScratch parts(additive, &scratch);
  const RowTable& table = parts.attention.table;
  fill_row_table(p, table, stream);
  const AdditiveProduct<Real<T>> product{(const Real<T>*)additive.score_weight, additive.weight_head_stride};
  const AdditiveProduct<Real<T>, true> of_keys{product.weights, product.head_stride};
  const RowStats<Real<T>> stats{(Real<T>*)parts.attention.shift, (Real<T>*)parts.attention.lse, (Real<T>*)parts.attention.delta};
  StatsParams request;
  request.forward = p;
  request.num_rows = p.seqlen_q;
  request.grad_out = params.grad_out, request.grad_lse = params.grad_lse;
  launch_fma_stats<T, Products::kFma>(request, table, stats, product, stream);

  if (params.grad_query.data || parts.weight_parts) launch_additive_gradient<T, false>(params, table, stats, product, parts.weight_parts, stream);
  if (params.grad_key.data) launch_additive_gradient<T, true>(params, table, stats, of_keys, nullptr, stream);
  if (params.grad_value.data)
    launch_fma_gradient_of<T, Products::kFma, Gradient::kValue>(params, p.head_dim_v, table, ListingQueries(), stats, of_keys, stream);
  if (!additive.grad_score_weight || p.head_dim == 0) return;
  const bool per_head = additive.weight_head_stride != 0;
  const int64_t count = (per_head ? p.num_heads : 1) * p.head_dim;
  SIMT_LAUNCH(additive_weight_kernel<Real<T>>, blocks_of(count, kWeightThreads), kWeightThreads, 0, stream, parts.weight_parts, p.batch, p.num_heads,
              (p.seqlen_q + kAdditiveRows - 1) / kAdditiveRows, p.head_dim, per_head, (Real<T>*)additive.grad_score_weight);
}

}  // namespace cuda
}  // namespace tiled_attention
