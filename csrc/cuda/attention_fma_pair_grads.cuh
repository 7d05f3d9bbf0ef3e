#pragma once
// Gradients of what is added to scores: bias, summed over what it broadcasts along, ALiBi slopes and sinks. Partial sums are written to scratch
// memory and added in one order.

#include "attention_fma_pairs.cuh"
#include "attention_grad_reduce.cuh"

namespace tiled_attention {
namespace cuda {

// How the gradient of bias is found. A bias that is the same for all keys of a row changes lse alone, and its gradient needs no pairs.
enum class BiasGradient { kNone, kPairs, kColumns, kRows, kDistances };

inline BiasGradient bias_gradient(const AttentionBackwardParams& params) {
  const TensorView& view = params.grad_bias;
  if (!view.data) return BiasGradient::kNone;
  if (is_by_distance(view)) return BiasGradient::kDistances;
  return view.col_stride == 0 ? BiasGradient::kRows : view.row_stride == 0 ? BiasGradient::kColumns : BiasGradient::kPairs;
}

constexpr int kSlopeRows = 64;
// Keys of the tiles along whose diagonals a gradient by distance is summed; they have kSlopeRows queries.
template <bool kDouble> constexpr int kDistanceKeys = kDouble ? 32 : 64;
inline DistanceGrid distance_grid(const AttentionParams& p) {
  return DistanceGrid(p, kSlopeRows, p.dtype == DType::kFloat64 ? kDistanceKeys<true> : kDistanceKeys<false>);
}

struct FmaBackwardScratch {
  RowTable table;
  ListingQueries listing;
  // Real [batch][num_heads][seqlen_q], or [num_heads][total_q] of packed sequences; the last two are null where not wanted.
  void *shift, *lse, *delta, *sink_sums, *row_sums;
  // Real [batch][num_heads][seqlen_kv] and [batch][num_heads][tiles of kSlopeRows queries]; null where not wanted. Packed sequences have
  // [num_heads][slope_tiles], item b from cu_seqlens_q[b] / kSlopeRows + b on.
  void *column_sums, *slope_sums;
  int64_t slope_tiles;
  void* distance_sums;  // Real, as sum_distances() reads them; null where not wanted

  FmaBackwardScratch(const AttentionBackwardParams& params, Scratch* scratch) {
    const AttentionParams& p = params.forward;
    const bool packed = p.cu_seqlens_q;
    const int64_t heads = packed ? p.num_heads : p.batch * p.num_heads, queries = packed ? p.total_q : p.seqlen_q;
    const BiasGradient bias = bias_gradient(params);
    const auto take = [&](bool wanted, int64_t count) -> void* {
      return wanted ? scratch->take<char>(heads * count * (p.dtype == DType::kFloat64 ? 8 : 4)) : nullptr;
    };
    table = take_row_table(p, scratch, false), listing = ListingQueries(p, scratch);
    shift = take(true, queries), lse = take(true, queries), delta = take(true, queries);
    sink_sums = take(params.grad_sinks, queries);
    row_sums = take(bias == BiasGradient::kRows, queries);
    column_sums = take(bias == BiasGradient::kColumns, p.seqlen_kv);
    slope_tiles = packed ? p.total_q / kSlopeRows + p.batch : (p.seqlen_q + kSlopeRows - 1) / kSlopeRows;
    slope_sums = take(params.grad_alibi_slopes, slope_tiles);
    const DistanceGrid distances = distance_grid(p);
    distance_sums = take(bias == BiasGradient::kDistances, distances.diagonals * distances.width);
  }
};

namespace {

template <class Tile>
using QueryPairs = PairTiles<Tile, false>;

// Blocks of a multiprocessor that the registers must leave room for. In tf32 ptxas aims at more on sm_100 and sm_120 unless told, and spills.
template <class Tile>
constexpr int kPairBlocks = Tile::kTensorCores || sizeof(typename Tile::T) != 4 ? 2 : 3;

// grad_bias with rows and columns: a block per tile of a slice adds up the heads that share it.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kPairBlocks<Tile>)
    attention_fma_bias_kernel(AttentionBackwardParams params, RowTable table, RowStats<typename Tile::Real> stats, BiasSlices slices) {
  using Real = typename Tile::Real;
  using Pairs = QueryPairs<Tile>;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t key_tiles = (p.seqlen_kv + Pairs::kKeys - 1) / Pairs::kKeys, query_tiles = (p.seqlen_q + Pairs::kQueries - 1) / Pairs::kQueries;
  const int64_t first_key = int64_t(blockIdx.x) % key_tiles * Pairs::kKeys, block = int64_t(blockIdx.x) / key_tiles;
  const int64_t first_query = block % query_tiles * Pairs::kQueries, slice = block / query_tiles;
  typename Tile::ThreadPairs sum;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) sum[i][j] = 0;
  int64_t batch, head;
#pragma unroll 1
  for (int64_t item = 0; item < slices.summed; item++) {
    BiasSlices::find(p, params.grad_bias, slice, item, &batch, &head);
    const RowBounds bounds = table.bounds_of(batch, first_query, Pairs::kQueries);
    if (!bounds.sees(first_key, first_key + Pairs::kKeys)) continue;
    const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, head);
    if (pairs.shown(first_query, first_key) == kListHidden) continue;
    pairs.template compute<PairValue::kGradScore>(first_query, first_key, pairs.edge(bounds, first_query, first_key), left, right, kept, at);
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) sum[i][j] += right[at.row(i) * Tile::kStride + at.x + 16 * j];
  }
  BiasSlices::find(p, params.grad_bias, slice, 0, &batch, &head);
  const Matrix<Real> to = matrix<Real>(p, params.grad_bias, batch, head);
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) {
      const int64_t query = first_query + at.row(i), key = first_key + at.x + 16 * j;
      if (query < p.seqlen_q && key < p.seqlen_kv) to.row(query)[key * to.col_stride] = sum[i][j];
    }
}

