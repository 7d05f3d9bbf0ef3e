#pragma once
// The kernels of cpu/, on torch's threads. They return when they are done.

#include <cstring>
#include <limits>

#include "attention_varlen_cpu.h"
#include "core/block_list.h"
#include "cpu/kernels.h"
#include "linear_varlen_cpu.h"
#include "tensor.h"
#include "threads.h"

namespace tiled_attention {

class Backend {
 public:
  static constexpr bool kTurnsRows = true;  // turns query and key by RotaryParams
  Backend(const char* /*op*/, int32_t /*device*/) : table_(kernels()) {}

  void attention_fwd(const AttentionParams& params) const { run(table_.attention_fwd_scratch, table_.attention_fwd, params); }
  void attention_bwd(const AttentionBackwardParams& params) const { run(table_.attention_bwd_scratch, table_.attention_bwd, params); }
  // Add to the results that are there.
  void attention_fwd_add(const AttentionParams& params) const { run(table_.attention_fwd_scratch, table_.attention_fwd_add, params); }
  void attention_bwd_add(const AttentionBackwardParams& params) const { run(table_.attention_bwd_scratch, table_.attention_bwd_add, params); }
  // Packed sequences.
  void attention_varlen_fwd(const AttentionParams& params) const { run_packed(PackedAttention(table_, params, nullptr, thread_pool())); }
  void attention_varlen_bwd(const AttentionBackwardParams& params) const { run_packed(PackedAttention(table_, params.forward, &params, thread_pool())); }
  void attention_weights(const AttentionWeightsParams& params) const { run(table_.attention_weights_scratch, table_.attention_weights, params); }
  void attention_decode(const AttentionDecodeParams& params) const { run(table_.attention_decode_scratch, table_.attention_decode, params); }
  void cache_append(const CacheAppendParams& params) const { table_.cache_append(params, thread_pool()); }
  void additive_attention_fwd(const AdditiveAttentionParams& params) const {
    run(table_.additive_attention_fwd_scratch, table_.additive_attention_fwd, params);
  }
  void additive_attention_bwd(const AdditiveAttentionBackwardParams& params) const {
    run(table_.additive_attention_bwd_scratch, table_.additive_attention_bwd, params);
  }
  void additive_attention_weights(const AdditiveAttentionWeightsParams& params) const {
    run(table_.additive_attention_weights_scratch, table_.additive_attention_weights, params);
  }
  void linear_fwd(const LinearAttentionParams& params) const { run(table_.linear_fwd_scratch, table_.linear_fwd, params); }
  void linear_bwd(const LinearAttentionBackwardParams& params) const { run(table_.linear_bwd_scratch, table_.linear_bwd, params); }
  // Packed sequences.
  void linear_varlen_fwd(const LinearAttentionParams& params) const { run_packed(PackedLinear(table_, params, nullptr, thread_pool())); }
  void linear_varlen_bwd(const LinearAttentionBackwardParams& params) const { run_packed(PackedLinear(table_, params.forward, &params, thread_pool())); }
  void linear_step(const LinearAttentionParams& params) const { table_.linear_step(params, thread_pool()); }
  void rotate(const RotateParams& params) const { table_.rotate(params, thread_pool()); }
  void dropout_mask(const DropoutParams& params, const int64_t (&sizes)[4], void* keep) const {
    table_.dropout_mask(params, sizes[0], sizes[1], sizes[2], sizes[3], thread_pool(), static_cast<bool*>(keep));
  }
  void mask_dense(const MaskParams& params, const int64_t (&sizes)[3], void* visible) const {
    table_.mask_dense(params, sizes[0], sizes[1], sizes[2], static_cast<bool*>(visible));
  }

  // visible[num_heads][num_rows][seqlen_kv]: what the lists of `params`, those of heads, show some rows.
  void blocks_dense(const AttentionParams& params, const int64_t* rows, int64_t num_rows, bool* visible) const {
    const BlockList list{params.blocks, static_cast<const int32_t*>(params.blocks.rows.data)};
    for (int64_t h = 0; h < params.num_heads; ++h) {
      for (int64_t i = 0; i < num_rows; ++i, visible += params.seqlen_kv) {
        std::memset(visible, 0, static_cast<size_t>(params.seqlen_kv));
        const BlockList::Range range = list.range(h, rows[i]);
        for (const ListedTile* entry = range.begin; entry < range.end; ++entry) {
          const int64_t first = int64_t(entry->keys) * kListTile;
          for (int64_t j = first; j < first + kListTile && j < params.seqlen_kv; ++j) visible[j] = list.word(*entry, rows[i]) >> (j - first) & 1;
        }
      }
    }
  }

  // lse of rows without any key: the sink, or -inf.
  void lse_without_keys(const AttentionParams& params) const {
    params.dtype == DType::kFloat64 ? lse_without_keys<double>(params) : lse_without_keys<float>(params);
  }
  // Gradient of those rows: lse is the sink itself, so what arrives at lse passes on to it; a sink of -inf is no sink.
  void grad_sinks_without_keys(const AttentionBackwardParams& params) const {
    params.forward.dtype == DType::kFloat64 ? grad_sinks_without_keys<double>(params) : grad_sinks_without_keys<float>(params);
  }

 private:
  template <class Packed>
  static void run_packed(const Packed& packed) {
    const Scratch scratch(packed.scratch_bytes(), 64, 0);
    packed.run(scratch.data());
  }

  template <class Params>
  void run(size_t (*scratch_bytes)(const Params&, const ThreadPool&), void (*kernel)(const Params&, const ThreadPool&, void*), const Params& params) const {
    const ThreadPool pool = thread_pool();
    const Scratch scratch(scratch_bytes(params, pool), 64, 0);
    kernel(params, pool, scratch.data());
  }

  template <class Real>
  static void lse_without_keys(const AttentionParams& params) {
    Real* lse = static_cast<Real*>(params.lse);
    const Real* sinks = static_cast<const Real*>(params.sinks);
    for (int64_t bh = 0; bh < params.batch * params.num_heads; ++bh) {
      const Real value = sinks ? sinks[bh % params.num_heads] : -std::numeric_limits<Real>::infinity();
      for (int64_t i = 0; i < params.seqlen_q; ++i) *lse++ = value;
    }
  }

  template <class Real>
  static void grad_sinks_without_keys(const AttentionBackwardParams& params) {
    const AttentionParams& forward = params.forward;
    const Real* grad_lse = static_cast<const Real*>(params.grad_lse);
    const Real* sinks = static_cast<const Real*>(forward.sinks);
    Real* grad_sinks = static_cast<Real*>(params.grad_sinks);
    for (int64_t h = 0; h < forward.num_heads; ++h) grad_sinks[h] = 0;
    for (int64_t bh = 0; bh < forward.batch * forward.num_heads; ++bh) {
      const int64_t h = bh % forward.num_heads;
      if (sinks[h] == -std::numeric_limits<Real>::infinity()) continue;
      for (int64_t i = 0; i < forward.seqlen_q; ++i) grad_sinks[h] += grad_lse[bh * forward.seqlen_q + i];
    }
  }

  const Kernels& table_;
};

}  // namespace tiled_attention
