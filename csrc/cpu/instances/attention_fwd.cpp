#include "../attention_fwd.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t attention_fwd_scratch(const AttentionParams& p, const ThreadPool& pool) { return with_kernel<Forward>(p, p, pool, scratch_bytes); }
void attention_fwd(const AttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Forward>(p, p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
void attention_fwd_add(const AttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Forward>(p, p, pool, [&](auto kernel) {
    kernel.adds = true;
    kernel.run(scratch);
  });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