// column_sums: a block per head and tile of keys, over the queries.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kPairBlocks<Tile>)
    attention_fma_columns_kernel(AttentionBackwardParams params, RowTable table, RowStats<typename Tile::Real> stats, typename Tile::Real* column_sums) {
  using Real = typename Tile::Real;
  using Pairs = QueryPairs<Tile>;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t key_tiles = (p.seqlen_kv + Pairs::kKeys - 1) / Pairs::kKeys, item = int64_t(blockIdx.x) / key_tiles;
  const int64_t first_key = int64_t(blockIdx.x) % key_tiles * Pairs::kKeys, batch = item / p.num_heads, head = item % p.num_heads;
  const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, head);
  double sum[Tile::kThreadCols] = {};
#pragma unroll 1
  for (int64_t first_query = 0; first_query < p.seqlen_q; first_query += Pairs::kQueries) {
    const RowBounds bounds = table.bounds_of(batch, first_query, Pairs::kQueries);
    if (!bounds.sees(first_key, first_key + Pairs::kKeys) || pairs.shown(first_query, first_key) == kListHidden) continue;
    __syncthreads();
    pairs.template compute<PairValue::kGradScore>(first_query, first_key, pairs.edge(bounds, first_query, first_key), left, right, kept, at);
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) {
      Real of_tile = 0;
#pragma unroll
      for (int i = 0; i < Tile::kThreadRows; i++)
        if (first_query + at.row(i) < p.seqlen_q) of_tile += right[at.row(i) * Tile::kStride + at.x + 16 * j];
      sum[j] += double(of_tile);
    }
  }
  __syncthreads();
  double* const sums = (double*)left;  // [8][kKeys]
#pragma unroll
  for (int j = 0; j < Tile::kThreadCols; j++) sums[at.half_warp() * Pairs::kKeys + at.x + 16 * j] = sum[j];
  __syncthreads();
  const int64_t key = first_key + threadIdx.x;
  if (threadIdx.x >= Pairs::kKeys || key >= p.seqlen_kv) return;
  double total = 0;
  for (int y = 0; y < 8; y++) total += sums[y * Pairs::kKeys + threadIdx.x];
  column_sums[item * p.seqlen_kv + key] = Real(total);
}

