#include "../attention_fma_fwd.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_fma_fwd<f16, Products::kFma>(const AttentionParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
