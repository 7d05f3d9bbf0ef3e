#include "../additive_attention.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_additive_weights<double>(const AdditiveAttentionWeightsParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
