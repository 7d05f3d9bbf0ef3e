// Exact attention: tensor cores for 16-bit heads of up to 256, multiply-adds otherwise.

#include "../attention_bwd_launch.h"
#include "../attention_fma_launch.h"
#include "../attention_launch.h"
#include "../not_finite.cuh"
#include "../row_table.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int64_t kMaxMmaDim = 256;

bool uses_mma(const AttentionParams& p) {
  return (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && p.head_dim <= kMaxMmaDim && p.head_dim_v <= kMaxMmaDim;
}

template <class T, int D>
void launch(const AttentionParams& p, const RowTable& table, Stream stream) {
  if (needs_features(p)) launch_attention_fwd<T, D, true>(p, table, stream);
  else launch_attention_fwd<T, D, false>(p, table, stream);
}

template <class T>
void attention_fwd_mma(const AttentionParams& p, const RowTable& table, Stream stream) {
  fill_row_table(p, table, stream);
  flag_not_finite_tiles<T>(p, p.value, p.head_dim_v, table, stream);
  const int64_t dim = max_of(p.head_dim, p.head_dim_v);
  if (dim <= 64) launch<T, 64>(p, table, stream);
  else if (dim <= 128) launch<T, 128>(p, table, stream);
  else launch<T, 256>(p, table, stream);
  add_values_that_are_not_finite<T>(p, table, stream);
}

}  // namespace

size_t attention_fwd_scratch(const AttentionParams& p) {
  if (!uses_mma(p)) return attention_fwd_fma_scratch(p);
  Scratch scratch(nullptr);
  take_row_table(p, &scratch);
  return scratch.used;
}

const char* attention_fwd(const AttentionParams& p, void* memory, Stream stream) {
  if (!uses_mma(p)) return attention_fwd_fma(p, memory, stream);
  // The grid counts tiles of at least 64 queries in its first dimension.
  if ((p.seqlen_q + 63) / 64 * p.batch * p.num_heads > 0x7fffffff) return "more than 2^31 tiles of 64 queries over all heads";
  Scratch scratch(memory);
  const RowTable table = take_row_table(p, &scratch);
  if (p.dtype == DType::kBFloat16) attention_fwd_mma<bf16>(p, table, stream);
  else attention_fwd_mma<f16>(p, table, stream);
  return nullptr;
}

size_t attention_bwd_scratch(const AttentionBackwardParams& p) { return uses_mma(p.forward) ? attention_bwd_mma_scratch(p) : attention_bwd_fma_scratch(p); }

const char* attention_bwd(const AttentionBackwardParams& p, void* memory, Stream stream) {
  return uses_mma(p.forward) ? attention_bwd_mma(p, memory, stream) : attention_bwd_fma(p, memory, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
