// Attention over a cache, and what is appended to one: the kernels of a dtype.

#include "../attention_decode_launch.h"
#include "../device.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;

template <class F>
auto with_element(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64: return f(double());
    case DType::kBFloat16: return f(bf16());
    case DType::kFloat16: return f(f16());
    default: return f(float());
  }
}

DecodePlan plan_of(const AttentionDecodeParams& params) {
  return with_element(params.attention.dtype, [&](auto element) { return decode_plan_of<decltype(element)>(params); });
}

}  // namespace

size_t attention_decode_scratch(const AttentionDecodeParams& params) {
  Scratch scratch(nullptr);
  DecodeScratch(params.attention, plan_of(params), &scratch);
  return scratch.used;
}

const char* attention_decode(const AttentionDecodeParams& params, void* scratch, Stream stream) {
  const DecodePlan plan = plan_of(params);
  if (plan.blocks(params.attention) > kMaxBlocks || plan.rows > kMaxBlocks) return "more than 2^31 blocks of 8 rows over all heads and splits";
  with_element(params.attention.dtype, [&](auto element) { launch_decode<decltype(element)>(params, plan, scratch, stream); });
  return nullptr;
}

const char* cache_append(const CacheAppendParams& params, Stream stream) {
  if (params.batch * params.num_heads_kv > kMaxBlocks || params.batch * params.num_heads_kv * params.cache.num_new > kMaxBlocks) {
    return "more than 2^31 new rows over all heads";
  }
  with_element(params.dtype, [&](auto element) { launch_cache_append<decltype(element)>(params, stream); });
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
