#pragma once
// What operators ask of the CUDA runtime besides the kernels of kernels.h. A text says what went wrong, null that nothing did.

#include "kernels.h"

namespace tiled_attention {
namespace cuda {

const char* fill_bytes(void* data, int byte, size_t bytes, Stream);
// Within the device.
const char* copy_bytes(void* to, const void* from, size_t bytes, Stream);
// Where seqlen_kv == 0, lse [batch][num_heads][seqlen_q] is the sink of the head, or -inf without sinks.
const char* lse_without_keys(const AttentionParams&, Stream);
// Where seqlen_kv == 0, grad_sinks is the sum of grad_lse, and 0 for a sink of -inf. Both sinks and grad_lse are given.
const char* grad_sinks_without_keys(const AttentionBackwardParams&, Stream);
// The error of the launches since the last call, which it clears.
const char* launch_error();
// What the kernels are compiled for, such as "sm_80 sm_90 compute_90".
const char* architectures();

}  // namespace cuda
}  // namespace tiled_attention
