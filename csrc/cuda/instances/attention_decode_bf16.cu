#include "../attention_decode.cuh"

namespace tiled_attention {
namespace cuda {
template DecodePlan decode_plan_of<bf16>(const AttentionDecodeParams&);
template void launch_decode<bf16>(const AttentionDecodeParams&, const DecodePlan&, void*, Stream);
template void launch_cache_append<bf16>(const CacheAppendParams&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
