#pragma once
// Tables of rotary positions: what operators check of them, and rows turned by a kernel of their own.

#include "checks.h"

namespace tiled_attention {

// Real, an even number of adjacent columns, at most head_dim of `rows`.
inline void check_columns(Tensor* table, const Tensor& rows) {
  read(table);
  check_dtype(*table, real_dtype(rows.dtype));
  const int64_t head_dim = rows.size(-1);
  if (table->rank < 2 || table->size(-1) % 2 != 0 || table->size(-1) > head_dim) {
    fail(table->name, " must have an even number of columns, at most head_dim (", head_dim, "), got ", table->shape());
  }
  if (table->stride(-1) != 1) make_contiguous(table);
}

// A table that broadcasts to rows (..., num_heads, seqlen, head_dim), but for its columns.
inline void check_table(Tensor* table, const Tensor& rows) {
  check_columns(table, rows);
  int64_t expected[kMaxRank];
  std::memcpy(expected, rows.sizes, static_cast<size_t>(rows.rank) * sizeof(int64_t));
  expected[rows.rank - 1] = table->size(-1);
  check_broadcastable(*table, expected, rows.rank);
}

// Those of query and key: both or none, of as many columns. Returns whether they are given.
inline bool check_tables(Tensor* query_table, Tensor* key_table, const Tensor& query, const Tensor& key) {
  if (!*query_table && !*key_table) return false;
  if (!*query_table || !*key_table) fail("query_table and key_table must be given together, got only ", *query_table ? "query_table" : "key_table");
  check_columns(query_table, query);
  check_columns(key_table, key);
  if (key_table->size(-1) != query_table->size(-1)) {
    fail("key_table must have the columns of query_table (", query_table->size(-1), "), got ", key_table->shape());
  }
  return true;
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

// The same for packed rows (total, num_heads, head_dim) and a table (total, rotary_dim).
template <class Backend>
void rotate_packed(const Backend& backend, const Tensor& rows, const Tensor& table, bool interleaved, bool transposed, const Tensor& out) {
  RotateParams params;
  params.dtype = dtype_of(rows);
  params.interleaved = interleaved, params.transposed = transposed;
  params.seqlen = rows.size(0), params.num_heads = rows.size(1), params.head_dim = rows.size(2), params.rotary_dim = table.size(1);
  const auto view = [](const Tensor& tensor, DType dtype, int64_t head_stride, TensorView* to) {
    to->data = tensor.data, to->dtype = dtype;
    to->row_stride = tensor.stride(0), to->head_stride = head_stride, to->col_stride = tensor.stride(-1);
  };
  view(rows, params.dtype, rows.stride(1), &params.rows);
  view(table, dtype_of(table), 0, &params.table);
  view(out, params.dtype, out.stride(1), &params.out);
  if (rows.numel() != 0) backend.rotate(params);
}

}  // namespace tiled_attention
