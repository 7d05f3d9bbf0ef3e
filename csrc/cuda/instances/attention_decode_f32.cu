#include "../attention_decode.cuh"

namespace tiled_attention {
namespace cuda {
template DecodePlan decode_plan_of<float>(const AttentionDecodeParams&);
template void launch_decode<float>(const AttentionDecodeParams&, const DecodePlan&, void*, Stream);
template void launch_cache_append<float>(const CacheAppendParams&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
