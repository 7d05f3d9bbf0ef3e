#include "../attention_fma_fwd.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_fma_fwd<float, Products::kTf32>(const AttentionParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
