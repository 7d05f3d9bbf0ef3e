// Exact attention in Real, and the weights of chosen rows: the kernels of a dtype.

#include "../attention_fma_pair_grads.cuh"
#include "../attention_weights.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

// Grids count blocks of 64 rows, 32 columns of a result or 32 keys in one dimension.
constexpr int64_t kMaxBlocks = 0x7fffffff;
const char* const kTooManyBlocks = "more than 2^31 blocks of 64 rows over all heads";

int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
// Whether a product of sizes is at most kMaxBlocks.
bool fits(int64_t a, int64_t b, int64_t c) { return a <= kMaxBlocks && b <= kMaxBlocks && a * b <= kMaxBlocks && c <= kMaxBlocks && a * b * c <= kMaxBlocks; }
int64_t columns(const AttentionParams& p) { return max_of(tiles(max_of(p.head_dim, p.head_dim_v), 32), int64_t(1)); }

}  // namespace

size_t attention_fwd_fma_scratch(const AttentionParams& p) {
  Scratch scratch(nullptr);
  take_row_table(p, &scratch, false);
  return scratch.used;
}

const char* attention_fwd_fma(const AttentionParams& p, void* scratch, Stream stream) {
  if (!fits(p.batch * p.num_heads, tiles(p.seqlen_q, 64), columns(p))) return kTooManyBlocks;
  switch (p.dtype) {
    case DType::kFloat32:
      if (p.allow_tf32) launch_attention_fma_fwd<float, Products::kTf32>(p, scratch, stream);
      else launch_attention_fma_fwd<float, Products::kFma>(p, scratch, stream);
      break;
    case DType::kFloat64: launch_attention_fma_fwd<double, Products::kFma>(p, scratch, stream); break;
    case DType::kBFloat16: launch_attention_fma_fwd<bf16, Products::kFma>(p, scratch, stream); break;
    case DType::kFloat16: launch_attention_fma_fwd<f16, Products::kFma>(p, scratch, stream); break;
  }
  return nullptr;
}

size_t attention_bwd_fma_scratch(const AttentionBackwardParams& params) {
  Scratch scratch(nullptr);
  FmaBackwardScratch parts(params, &scratch);
  return scratch.used;
}

const char* attention_bwd_fma(const AttentionBackwardParams& params, void* scratch, Stream stream) {
  const AttentionParams& p = params.forward;
  const int64_t heads = p.batch * p.num_heads, query_tiles = tiles(p.seqlen_q, 64);
  if (!fits(heads, max_of(query_tiles, tiles(p.seqlen_kv, 32)), columns(p))) return kTooManyBlocks;
  if (bias_gradient(params) == BiasGradient::kPairs && !fits(BiasSlices(p, params.grad_bias).kept, query_tiles, tiles(p.seqlen_kv, 32)))
    return "a gradient of bias of more than 2^31 tiles of 64 x 32";
  if (bias_gradient(params) == BiasGradient::kDistances && !fits(heads, distance_grid(p).diagonals, 1))
    return "a gradient of bias of more than 2^31 diagonals of tiles over all heads";
  switch (p.dtype) {
    case DType::kFloat32:
      if (p.allow_tf32) launch_attention_fma_bwd<float, Products::kTf32>(params, scratch, stream);
      else launch_attention_fma_bwd<float, Products::kFma>(params, scratch, stream);
      break;
    case DType::kFloat64: launch_attention_fma_bwd<double, Products::kFma>(params, scratch, stream); break;
    case DType::kBFloat16: launch_attention_fma_bwd<bf16, Products::kFma>(params, scratch, stream); break;
    case DType::kFloat16: launch_attention_fma_bwd<f16, Products::kFma>(params, scratch, stream); break;
  }
  return nullptr;
}

size_t attention_weights_scratch(const AttentionWeightsParams& params) {
  Scratch scratch(nullptr);
  WeightsScratch parts(params, &scratch);
  return scratch.used;
}

const char* attention_weights(const AttentionWeightsParams& params, void* scratch, Stream stream) {
  const AttentionParams& p = params.forward;
  if (!fits(p.batch * p.num_heads, tiles(params.num_rows, 64), tiles(p.seqlen_kv, 32))) return "weights of more than 2^31 tiles of 64 x 32";
  switch (p.dtype) {
    case DType::kFloat32:
      if (p.allow_tf32) launch_attention_weights<float, Products::kTf32>(params, scratch, stream);
      else launch_attention_weights<float, Products::kFma>(params, scratch, stream);
      break;
    case DType::kFloat64: launch_attention_weights<double, Products::kFma>(params, scratch, stream); break;
    case DType::kBFloat16: launch_attention_weights<bf16, Products::kFma>(params, scratch, stream); break;
    case DType::kFloat16: launch_attention_weights<f16, Products::kFma>(params, scratch, stream); break;
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
