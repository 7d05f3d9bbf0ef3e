#include "../attention_decode.cuh"

namespace tiled_attention {
namespace cuda {
template DecodePlan decode_plan_of<f16>(const AttentionDecodeParams&);
template void launch_decode<f16>(const AttentionDecodeParams&, const DecodePlan&, void*, Stream);
template void launch_cache_append<f16>(const CacheAppendParams&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
