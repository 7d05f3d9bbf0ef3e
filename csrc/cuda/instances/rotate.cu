// Rotary positions: which dtype.

#include "../kernels.h"
#include "../rotate.cuh"

namespace tiled_attention {
namespace cuda {

const char* rotate(const RotateParams& p, Stream stream) {
  switch (p.dtype) {
    case DType::kFloat32: launch_rotate<float>(p, stream); break;
    case DType::kFloat64: launch_rotate<double>(p, stream); break;
    case DType::kBFloat16: launch_rotate<bf16>(p, stream); break;
    default: launch_rotate<f16>(p, stream);
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
