#pragma once
// The table of CPU kernels that each instruction set fills, and the choice between them.

#include "../core/params.h"

namespace tiled_attention {

// How a kernel gets its threads. run() calls body(context, worker) for every worker in [0, num_workers), at the same
// time if it can, one after the other if not, and returns when all are done.
struct ThreadPool {
  int num_workers = 1;
  void (*run)(int num_workers, void (*body)(void* context, int worker), void* context) = nullptr;
};

// `scratch` is 64-byte aligned and as large as the function beside it says for the same params and pool.
struct Kernels {
  const char* isa;  // "baseline", "avx2", "avx512", "avx512bf16"
  size_t (*attention_fwd_scratch)(const AttentionParams&, const ThreadPool&);
  void (*attention_fwd)(const AttentionParams&, const ThreadPool&, void* scratch);
  // Adds these keys to `out`, `lse` and `residual` over other keys; scratch as of attention_fwd.
  void (*attention_fwd_add)(const AttentionParams&, const ThreadPool&, void* scratch);
  size_t (*attention_bwd_scratch)(const AttentionBackwardParams&, const ThreadPool&);
  void (*attention_bwd)(const AttentionBackwardParams&, const ThreadPool&, void* scratch);
  // Adds to the gradients of query, key, value and slopes that are there; scratch as of attention_bwd.
  void (*attention_bwd_add)(const AttentionBackwardParams&, const ThreadPool&, void* scratch);
  size_t (*attention_weights_scratch)(const AttentionWeightsParams&, const ThreadPool&);
  void (*attention_weights)(const AttentionWeightsParams&, const ThreadPool&, void* scratch);
  size_t (*attention_decode_scratch)(const AttentionDecodeParams&, const ThreadPool&);
  void (*attention_decode)(const AttentionDecodeParams&, const ThreadPool&, void* scratch);
  void (*cache_append)(const CacheAppendParams&, const ThreadPool&);
  size_t (*additive_attention_fwd_scratch)(const AdditiveAttentionParams&, const ThreadPool&);
  void (*additive_attention_fwd)(const AdditiveAttentionParams&, const ThreadPool&, void* scratch);
  size_t (*additive_attention_bwd_scratch)(const AdditiveAttentionBackwardParams&, const ThreadPool&);
  void (*additive_attention_bwd)(const AdditiveAttentionBackwardParams&, const ThreadPool&, void* scratch);
  size_t (*additive_attention_weights_scratch)(const AdditiveAttentionWeightsParams&, const ThreadPool&);
  void (*additive_attention_weights)(const AdditiveAttentionWeightsParams&, const ThreadPool&, void* scratch);
  size_t (*linear_fwd_scratch)(const LinearAttentionParams&, const ThreadPool&);
  void (*linear_fwd)(const LinearAttentionParams&, const ThreadPool&, void* scratch);
  size_t (*linear_bwd_scratch)(const LinearAttentionBackwardParams&, const ThreadPool&);
  void (*linear_bwd)(const LinearAttentionBackwardParams&, const ThreadPool&, void* scratch);
  // One token from the initial state to the final one, which may be the same memory.
  void (*linear_step)(const LinearAttentionParams&, const ThreadPool&);
  void (*rotate)(const RotateParams&, const ThreadPool&);
  // keep[batch][num_heads][seqlen_q][seqlen_kv], 1 = kept.
  void (*dropout_mask)(const DropoutParams&, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, const ThreadPool&, bool* keep);
  // visible[batch][seqlen_q][seqlen_kv] by MaskParams alone.
  void (*mask_dense)(const MaskParams&, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible);
  // Multiply-adds of the unit that dtype runs on, from registers, on the calling thread: GFLOP/s.
  double (*peak)(DType);
};

// The kernels in use: the best this CPU can run, or the ones that TILED_ATTENTION_ISA or set_isa() names.
const Kernels& kernels();
// Null where `isa` is unknown or this CPU lacks it.
const Kernels* find_kernels(const char* isa);
void set_kernels(const Kernels& kernels);
// Names of the instruction sets this CPU runs, worst first; returns how many.
int available_isas(const char* (&names)[4]);

}  // namespace tiled_attention
