#include "../additive_attention.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_additive_fwd<bf16>(const AdditiveAttentionParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
