#include "../attention_weights.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_weights<float, Products::kFma>(const AttentionWeightsParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
