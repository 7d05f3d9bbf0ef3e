#pragma once
// The CUDA kernels: what an operator calls with device pointers in the params. The same functions run under the emulator, where device
// memory is ordinary memory and the stream is null.

#include "../core/params.h"

namespace tiled_attention {
namespace cuda {

// cudaStream_t
using Stream = void*;

// `scratch` is device memory, 256-byte aligned, as large as the function beside it says for the same params. Launches are asynchronous and
// ordered by the stream. The result is null, or a text that says what the kernel does not support.
size_t attention_fwd_scratch(const AttentionParams&);
const char* attention_fwd(const AttentionParams&, void* scratch, Stream);
size_t attention_bwd_scratch(const AttentionBackwardParams&);
const char* attention_bwd(const AttentionBackwardParams&, void* scratch, Stream);
size_t attention_weights_scratch(const AttentionWeightsParams&);
const char* attention_weights(const AttentionWeightsParams&, void* scratch, Stream);
size_t attention_decode_scratch(const AttentionDecodeParams&);
const char* attention_decode(const AttentionDecodeParams&, void* scratch, Stream);
const char* cache_append(const CacheAppendParams&, Stream);
size_t additive_attention_fwd_scratch(const AdditiveAttentionParams&);
const char* additive_attention_fwd(const AdditiveAttentionParams&, void* scratch, Stream);
size_t additive_attention_bwd_scratch(const AdditiveAttentionBackwardParams&);
const char* additive_attention_bwd(const AdditiveAttentionBackwardParams&, void* scratch, Stream);
size_t additive_attention_weights_scratch(const AdditiveAttentionWeightsParams&);
const char* additive_attention_weights(const AdditiveAttentionWeightsParams&, void* scratch, Stream);
size_t linear_fwd_scratch(const LinearAttentionParams&);
const char* linear_fwd(const LinearAttentionParams&, void* scratch, Stream);
size_t linear_bwd_scratch(const LinearAttentionBackwardParams&);
const char* linear_bwd(const LinearAttentionBackwardParams&, void* scratch, Stream);
// One token from the initial state to the final one, which may be the same memory.
const char* linear_step(const LinearAttentionParams&, Stream);
const char* rotate(const RotateParams&, Stream);
// keep[batch][num_heads][seqlen_q][seqlen_kv], 1 = kept.
const char* dropout_mask(const DropoutParams&, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, bool* keep, Stream);
// visible[batch][seqlen_q][seqlen_kv] by MaskParams alone.
const char* mask_dense(const MaskParams&, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible, Stream);
// visible[num_heads][num_rows][seqlen_kv]: what the lists of the params, those of heads, show some rows.
const char* blocks_dense(const AttentionParams&, const int64_t* rows, int64_t num_rows, bool* visible, Stream);

}  // namespace cuda
}  // namespace tiled_attention
