#pragma once
// The launches of additive attention that instances/ compiles, one file per dtype and direction, and the memory of its backward pass.

#include "attention_fma_pair_grads.cuh"

namespace tiled_attention {
namespace cuda {

constexpr int kAdditiveRows = 64;

struct AdditiveBackwardScratch {
  FmaBackwardScratch attention;
  double* weight_parts;  // [batch][num_heads][tiles of kAdditiveRows queries][head_dim]; null where not wanted

  AdditiveBackwardScratch(const AdditiveAttentionBackwardParams& params, Scratch* scratch) : attention(params.attention, scratch) {
    const AttentionParams& p = params.attention.forward;
    const int64_t parts = p.batch * p.num_heads * ((p.seqlen_q + kAdditiveRows - 1) / kAdditiveRows);
    weight_parts = params.grad_score_weight ? scratch->take<double>(parts * p.head_dim) : nullptr;
  }
};

template <class T>
void launch_additive_fwd(const AdditiveAttentionParams&, void* scratch, Stream);
template <class T>
void launch_additive_bwd(const AdditiveAttentionBackwardParams&, void* scratch, Stream);
template <class T>
void launch_additive_weights(const AdditiveAttentionWeightsParams&, void* scratch, Stream);

}  // namespace cuda
}  // namespace tiled_attention
