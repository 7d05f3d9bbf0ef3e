#include "../dispatch.h"
#include "../linear_bwd_chunk.h"
#include "../linear_bwd_gated.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class F>
static auto with_linear_backward(const LinearAttentionBackwardParams& params, const ThreadPool& pool, const F& f) {
  return dispatch(params.forward.dtype, [&](auto element, auto) {
    using T = decltype(element);
    if (!params.forward.log_decay.data) return f(LinearBackward<T, LinearChunk<T, false>>(params, pool));
    if (!params.forward.decay_per_feature) return f(LinearBackward<T, LinearChunk<T, true>>(params, pool));
    return f(LinearBackward<T, LinearTokens<T>>(params, pool));
  });
}
size_t linear_bwd_scratch(const LinearAttentionBackwardParams& p, const ThreadPool& pool) { return with_linear_backward(p, pool, scratch_bytes); }
void linear_bwd(const LinearAttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_linear_backward(p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
