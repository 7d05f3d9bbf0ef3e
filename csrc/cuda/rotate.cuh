#pragma once
// Rotary positions: one thread per 16 bytes of each half of the pairs, bound by reading and writing the rows once.

#include "../core/mask.h"
#include "load.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int kRotateThreads = 256;
constexpr int64_t kMaxRotateBlocks = 1 << 20;

// `units` runs of kVec<T> pairs a row, and behind them runs of kVec<T> columns that are copied.
template <class T>
__global__ void __launch_bounds__(kRotateThreads) rotate_kernel(const __grid_constant__ RotateParams p, int64_t units, int64_t copies, int64_t count) {
  using R = Real<T>;
  constexpr int kN = kVec<T>;
  const int64_t half = p.rotary_dim / 2;
  for (int64_t i = int64_t(blockIdx.x) * kRotateThreads + threadIdx.x; i < count; i += int64_t(gridDim.x) * kRotateThreads) {
    const int64_t unit = i % (units + copies), line = i / (units + copies), row = line % p.seqlen, head = line / p.seqlen % p.num_heads;
    const int64_t batch = line / p.seqlen / p.num_heads;
    const Rows<const T> from = rows_of<const T>(p, p.rows, batch, head);
    const Rows<T> to = rows_of<T>(p, p.out, batch, head);
    if (unit >= units) {
      const Rows<const T> rest(from.data + p.rotary_dim * from.col_stride, from.row_stride, from.col_stride);
      const Rows<T> rest_out(to.data + p.rotary_dim * to.col_stride, to.row_stride, to.col_stride);
      const int64_t col = (unit - units) * kN, cols = p.head_dim - p.rotary_dim;
      R x[kN];
      load_vec<T>(rest, row, col, cols, x);
      store_vec<T>(rest_out, row, col, cols, x);
      continue;
    }
    const int64_t k = unit * kN;
    const Matrix<const R> table = matrix<const R>(p, p.table, batch, head);
    const R* cosines = table.row(row) + k;
    R a[kN], b[kN];
    if (p.interleaved) {
      R low[kN], high[kN];
      load_vec<T>(from, row, 2 * k, p.rotary_dim, low);
      load_vec<T>(from, row, 2 * k + kN, p.rotary_dim, high);
#pragma unroll
      for (int x = 0; x < kN; x++) a[x] = 2 * x < kN ? low[2 * x % kN] : high[2 * x % kN], b[x] = 2 * x < kN ? low[2 * x % kN + 1] : high[2 * x % kN + 1];
    } else {
      load_vec<T>(from, row, k, half, a);
      load_vec<T>(Rows<const T>(from.data + half * from.col_stride, from.row_stride, from.col_stride), row, k, half, b);
    }
#pragma unroll
    for (int x = 0; x < kN; x++) {
      const R cosine = k + x < half ? cosines[x] : R(0), s = k + x < half ? cosines[half + x] : R(0), sine = p.transposed ? -s : s;
      const R first = a[x] * cosine - b[x] * sine;
      b[x] = b[x] * cosine + a[x] * sine;
      a[x] = first;
    }
    if (p.interleaved) {
      R low[kN], high[kN];
#pragma unroll
      for (int x = 0; x < kN; x++) {
        low[x] = x % 2 == 0 ? a[x / 2] : b[x / 2];
        high[x] = x % 2 == 0 ? a[kN / 2 + x / 2] : b[kN / 2 + x / 2];
      }
      store_vec<T>(to, row, 2 * k, p.rotary_dim, low);
      if (2 * k + kN < p.rotary_dim) store_vec<T>(to, row, 2 * k + kN, p.rotary_dim, high);
    } else {
      store_vec<T>(to, row, k, half, a);
      store_vec<T>(Rows<T>(to.data + half * to.col_stride, to.row_stride, to.col_stride), row, k, half, b);
    }
  }
}

template <class T> void launch_rotate(const RotateParams& p, Stream stream) {
  constexpr auto kernel = &rotate_kernel<T>;
  const int64_t units = (p.rotary_dim / 2 + kVec<T> - 1) / kVec<T>, copies = (p.head_dim - p.rotary_dim + kVec<T> - 1) / kVec<T>;
  const int64_t count = p.batch * p.num_heads * p.seqlen * (units + copies);
  const int64_t blocks = min_of((count + kRotateThreads - 1) / kRotateThreads, kMaxRotateBlocks);
  if (count > 0) SIMT_LAUNCH(kernel, unsigned(blocks), kRotateThreads, 0, stream, p, units, copies, count);
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
