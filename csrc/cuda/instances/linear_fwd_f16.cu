#include "../linear_fwd.cuh"

namespace tiled_attention {
namespace cuda {
template size_t linear_fwd_scratch_of<f16>(const LinearAttentionParams&);
template const char* linear_fwd_of<f16>(const LinearAttentionParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
