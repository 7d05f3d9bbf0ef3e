#include "../additive_attention_bwd.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t additive_attention_bwd_scratch(const AdditiveAttentionBackwardParams& p, const ThreadPool& pool) {
  return with_real_kernel<AdditiveBackward>(p, p.attention.forward, pool, scratch_bytes);
}
void additive_attention_bwd(const AdditiveAttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_real_kernel<AdditiveBackward>(p, p.attention.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
