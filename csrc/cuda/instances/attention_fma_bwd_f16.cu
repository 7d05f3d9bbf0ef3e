#include "../attention_fma_bwd.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_fma_bwd<f16, Products::kFma>(const AttentionBackwardParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
