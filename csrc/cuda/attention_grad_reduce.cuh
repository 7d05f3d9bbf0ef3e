#pragma once
// Sums of partial gradients, always in the same order: over the blocks that made them, and over what a bias is broadcast along.

#include "../core/view.h"
#include "row_table.cuh"

namespace tiled_attention {
namespace cuda {

// Which (batch item, head) pairs share one slice of a gradient of bias: the dimensions with a stride are kept, the others are summed over.
struct BiasSlices {
  int64_t kept = 1, summed = 1;

  HOST_DEVICE BiasSlices(const AttentionParams& p, const TensorView& bias) {
    (bias.head_stride != 0 ? kept : summed) *= p.num_heads;
    for (int d = 0; d < p.num_batch_dims; d++) (bias.batch_strides[d] != 0 ? kept : summed) *= p.batch_sizes[d];
  }
  // Pair `item` in [0, summed) of slice `slice` in [0, kept).
  HOST_DEVICE static void find(const AttentionParams& p, const TensorView& bias, int64_t slice, int64_t item, int64_t* batch, int64_t* head) {
    const auto take = [&](bool kept, int64_t size) {
      const int64_t index = kept ? slice % size : item % size;
      if (kept) slice /= size;
      else item /= size;
      return index;
    };
    *head = take(bias.head_stride != 0, p.num_heads);
    *batch = 0;
    int64_t step = 1;
    for (int d = p.num_batch_dims - 1; d >= 0; d--, step *= p.batch_sizes[d + 1]) *batch += take(bias.batch_strides[d] != 0, p.batch_sizes[d]) * step;
  }
};

HOST_DEVICE int64_t floor_divide(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// Elements of a contiguous gradient of bias.
inline int64_t bias_elements(const AttentionParams& p, const TensorView& bias) {
  int64_t last = (p.num_heads - 1) * bias.head_stride + (p.seqlen_q - 1) * bias.row_stride + (p.seqlen_kv - 1) * bias.col_stride;
  for (int d = 0; d < p.num_batch_dims; d++) last += (p.batch_sizes[d] - 1) * bias.batch_strides[d];
  return last + 1;
}

// A gradient by distance is summed in tiles of rows x keys along diagonals of tiles, `width` sums for each: sum u of diagonal d is that of the
// pairs with j - i = (d - first) * keys + u - (rows - 1). Tiles of diagonal d: first key - first row = (d - first) * keys; keys divides rows.
struct DistanceGrid {
  int64_t rows, keys, width, first, diagonals;

  HOST_DEVICE DistanceGrid(const AttentionParams& p, int rows, int keys) : rows(rows), keys(keys), width(rows + keys) {
    first = (p.seqlen_q - 1) / rows * rows / keys;
    diagonals = first + (p.seqlen_kv + keys - 1) / keys;
  }
};

namespace {

constexpr int kReduceThreads = 128;

SIMT_DEVICE double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class Real>
__global__ void __launch_bounds__(kReduceThreads) fill_zero_kernel(Real* to, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i < count) to[i] = Real(0);
}

// out[i] = sum over a < outer of parts[a][i]: a thread per element.
template <class Real>
__global__ void __launch_bounds__(kReduceThreads) sum_slices_kernel(Real* out, const Real* parts, int64_t outer, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (i >= count) return;
  double sum = 0;
  for (int64_t a = 0; a < outer; a++) sum += double(parts[a * count + i]);
  out[i] = Real(sum);
}

// out[i] = sum over a < outer and c < inner of parts[a][i][c]: a warp per element.
template <class Real>
__global__ void __launch_bounds__(kReduceThreads) sum_parts_kernel(Real* out, const Real* parts, int64_t outer, int64_t count, int64_t inner) {
  const int64_t i = int64_t(blockIdx.x) * (kReduceThreads / 32) + threadIdx.x / 32;
  if (i >= count) return;
  double sum = 0;
  for (int64_t a = 0; a < outer; a++)
    for (int64_t c = threadIdx.x % 32; c < inner; c += 32) sum += double(parts[(a * count + i) * inner + c]);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) out[i] = Real(sum);
}

// values [batch][num_heads][length], summed over what `bias` is broadcast along. Where it has rows they are the rows of `values` and kept,
// otherwise all of `length` is summed. A warp per element.
template <class Real>
__global__ void __launch_bounds__(kReduceThreads) sum_bias_rows_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorView bias,
                                                                       BiasSlices slices, const Real* values, int64_t length) {
  const int64_t rows = bias.row_stride != 0 ? length : 1, index = int64_t(blockIdx.x) * (kReduceThreads / 32) + threadIdx.x / 32;
  if (index >= slices.kept * rows) return;
  const int64_t slice = index / rows, row = index % rows, inner = length / rows;
  int64_t batch, head;
  double sum = 0;
  for (int64_t e = threadIdx.x % 32; e < slices.summed * inner; e += 32) {
    BiasSlices::find(p, bias, slice, e / inner, &batch, &head);
    sum += double(values[(batch * p.num_heads + head) * length + row + e % inner]);
  }
  sum = warp_sum(sum);
  BiasSlices::find(p, bias, slice, 0, &batch, &head);
  if (threadIdx.x % 32 == 0) matrix<Real>(p, bias, batch, head).row(row)[0] = Real(sum);
}

// parts [batch][num_heads][diagonals][width], summed over what `bias` is broadcast along and over the diagonals that share a distance. A thread per
// element.
template <class Real>
__global__ void __launch_bounds__(kReduceThreads) sum_distances_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorView bias,
                                                                       BiasSlices slices, DistanceGrid grid, const Real* parts) {
  const int64_t distances = p.seqlen_q + p.seqlen_kv - 1, index = int64_t(blockIdx.x) * kReduceThreads + threadIdx.x;
  if (index >= slices.kept * distances) return;
  const int64_t slice = index / distances, distance = index % distances - (p.seqlen_q - 1);
  // u = distance - (d - first) * keys + rows - 1 in [0, rows + keys - 1)
  const int64_t last = min_of(grid.diagonals - 1, grid.first + floor_divide(distance + grid.rows - 1, grid.keys));
  int64_t batch, head;
  double sum = 0;
  for (int64_t e = 0; e < slices.summed; e++) {
    BiasSlices::find(p, bias, slice, e, &batch, &head);
    for (int64_t d = last; d >= 0; d--) {
      const int64_t u = distance - (d - grid.first) * grid.keys + grid.rows - 1;
      if (u >= grid.width - 1) break;
      sum += double(parts[((batch * p.num_heads + head) * grid.diagonals + d) * grid.width + u]);
    }
  }
  BiasSlices::find(p, bias, slice, 0, &batch, &head);
  matrix<Real>(p, bias, batch, head).data[distance * bias.col_stride] = Real(sum);
}

