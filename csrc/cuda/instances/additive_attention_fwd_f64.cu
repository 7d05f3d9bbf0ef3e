#include "../additive_attention.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_additive_fwd<double>(const AdditiveAttentionParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
