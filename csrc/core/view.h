#pragma once
// Where the elements of a TensorView lie.

#include "host_device.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// One (batch, head) matrix of a tensor.
template <class T>
struct Matrix {
  T* data;
  int64_t row_stride, col_stride;
  HOST_DEVICE T* row(int64_t i) const { return data + i * row_stride; }
  HOST_DEVICE Matrix from(int64_t i) const { return {row(i), row_stride, col_stride}; }
};
// Whether element (i, j) depends on j - i alone: a row of seqlen_q + seqlen_kv - 1 elements, from j - i = 1 - seqlen_q on.
HOST_DEVICE bool is_by_distance(const TensorView& view) { return view.col_stride != 0 && view.row_stride == -view.col_stride; }
template <class Params>
HOST_DEVICE int64_t batch_offset(const Params& p, const TensorView& view, int64_t batch) {
  int64_t offset = 0;
  for (int d = p.num_batch_dims - 1; d >= 0; d--) {
    offset += batch % p.batch_sizes[d] * view.batch_strides[d];
    batch /= p.batch_sizes[d];
  }
  return offset;
}
template <class T, class Params>
HOST_DEVICE Matrix<T> matrix(const Params& p, const TensorView& view, int64_t batch, int64_t head) {
  return {(T*)view.data + batch_offset(p, view, batch) + head * view.head_stride, view.row_stride, view.col_stride};
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