// The sums over the diagonals of a tile [rows][stride] in shared memory, all threads of the block having written it.
template <class Real>
SIMT_DEVICE void store_distances(const Real* tile, int rows, int keys, int stride, int threads, Real* to) {
  for (int u = int(threadIdx.x); u < rows + keys - 1; u += threads) {
    double sum = 0;
    for (int r = max_of(0, rows - 1 - u); r < min_of(rows, rows - 1 - u + keys); r++) sum += double(tile[r * stride + r + u - (rows - 1)]);
    to[u] = Real(sum);
  }
}

}  // namespace

// The gradient of a bias by distance from `parts`.
template <class Real>
void sum_distances(const AttentionParams& p, const TensorView& bias, const DistanceGrid& grid, const Real* parts, void* stream) {
  const BiasSlices slices(p, bias);
  SIMT_LAUNCH(sum_distances_kernel<Real>, blocks_of(slices.kept * (p.seqlen_q + p.seqlen_kv - 1), kReduceThreads), kReduceThreads, 0, stream, p, bias, slices,
              grid, parts);
}

template <class Real>
void fill_zero(Real* to, int64_t count, void* stream) {
  SIMT_LAUNCH(fill_zero_kernel<Real>, blocks_of(count, kReduceThreads), kReduceThreads, 0, stream, to, count);
}

// out [count] from parts [outer][count][inner].
template <class Real>
void sum_parts(Real* out, const Real* parts, int64_t outer, int64_t count, int64_t inner, void* stream) {
  if (inner == 1) SIMT_LAUNCH(sum_slices_kernel<Real>, blocks_of(count, kReduceThreads), kReduceThreads, 0, stream, out, parts, outer, count);
  else SIMT_LAUNCH(sum_parts_kernel<Real>, blocks_of(count, kReduceThreads / 32), kReduceThreads, 0, stream, out, parts, outer, count, inner);
}

// The gradient of a bias without columns from what each row, or each part of `length` parts of a head, adds to it.
template <class Real>
void sum_bias_rows(const AttentionParams& p, const TensorView& bias, const Real* values, int64_t length, void* stream) {
  const BiasSlices slices(p, bias);
  const int64_t elements = slices.kept * (bias.row_stride != 0 ? length : 1);
  SIMT_LAUNCH(sum_bias_rows_kernel<Real>, blocks_of(elements, kReduceThreads / 32), kReduceThreads, 0, stream, p, bias, slices, values, length);
}

}  // namespace cuda
}  // namespace tiled_attention
