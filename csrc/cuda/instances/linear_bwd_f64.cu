#include "../linear_bwd.cuh"

namespace tiled_attention {
namespace cuda {
template size_t linear_bwd_scratch_of<double>(const LinearAttentionBackwardParams&);
template const char* linear_bwd_of<double>(const LinearAttentionBackwardParams&, void*, Stream);
}  // namespace cuda
}  // namespace tiled_attention
