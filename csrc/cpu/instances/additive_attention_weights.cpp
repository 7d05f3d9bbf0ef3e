#include "../additive_attention_weights.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t additive_attention_weights_scratch(const AdditiveAttentionWeightsParams& p, const ThreadPool& pool) {
  return with_real_kernel<AdditiveWeights>(p, p.attention.forward, pool, scratch_bytes);
}
void additive_attention_weights(const AdditiveAttentionWeightsParams& p, const ThreadPool& pool, void* scratch) {
  with_real_kernel<AdditiveWeights>(p, p.attention.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
