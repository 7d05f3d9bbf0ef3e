// runtime.h: memory, errors, and the rows without keys.

#include "../runtime.h"

#include <stdio.h>
#include <string.h>

#include "../fill.cuh"

// setup.py names the targets.
#ifndef TILED_ATTENTION_CUDA_ARCHS
#define TILED_ATTENTION_CUDA_ARCHS "emulated"
#endif

namespace tiled_attention {
namespace cuda {
namespace {

#if !SIMT_EMULATED
// The text stays until the same thread's next error.
const char* describe(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  static thread_local char text[512];
  int device = 0, major = 0, minor = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  if (known && (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidDeviceFunction)) {
    snprintf(text, sizeof(text),
             "tiled_attention was built for %s, which does not cover cuda:%d of compute capability %d.%d: rebuild it with TILED_ATTENTION_CUDA_ARCHS=%d%d (%s)",
             architectures(), device, major, minor, major, minor, cudaGetErrorString(error));
  } else {
    snprintf(text, sizeof(text), "CUDA error %s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
  }
  return text;
}
#endif

}  // namespace

#if SIMT_EMULATED
const char* fill_bytes(void* data, int byte, size_t bytes, Stream) {
  memset(data, byte, bytes);
  return nullptr;
}

const char* copy_bytes(void* to, const void* from, size_t bytes, Stream) {
  memcpy(to, from, bytes);
  return nullptr;
}

const char* launch_error() { return nullptr; }
#else
const char* fill_bytes(void* data, int byte, size_t bytes, Stream stream) {
  return describe(cudaMemsetAsync(data, byte, bytes, static_cast<cudaStream_t>(stream)));
}

const char* copy_bytes(void* to, const void* from, size_t bytes, Stream stream) {
  return describe(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)));
}

const char* launch_error() { return describe(cudaGetLastError()); }
#endif

const char* lse_without_keys(const AttentionParams& params, Stream stream) {
  params.dtype == DType::kFloat64 ? launch_lse_without_keys<double>(params, stream) : launch_lse_without_keys<float>(params, stream);
  return nullptr;
}

const char* grad_sinks_without_keys(const AttentionBackwardParams& params, Stream stream) {
  const bool is_double = params.forward.dtype == DType::kFloat64;
  is_double ? launch_grad_sinks_without_keys<double>(params, stream) : launch_grad_sinks_without_keys<float>(params, stream);
  return nullptr;
}

const char* architectures() { return TILED_ATTENTION_CUDA_ARCHS; }

}  // namespace cuda
}  // namespace tiled_attention
