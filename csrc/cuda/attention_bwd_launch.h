#pragma once
// The backward pass of exact attention on tensor cores, and what its instances define.

#include "kernels.h"

namespace tiled_attention {
namespace cuda {

// float16 and bfloat16, head_dim and head_dim_v at most 256. Like attention_bwd() of kernels.h.
size_t attention_bwd_mma_scratch(const AttentionBackwardParams&);
const char* attention_bwd_mma(const AttentionBackwardParams&, void* scratch, Stream);

struct BackwardWork;
// D: head_dim and head_dim_v rounded up, 64, 128 or 256.
template <class T, int D>
void launch_attention_bwd(const AttentionBackwardParams&, const BackwardWork&, Stream);

}  // namespace cuda
}  // namespace tiled_attention
