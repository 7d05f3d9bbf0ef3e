// Rotary positions, Tensor side.

#include "backend.h"
#include "rotary_checks.h"

namespace tiled_attention {
namespace {

// rows, turned; dense in their order.
void rotate(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor rows = arguments.tensor("rows");
  Tensor table = arguments.tensor("table");
  const bool interleaved = arguments.scalar<bool>();
  const bool transposed = arguments.scalar<bool>();
  const Backend backend("rotate", arguments.device());

  read(&rows);
  dtype_of(rows);
  if (rows.rank < 3) fail("rows must have shape (..., num_heads, seqlen, head_dim), got ", rows.shape());
  check_length("seqlen of rows", rows.size(-2));
  check_head_dim("head_dim of rows", rows.size(-1));
  check_table(&table, rows);
  Tensor out = empty_in_order_of(rows, "out", rows.dtype, rows.size(-1));
  rotate_rows(backend, rows, table, interleaved, transposed, out);
  stack[0] = out.release();
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) { m.impl("rotate", &tiled_attention::rotate); }
