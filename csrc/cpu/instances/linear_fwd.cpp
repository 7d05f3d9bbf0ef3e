#include "../linear_fwd.h"
#include "../dispatch.h"
#include "../linear_gated.h"
#include "../linear_step.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Calls f with the kernel for the dtype and the kind of decay.
template <class F>
static auto with_linear_forward(const LinearAttentionParams& p, const ThreadPool& pool, const F& f) {
  return dispatch(p.dtype, [&](auto element, auto) {
    using T = decltype(element);
    if (!p.log_decay.data) return f(LinearForward<T, false>(p, pool));
    if (!p.decay_per_feature) return f(LinearForward<T, true>(p, pool));
    return f(LinearGatedForward<T>(p, pool));
  });
}
size_t linear_fwd_scratch(const LinearAttentionParams& p, const ThreadPool& pool) { return with_linear_forward(p, pool, scratch_bytes); }
void linear_fwd(const LinearAttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_linear_forward(p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
void linear_step(const LinearAttentionParams& p, const ThreadPool& pool) {
  dispatch(p.dtype, [&](auto element, auto) { LinearStep<decltype(element)>{p}.run(linear_workers(pool, p)); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
