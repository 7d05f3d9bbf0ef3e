#pragma once
// Exact attention in Real: float32 and float64 in their own arithmetic, or float32 with products in tf32; 16 bit in float32; any head_dim. The
// dispatcher calls the plain functions; instances/ compiles the templates, one file per dtype and direction.

#include "kernels.h"

namespace tiled_attention {
namespace cuda {

// What makes products: multiply-adds, or tensor cores from float32 rounded to tf32.
enum class Products { kFma, kTf32 };

size_t attention_fwd_fma_scratch(const AttentionParams&);
const char* attention_fwd_fma(const AttentionParams&, void* scratch, Stream);
size_t attention_bwd_fma_scratch(const AttentionBackwardParams&);
const char* attention_bwd_fma(const AttentionBackwardParams&, void* scratch, Stream);

template <class T, Products kProducts>
void launch_attention_fma_fwd(const AttentionParams&, void* scratch, Stream);
template <class T, Products kProducts>
void launch_attention_fma_bwd(const AttentionBackwardParams&, void* scratch, Stream);
template <class T, Products kProducts>
void launch_attention_weights(const AttentionWeightsParams&, void* scratch, Stream);

}  // namespace cuda
}  // namespace tiled_attention
