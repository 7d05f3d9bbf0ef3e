#pragma once
// What each instruction set puts into its table of kernels; instances/*.cpp define them. Meaning and order as in kernels.h.

#include "kernels.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

size_t attention_fwd_scratch(const AttentionParams&, const ThreadPool&);
void attention_fwd(const AttentionParams&, const ThreadPool&, void* scratch);
void attention_fwd_add(const AttentionParams&, const ThreadPool&, void* scratch);
size_t attention_bwd_scratch(const AttentionBackwardParams&, const ThreadPool&);
void attention_bwd(const AttentionBackwardParams&, const ThreadPool&, void* scratch);
void attention_bwd_add(const AttentionBackwardParams&, const ThreadPool&, void* scratch);
size_t attention_weights_scratch(const AttentionWeightsParams&, const ThreadPool&);
void attention_weights(const AttentionWeightsParams&, const ThreadPool&, void* scratch);
size_t attention_decode_scratch(const AttentionDecodeParams&, const ThreadPool&);
void attention_decode(const AttentionDecodeParams&, const ThreadPool&, void* scratch);
void cache_append(const CacheAppendParams&, const ThreadPool&);
size_t additive_attention_fwd_scratch(const AdditiveAttentionParams&, const ThreadPool&);
void additive_attention_fwd(const AdditiveAttentionParams&, const ThreadPool&, void* scratch);
size_t additive_attention_bwd_scratch(const AdditiveAttentionBackwardParams&, const ThreadPool&);
void additive_attention_bwd(const AdditiveAttentionBackwardParams&, const ThreadPool&, void* scratch);
size_t additive_attention_weights_scratch(const AdditiveAttentionWeightsParams&, const ThreadPool&);
void additive_attention_weights(const AdditiveAttentionWeightsParams&, const ThreadPool&, void* scratch);
size_t linear_fwd_scratch(const LinearAttentionParams&, const ThreadPool&);
void linear_fwd(const LinearAttentionParams&, const ThreadPool&, void* scratch);
size_t linear_bwd_scratch(const LinearAttentionBackwardParams&, const ThreadPool&);
void linear_bwd(const LinearAttentionBackwardParams&, const ThreadPool&, void* scratch);
void linear_step(const LinearAttentionParams&, const ThreadPool&);
void rotate(const RotateParams&, const ThreadPool&);
void dropout_mask(const DropoutParams&, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, const ThreadPool&, bool* keep);
void mask_dense(const MaskParams&, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible);

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