// distance_sums: a block per head and diagonal of tiles, which have the same distances at the same places.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kPairBlocks<Tile>)
    attention_fma_distances_kernel(AttentionBackwardParams params, RowTable table, RowStats<typename Tile::Real> stats, typename Tile::Real* distance_sums) {
  using Real = typename Tile::Real;
  using Pairs = QueryPairs<Tile>;
  static_assert(Pairs::kQueries == kSlopeRows && Pairs::kKeys == kDistanceKeys<sizeof(Real) == 8>, "tiles of distance_sums");
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const DistanceGrid grid(p, Pairs::kQueries, Pairs::kKeys);
  const int64_t item = int64_t(blockIdx.x) / grid.diagonals, batch = item / p.num_heads, head = item % p.num_heads;
  const int64_t ahead = (int64_t(blockIdx.x) % grid.diagonals - grid.first) * Pairs::kKeys;  // first key - first query
  // Whole tiles of queries from 0 on: others would meet the pairs of other diagonals where a tile has fewer keys.
  const int64_t first_row = (max_of(int64_t(0), -ahead) + Pairs::kQueries - 1) / Pairs::kQueries * Pairs::kQueries;
  const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, head);
  typename Tile::ThreadPairs sum;
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) sum[i][j] = 0;
#pragma unroll 1
  for (int64_t first_query = first_row; first_query < p.seqlen_q && first_query + ahead < p.seqlen_kv; first_query += Pairs::kQueries) {
    const int64_t first_key = first_query + ahead;
    const RowBounds bounds = table.bounds_of(batch, first_query, Pairs::kQueries);
    if (!bounds.sees(first_key, first_key + Pairs::kKeys) || pairs.shown(first_query, first_key) == kListHidden) continue;
    __syncthreads();
    pairs.template compute<PairValue::kGradScore>(first_query, first_key, pairs.edge(bounds, first_query, first_key), left, right, kept, at);
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) {
        const bool inside = first_query + at.row(i) < p.seqlen_q && first_key + at.x + 16 * j < p.seqlen_kv;
        if (inside) sum[i][j] += right[at.row(i) * Tile::kStride + at.x + 16 * j];
      }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) right[at.row(i) * Tile::kStride + at.x + 16 * j] = sum[i][j];
  __syncthreads();
  store_distances(right, Pairs::kQueries, Pairs::kKeys, Tile::kStride, Tile::kThreads, distance_sums + int64_t(blockIdx.x) * grid.width);
}

// slope_sums: a block per head and tile of queries, over the keys.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kPairBlocks<Tile>)
    attention_fma_slopes_kernel(AttentionBackwardParams params, RowTable table, RowStats<typename Tile::Real> stats, typename Tile::Real* slope_sums,
                                int64_t slope_tiles) {
  using Real = typename Tile::Real;
  using Pairs = QueryPairs<Tile>;
  static_assert(Pairs::kQueries == kSlopeRows, "one sum a block");
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  Real* const left = carve.template take<Real>(Tile::kLeft);
  Real* const right = carve.template take<Real>(Tile::kRight);
  uint8_t* const kept = carve.template take<uint8_t>(Pairs::Kept::kBytes);
  Pairs* const shared_pairs = carve.template take<Pairs>(1);

  const AttentionParams& p = params.forward;
  const typename Tile::Place at;
  const int64_t query_tiles = (p.seqlen_q + Pairs::kQueries - 1) / Pairs::kQueries, item = int64_t(blockIdx.x) / query_tiles;
  const int64_t tile_of_item = int64_t(blockIdx.x) % query_tiles, first_query = tile_of_item * Pairs::kQueries;
  const int64_t batch = item / p.num_heads, head = item % p.num_heads;
  const Segment queries = query_segment(p, batch);
  if (first_query >= queries.length) return;
  const Pairs& pairs = in_shared(shared_pairs, params, table, stats, batch, head);
  const RowBounds bounds = table.bounds_of(batch, first_query, Pairs::kQueries);
  double sum = 0;
#pragma unroll 1
  for (int tile = -1; (tile = pairs.pairs.list.template next_tile<Pairs::kKeys>(bounds, first_query, tile + 1)) >= 0;) {
    const int64_t first_key = int64_t(tile) * Pairs::kKeys;
    __syncthreads();
    pairs.template compute<PairValue::kGradScore>(first_query, first_key, pairs.edge(bounds, first_query, first_key), left, right, kept, at);
    Real of_tile = 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) {
        const int r = at.row(i), c = at.x + 16 * j;
        if (first_query + r < pairs.seqlen_q) of_tile -= right[r * Tile::kStride + c] * pairs.pairs.scores.distance(first_query + r, first_key + c);
      }
    sum += double(of_tile);
  }
  __syncthreads();
  double* const sums = (double*)left;
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0;
  for (int i = 0; i < Tile::kThreads; i++) sum += sums[i];
  slope_sums[p.cu_seqlens_q ? head * slope_tiles + queries.begin / kSlopeRows + batch + tile_of_item : int64_t(blockIdx.x)] = Real(sum);
}

