// Rotary positions, Tensor side.

#include "backend.h"
#include "checks.h"

namespace tiled_attention {
namespace {

// rows, turned; dense in their order.
void rotate(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor rows = arguments.tensor("rows");
  Tensor table = arguments.tensor("table");
  RotateParams params;
  params.interleaved = arguments.scalar<bool>();
  params.transposed = arguments.scalar<bool>();
  const Backend backend("rotate", arguments.device());

  read(&rows);
  read(&table);
  params.dtype = dtype_of(rows);
  if (rows.rank < 3) fail("rows must have shape (..., num_heads, seqlen, head_dim), got ", rows.shape());
  params.num_heads = rows.size(-3), params.seqlen = rows.size(-2), params.head_dim = rows.size(-1);
  check_length("seqlen of rows", params.seqlen);
  check_head_dim("head_dim of rows", params.head_dim);
  check_dtype(table, real_dtype(rows.dtype));
  if (table.rank < 2 || table.size(-1) % 2 != 0 || table.size(-1) > params.head_dim) {
    fail("table must have an even number of columns, at most head_dim (", params.head_dim, "), got ", table.shape());
  }
  params.rotary_dim = table.size(-1);
  int64_t expected[kMaxRank];
  std::memcpy(expected, rows.sizes, static_cast<size_t>(rows.rank) * sizeof(int64_t));
  expected[rows.rank - 1] = params.rotary_dim;
  check_broadcastable(table, expected, rows.rank);
  if (table.stride(-1) != 1) make_contiguous(&table);

  Tensor out = empty_in_order_of(rows, "out", rows.dtype, params.head_dim);
  BatchDims batch_dims;
  batch_dims.add(rows, params.dtype, &params.rows);
  batch_dims.add(table, dtype_of(table), &params.table);
  batch_dims.add(out, params.dtype, &params.out);
  batch_dims.finish(rows.sizes, rows.rank - 3, &params);
  if (rows.numel() != 0) backend.rotate(params);
  stack[0] = out.release();
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) { m.impl("rotate", &tiled_attention::rotate); }
