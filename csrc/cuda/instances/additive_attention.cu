// Additive attention: the kernels of a dtype.

#include "../additive_attention_launch.h"
#include "../attention_weights.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int64_t kMaxBlocks = 0x7fffffff;
const char* const kTooManyBlocks = "more than 2^31 blocks of 64 rows over all heads";

int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
// Whether a product of sizes is at most kMaxBlocks.
bool fits(int64_t a, int64_t b, int64_t c) { return a <= kMaxBlocks && b <= kMaxBlocks && a * b <= kMaxBlocks && c <= kMaxBlocks && a * b * c <= kMaxBlocks; }
bool fits(const AttentionParams& p, int64_t row_tiles) {
  return fits(p.batch * p.num_heads, row_tiles, max_of(tiles(max_of(p.head_dim, p.head_dim_v), 32), int64_t(1)));
}

}  // namespace

size_t additive_attention_fwd_scratch(const AdditiveAttentionParams& params) {
  Scratch scratch(nullptr);
  take_row_table(params.attention, &scratch, false);
  return scratch.used;
}

const char* additive_attention_fwd(const AdditiveAttentionParams& params, void* scratch, Stream stream) {
  if (!fits(params.attention, tiles(params.attention.seqlen_q, 64))) return kTooManyBlocks;
  switch (params.attention.dtype) {
    case DType::kFloat32: launch_additive_fwd<float>(params, scratch, stream); break;
    case DType::kFloat64: launch_additive_fwd<double>(params, scratch, stream); break;
    case DType::kBFloat16: launch_additive_fwd<bf16>(params, scratch, stream); break;
    case DType::kFloat16: launch_additive_fwd<f16>(params, scratch, stream); break;
  }
  return nullptr;
}

size_t additive_attention_bwd_scratch(const AdditiveAttentionBackwardParams& params) {
  Scratch scratch(nullptr);
  AdditiveBackwardScratch parts(params, &scratch);
  return scratch.used;
}

const char* additive_attention_bwd(const AdditiveAttentionBackwardParams& params, void* scratch, Stream stream) {
  const AttentionParams& p = params.attention.forward;
  if (!fits(p, max_of(tiles(p.seqlen_q, 64), tiles(p.seqlen_kv, 32)))) return kTooManyBlocks;
  switch (p.dtype) {
    case DType::kFloat32: launch_additive_bwd<float>(params, scratch, stream); break;
    case DType::kFloat64: launch_additive_bwd<double>(params, scratch, stream); break;
    case DType::kBFloat16: launch_additive_bwd<bf16>(params, scratch, stream); break;
    case DType::kFloat16: launch_additive_bwd<f16>(params, scratch, stream); break;
  }
  return nullptr;
}

size_t additive_attention_weights_scratch(const AdditiveAttentionWeightsParams& params) {
  Scratch scratch(nullptr);
  WeightsScratch parts(params.attention, &scratch);
  return scratch.used;
}

const char* additive_attention_weights(const AdditiveAttentionWeightsParams& params, void* scratch, Stream stream) {
  const AttentionParams& p = params.attention.forward;
  if (!fits(p.batch * p.num_heads, tiles(params.attention.num_rows, 64), tiles(p.seqlen_kv, 32))) return "weights of more than 2^31 tiles of 64 x 32";
  switch (p.dtype) {
    case DType::kFloat32: launch_additive_weights<float>(params, scratch, stream); break;
    case DType::kFloat64: launch_additive_weights<double>(params, scratch, stream); break;
    case DType::kBFloat16: launch_additive_weights<bf16>(params, scratch, stream); break;
    case DType::kFloat16: launch_additive_weights<f16>(params, scratch, stream); break;
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
