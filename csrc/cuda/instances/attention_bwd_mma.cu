// The backward pass of exact attention on tensor cores: which instance.

#include "../attention_bwd_launch.h"
#include "../attention_bwd_rows.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <class T>
void launch(const AttentionBackwardParams& params, const BackwardWork& work, Stream stream) {
  switch (padded_head_dim(params.forward)) {
    case 64: return launch_attention_bwd<T, 64>(params, work, stream);
    case 128: return launch_attention_bwd<T, 128>(params, work, stream);
    default: return launch_attention_bwd<T, 256>(params, work, stream);
  }
}

}  // namespace

size_t attention_bwd_mma_scratch(const AttentionBackwardParams& params) {
  Scratch scratch(nullptr);
  take_backward_work(params, &scratch);
  return scratch.used;
}

const char* attention_bwd_mma(const AttentionBackwardParams& params, void* memory, Stream stream) {
  const AttentionParams& p = params.forward;
  // Grids count them in their first dimension.
  if ((p.seqlen_q + kPaddedRows - 1) / kPaddedRows * (kPaddedRows / kStatRows) * p.batch * p.num_heads > 0x7fffffff)
    return "more than 2^31 tiles of 32 queries over all heads";
  if ((p.seqlen_kv + 63) / 64 * p.batch * p.num_heads_kv > 0x7fffffff) return "more than 2^31 tiles of 64 keys over all heads";
  if (is_by_distance(params.grad_bias) && DistanceGrid(p, kBiasRows, bias_keys(padded_head_dim(p))).diagonals * p.batch * p.num_heads > 0x7fffffff)
    return "a gradient of bias of more than 2^31 diagonals of tiles over all heads";
  Scratch scratch(memory);
  const BackwardWork work = take_backward_work(params, &scratch);
  if (p.dtype == DType::kBFloat16) launch<bf16>(params, work, stream);
  else launch<f16>(params, work, stream);
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
