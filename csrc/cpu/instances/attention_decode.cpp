#include "../attention_decode.h"
#include "../dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class F>
static auto with_decode(const AttentionDecodeParams& params, const ThreadPool& pool, const F& f) {
  return dispatch(params.attention.dtype, [&](auto element, auto unit) { return f(Decode<decltype(element), decltype(unit)>(params, pool)); });
}
size_t attention_decode_scratch(const AttentionDecodeParams& p, const ThreadPool& pool) { return with_decode(p, pool, scratch_bytes); }
void attention_decode(const AttentionDecodeParams& p, const ThreadPool& pool, void* scratch) {
  with_decode(p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
void cache_append(const CacheAppendParams& p, const ThreadPool& pool) {
  dispatch(p.dtype, [&](auto element, auto) { CacheAppend<decltype(element)>{p}.run(pool); });
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
