#pragma once
// Exact attention backward on tensor cores, float16 and bfloat16: deterministic, nothing of size n x n is kept. The query side and the key side
// compute the scores each for itself, seven products instead of five, because no other way adds up without atomics or a second n x n.

#include "attention_bwd_bias.cuh"
#include "attention_bwd_key.cuh"
#include "attention_bwd_launch.h"
#include "attention_bwd_query.cuh"

namespace tiled_attention {
namespace cuda {

template <class T, int D, bool kFeatures>
void launch_pair_grads(const AttentionBackwardParams& params, const BackwardWork& work, Stream stream) {
  if (params.grad_query.data || params.grad_alibi_slopes || bias_is_full(params)) launch_query_grad<T, D, kFeatures>(params, work, stream);
  if (params.grad_key.data || params.grad_value.data) launch_key_grads<T, D, kFeatures>(params, work, stream);
}

template <class T, int D>
void launch_attention_bwd(const AttentionBackwardParams& params, const BackwardWork& work, Stream stream) {
  const AttentionParams& p = params.forward;
  const int64_t heads = p.batch * p.num_heads, stat_blocks = work.rows.padded / kStatRows;
  using RowTile = RowStatTile<T, D>;
  fill_row_table(p, work.table, stream);
  if (params.grad_key.data || params.grad_value.data) fill_listing_queries(p, work.listing, stream);
  flag_not_finite_tiles<T>(p, p.key, p.head_dim, work.table, stream);
  // Tiles of packed sequences have gaps between them.
  if (p.cu_seqlens_q && work.sink_parts) fill_zero(work.sink_parts, work.rows.count / kStatRows, stream);
  if (p.cu_seqlens_q && work.slope_parts) fill_zero(work.slope_parts, work.rows.count / kSlopeRows, stream);
  SIMT_LAUNCH(attention_bwd_heads_kernel, blocks_of(heads, kStatThreads), kStatThreads, 0, stream, params, work);
  SIMT_LAUNCH(attention_bwd_rows_kernel<RowTile>, unsigned(heads * stat_blocks), kStatThreads, 0, stream, params, work);
  // Parts of a head: [outer][num_heads][inner].
  const auto sum_heads = [&](void* out, const float* parts, int64_t rows, int64_t tiles) {
    if (p.cu_seqlens_q) sum_parts((float*)out, parts, 1, p.num_heads, work.rows.count / p.num_heads / rows, stream);
    else sum_parts((float*)out, parts, p.batch, p.num_heads, tiles, stream);
  };
  if (params.grad_sinks) sum_heads(params.grad_sinks, work.sink_parts, kStatRows, stat_blocks);
  if (work.bias_rows) sum_bias_rows(p, params.grad_bias, work.bias_rows, params.grad_bias.row_stride != 0 ? p.seqlen_q : stat_blocks, stream);
  if (bias_is_full(params)) fill_zero((float*)params.grad_bias.data, work.bias_elements, stream);
  if (needs_features(p)) launch_pair_grads<T, D, true>(params, work, stream);
  else launch_pair_grads<T, D, false>(params, work, stream);
  if (params.grad_alibi_slopes) sum_heads(params.grad_alibi_slopes, work.slope_parts, kSlopeRows, work.slope_tiles);
  if (!bias_has_columns(params) || bias_is_full(params)) return;
  if (is_by_distance(params.grad_bias)) return launch_distance_grad<T, D>(params, work, stream);
  launch_bias_grad<T, D>(params, work, stream);
  if (work.bias_parts) sum_parts((float*)params.grad_bias.data, work.bias_parts, work.bias_splits, work.bias_elements, 1, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
