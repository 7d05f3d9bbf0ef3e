#include "../attention_decode.cuh"

namespace tiled_attention {
namespace cuda {
template DecodePlan decode_plan_of<double>(const AttentionDecodeParams&);
template void launch_decode<double>(const AttentionDecodeParams&, const DecodePlan&, void*, Stream);
template void launch_cache_append<double>(const CacheAppendParams&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
