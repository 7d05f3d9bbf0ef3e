#include "../rotate.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

void rotate(const RotateParams& p, const ThreadPool& pool) {
  dispatch(p.dtype, [&](auto element, auto) { Rotate<decltype(element)>{p}.run(pool); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
