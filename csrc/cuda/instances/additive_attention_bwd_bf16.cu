#include "../additive_attention.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_additive_bwd<bf16>(const AdditiveAttentionBackwardParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