template <class T, Products kProducts>
void launch_fma_pair_grads(const AttentionBackwardParams& params, const FmaBackwardScratch& parts, const RowStats<Real<T>>& stats, Stream stream) {
  using Tile = FmaTile<T, 64, kProducts>;
  using Pairs = QueryPairs<Tile>;
  using R = Real<T>;
  const AttentionParams& p = params.forward;
  const int64_t heads = p.batch * p.num_heads, query_tiles = (p.seqlen_q + Pairs::kQueries - 1) / Pairs::kQueries,
                key_tiles = (p.seqlen_kv + Pairs::kKeys - 1) / Pairs::kKeys;
  switch (bias_gradient(params)) {
    case BiasGradient::kNone: break;
    case BiasGradient::kPairs: {
      const BiasSlices slices(p, params.grad_bias);
      SIMT_LAUNCH(attention_fma_bias_kernel<Tile>, unsigned(slices.kept * query_tiles * key_tiles), Tile::kThreads, (kPairBytes<Pairs, Tile>), stream, params,
                  parts.table, stats, slices);
      break;
    }
    case BiasGradient::kColumns: {
      R* const sums = (R*)parts.column_sums;
      SIMT_LAUNCH(attention_fma_columns_kernel<Tile>, unsigned(heads * key_tiles), Tile::kThreads, (kPairBytes<Pairs, Tile>), stream, params, parts.table,
                  stats, sums);
      TensorView columns = params.grad_bias;
      columns.row_stride = columns.col_stride;
      sum_bias_rows<R>(p, columns, sums, p.seqlen_kv, stream);
      break;
    }
    case BiasGradient::kDistances: {
      const DistanceGrid grid = distance_grid(p);
      R* const sums = (R*)parts.distance_sums;
      SIMT_LAUNCH(attention_fma_distances_kernel<Tile>, unsigned(heads * grid.diagonals), Tile::kThreads, (kPairBytes<Pairs, Tile>), stream, params,
                  parts.table, stats, sums);
      sum_distances<R>(p, params.grad_bias, grid, sums, stream);
      break;
    }
    case BiasGradient::kRows: sum_bias_rows<R>(p, params.grad_bias, (const R*)parts.row_sums, p.seqlen_q, stream);
  }
  TensorView of_heads;
  of_heads.head_stride = 1;
  // Sums of packed sequences are those of one item, with gaps between sequences, which count as 0.
  AttentionParams all = p;
  if (p.cu_seqlens_q) all.batch = 1;
  if (params.grad_alibi_slopes) {
    R* const sums = (R*)parts.slope_sums;
    if (p.cu_seqlens_q) fill_zero(sums, p.num_heads * parts.slope_tiles, stream);
    SIMT_LAUNCH(attention_fma_slopes_kernel<Tile>, unsigned(heads * query_tiles), Tile::kThreads, (kPairBytes<Pairs, Tile>), stream, params, parts.table, stats,
                sums, parts.slope_tiles);
    of_heads.data = params.grad_alibi_slopes;
    sum_bias_rows<R>(all, of_heads, sums, parts.slope_tiles, stream);
  }
  if (params.grad_sinks) {
    of_heads.data = params.grad_sinks;
    sum_bias_rows<R>(all, of_heads, (const R*)parts.sink_sums, p.cu_seqlens_q ? p.total_q : p.seqlen_q, stream);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
