#pragma once
// Tables of rotary positions: what operators check of them, and rows turned by a kernel of their own.

#include "checks.h"

namespace tiled_attention {

// Real, an even number of adjacent columns, at most head_dim of `rows`, and broadcastable to its other dimensions.
inline void check_table(Tensor* table, const Tensor& rows) {
  read(table);
  check_dtype(*table, real_dtype(rows.dtype));
  const int64_t head_dim = rows.size(-1);
  if (table->rank < 2 || table->size(-1) % 2 != 0 || table->size(-1) > head_dim) {
    fail(table->name, " must have an even number of columns, at most head_dim (", head_dim, "), got ", table->shape());
  }
  int64_t expected[kMaxRank];
  std::memcpy(expected, rows.sizes, static_cast<size_t>(rows.rank) * sizeof(int64_t));
  expected[rows.rank - 1] = table->size(-1);
  check_broadcastable(*table, expected, rows.rank);
  if (table->stride(-1) != 1) make_contiguous(table);
}

// rows (..., num_heads, seqlen, head_dim) to `out`, which is like it, and may be it; after check_table().
template <class Backend>
void rotate_rows(const Backend& backend, const Tensor& rows, const Tensor& table, bool interleaved, bool transposed, const Tensor& out) {
  RotateParams params;
  params.dtype = dtype_of(rows);
  params.interleaved = interleaved, params.transposed = transposed;
  params.num_heads = rows.size(-3), params.seqlen = rows.size(-2), params.head_dim = rows.size(-1), params.rotary_dim = table.size(-1);
  BatchDims batch_dims;
  batch_dims.add(rows, params.dtype, &params.rows);
  batch_dims.add(table, dtype_of(table), &params.table);
  batch_dims.add(out, params.dtype, &params.out);
  batch_dims.finish(rows.sizes, rows.rank - 3, &params);
  if (rows.numel() != 0) backend.rotate(params);
}

}  // namespace tiled_attention
