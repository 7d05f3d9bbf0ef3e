#include "../attention_weights.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t attention_weights_scratch(const AttentionWeightsParams& p, const ThreadPool& pool) { return with_kernel<Weights>(p, p.forward, pool, scratch_bytes); }
void attention_weights(const AttentionWeightsParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Weights>(p, p.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
