#include "../additive_attention_fwd.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t additive_attention_fwd_scratch(const AdditiveAttentionParams& p, const ThreadPool& pool) {
  return with_real_kernel<AdditiveForward>(p, p.attention, pool, scratch_bytes);
}
void additive_attention_fwd(const AdditiveAttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_real_kernel<AdditiveForward>(p, p.attention, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
