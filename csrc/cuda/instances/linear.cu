// Linear attention: which dtype.

#include "../linear_step.cuh"

namespace tiled_attention {
namespace cuda {

size_t linear_fwd_scratch(const LinearAttentionParams& p) {
  switch (p.dtype) {
    case DType::kFloat32: return linear_fwd_scratch_of<float>(p);
    case DType::kFloat64: return linear_fwd_scratch_of<double>(p);
    case DType::kBFloat16: return linear_fwd_scratch_of<bf16>(p);
    default: return linear_fwd_scratch_of<f16>(p);
  }
}

const char* linear_fwd(const LinearAttentionParams& p, void* scratch, Stream stream) {
  switch (p.dtype) {
    case DType::kFloat32: return linear_fwd_of<float>(p, scratch, stream);
    case DType::kFloat64: return linear_fwd_of<double>(p, scratch, stream);
    case DType::kBFloat16: return linear_fwd_of<bf16>(p, scratch, stream);
    default: return linear_fwd_of<f16>(p, scratch, stream);
  }
}

size_t linear_bwd_scratch(const LinearAttentionBackwardParams& p) {
  switch (p.forward.dtype) {
    case DType::kFloat32: return linear_bwd_scratch_of<float>(p);
    case DType::kFloat64: return linear_bwd_scratch_of<double>(p);
    case DType::kBFloat16: return linear_bwd_scratch_of<bf16>(p);
    default: return linear_bwd_scratch_of<f16>(p);
  }
}

const char* linear_bwd(const LinearAttentionBackwardParams& p, void* scratch, Stream stream) {
  switch (p.forward.dtype) {
    case DType::kFloat32: return linear_bwd_of<float>(p, scratch, stream);
    case DType::kFloat64: return linear_bwd_of<double>(p, scratch, stream);
    case DType::kBFloat16: return linear_bwd_of<bf16>(p, scratch, stream);
    default: return linear_bwd_of<f16>(p, scratch, stream);
  }
}

const char* linear_step(const LinearAttentionParams& p, Stream stream) {
  switch (p.dtype) {
    case DType::kFloat32: return linear_step_of<float>(p, stream);
    case DType::kFloat64: return linear_step_of<double>(p, stream);
    case DType::kBFloat16: return linear_step_of<bf16>(p, stream);
    default: return linear_step_of<f16>(p, stream);
  }
}

}  // namespace cuda
}  // namespace tiled_attention
