#include "../attention_bwd.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_bwd<bf16, 64>(const AttentionBackwardParams&, const BackwardWork&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
