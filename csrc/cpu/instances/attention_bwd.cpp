#include "../attention_bwd.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t attention_bwd_scratch(const AttentionBackwardParams& p, const ThreadPool& pool) { return with_kernel<Backward>(p, p.forward, pool, scratch_bytes); }
void attention_bwd(const AttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Backward>(p, p.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
void attention_bwd_add(const AttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Backward>(p, p.forward, pool, [&](auto kernel) {
    kernel.adds = true;
    kernel.run(scratch);
  });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
