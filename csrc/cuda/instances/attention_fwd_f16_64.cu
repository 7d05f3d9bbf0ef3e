#include "../attention_fwd.cuh"

namespace tiled_attention {
namespace cuda {
template void launch_attention_fwd<f16, 64, false>(const AttentionParams&, const RowTable&, Stream);
template void launch_attention_fwd<f16, 64, true>(const AttentionParams&, const RowTable&, Stream);
}  // namespace cuda
}  // namespace tiled_attention
