#pragma once
// The kernels of cuda/, on the current stream of the device of a call, which is the current device meanwhile. Scratch memory returns to
// torch's allocator before the kernels have run: the allocator hands it on in the order of the stream.

#ifdef TILED_ATTENTION_BACKEND_EMULATED
#include <mutex>
#endif

#include "cuda/kernels.h"
#include "cuda/runtime.h"
#include "tensor.h"

namespace tiled_attention {

class Backend {
 public:
  static constexpr bool kTurnsRows = false;
  // `op` is named by errors.
  Backend(const char* op, int32_t device) : op_(op), device_(device), guard_(device), stream_(device::current_stream(device)) {}

  void attention_fwd(const AttentionParams& params) const { run(cuda::attention_fwd_scratch, cuda::attention_fwd, params); }
  void attention_bwd(const AttentionBackwardParams& params) const { run(cuda::attention_bwd_scratch, cuda::attention_bwd, params); }
  // Packed sequences: the same kernels.
  void attention_varlen_fwd(const AttentionParams& params) const { attention_fwd(params); }
  void attention_varlen_bwd(const AttentionBackwardParams& params) const { attention_bwd(params); }
  void attention_weights(const AttentionWeightsParams& params) const { run(cuda::attention_weights_scratch, cuda::attention_weights, params); }
  void attention_decode(const AttentionDecodeParams& params) const { run(cuda::attention_decode_scratch, cuda::attention_decode, params); }
  void cache_append(const CacheAppendParams& params) const { check(cuda::cache_append(params, stream_)); }
  void additive_attention_fwd(const AdditiveAttentionParams& params) const { run(cuda::additive_attention_fwd_scratch, cuda::additive_attention_fwd, params); }
  void additive_attention_bwd(const AdditiveAttentionBackwardParams& params) const {
    run(cuda::additive_attention_bwd_scratch, cuda::additive_attention_bwd, params);
  }
  void additive_attention_weights(const AdditiveAttentionWeightsParams& params) const {
    run(cuda::additive_attention_weights_scratch, cuda::additive_attention_weights, params);
  }
  void linear_fwd(const LinearAttentionParams& params) const { run(cuda::linear_fwd_scratch, cuda::linear_fwd, params); }
  void linear_bwd(const LinearAttentionBackwardParams& params) const { run(cuda::linear_bwd_scratch, cuda::linear_bwd, params); }
  // Packed sequences: the same kernels.
  void linear_varlen_fwd(const LinearAttentionParams& params) const { linear_fwd(params); }
  void linear_varlen_bwd(const LinearAttentionBackwardParams& params) const { linear_bwd(params); }
  void linear_step(const LinearAttentionParams& params) const { check(cuda::linear_step(params, stream_)); }
  void rotate(const RotateParams& params) const { check(cuda::rotate(params, stream_)); }
  void dropout_mask(const DropoutParams& params, const int64_t (&sizes)[4], void* keep) const {
    check(cuda::dropout_mask(params, sizes[0], sizes[1], sizes[2], sizes[3], static_cast<bool*>(keep), stream_));
  }
  void mask_dense(const MaskParams& params, const int64_t (&sizes)[3], void* visible) const {
    check(cuda::mask_dense(params, sizes[0], sizes[1], sizes[2], static_cast<bool*>(visible), stream_));
  }
  void blocks_dense(const AttentionParams& params, const int64_t* rows, int64_t num_rows, bool* visible) const {
    check(cuda::blocks_dense(params, rows, num_rows, visible, stream_));
  }
  // lse of rows without any key, and the gradient of their sinks.
  void lse_without_keys(const AttentionParams& params) const { check(cuda::lse_without_keys(params, stream_)); }
  void grad_sinks_without_keys(const AttentionBackwardParams& params) const { check(cuda::grad_sinks_without_keys(params, stream_)); }

 private:
  template <class Params>
  void run(size_t (*scratch_bytes)(const Params&), const char* (*kernel)(const Params&, void*, cuda::Stream), const Params& params) const {
    const Scratch scratch(scratch_bytes(params), 256, device_);
    check(kernel(params, scratch.data(), stream_));
  }

  void check(const char* problem) const {
    if (!problem) problem = cuda::launch_error();
    if (problem) fail("tiled_attention::", op_, ": ", problem);
  }

  const char* op_;
  int32_t device_;
#ifdef TILED_ATTENTION_BACKEND_EMULATED
  // The emulator runs one kernel at a time.
  inline static std::mutex emulator;
  std::lock_guard<std::mutex> lock_{emulator};
#endif
  device::Guard guard_;
  cuda::Stream stream_;
};

}  // namespace tiled_attention
