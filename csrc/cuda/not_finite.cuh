#pragma once
// Values that are inf or NaN behind a mask. On tensor cores a hidden pair counts as 0 x value, which would be NaN: where a tile holds such
// values they are taken as 0, and a second kernel adds what the visible pairs among them give. Nothing but inf and NaN comes of it.

#include "block_list.cuh"
#include "dropout.cuh"
#include "score.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <int kElements, int kThreads, class T>
SIMT_DEVICE void drop_not_finite(T* tile) {
#pragma unroll 1
  for (int i = int(threadIdx.x); i < kElements; i += kThreads) {
    if (!is_finite(simt::to_float(tile[i]))) tile[i] = T{0};
  }
}

constexpr int kNotFiniteThreads = 128, kNotFiniteBlocks = 1024;

// One warp per query of a head, in turns.
template <class T>
__global__ void __launch_bounds__(kNotFiniteThreads) add_not_finite(const __grid_constant__ AttentionParams p, const __grid_constant__ RowTable table) {
  if (*table.num_not_finite == 0) return;
  const int lane = int(threadIdx.x) % 32;
  const int64_t step = int64_t(gridDim.x) * (kNotFiniteThreads / 32), count = p.batch * p.num_heads * p.seqlen_q;
  for (int64_t index = int64_t(blockIdx.x) * (kNotFiniteThreads / 32) + threadIdx.x / 32; index < count; index += step) {
    const int64_t item = index / p.seqlen_q, row = index % p.seqlen_q, batch = item / p.num_heads, head = item % p.num_heads;
    const int64_t kv_head = head / (p.num_heads / p.num_heads_kv);
    const Segment queries = query_segment(p, batch), keys = key_segment(p, batch);
    if (row >= queries.length) continue;
    const uint8_t* const flags = table.not_finite + (batch * p.num_heads_kv + kv_head) * table.flag_tiles;
    const RowEntry visible = table.rows_of(batch)[row];
    const Scores<float> scores(p, batch, head);
    const HeadList list(p, batch, head);
    const Dropout dropout(p.dropout, batch, head);
    const Matrix<const T> query = matrix<const T>(p, p.query, batch, head).from(queries.begin);
    const Matrix<const T> key = matrix<const T>(p, p.key, batch, kv_head).from(keys.begin);
    const Matrix<const T> value = matrix<const T>(p, p.value, batch, kv_head).from(keys.begin);
    const Matrix<T> out = matrix<T>(p, p.out, batch, head).from(queries.begin);
    const float lse = ((const float*)p.lse)[lse_offset(p, batch, head) + queries.begin + row];
    for (int64_t tile = 0; tile < table.flag_tiles; tile++) {
      if (!flags[tile]) continue;
      static_assert(kFlagKeys == kListTile, "one word");
      const uint64_t word = list.word_at(row, tile * kFlagKeys);
      for (int64_t j = tile * kFlagKeys; j < min_of(keys.length, (tile + 1) * kFlagKeys); j++) {
        if (!visible.contains(int(j)) || !(word >> (j % kListTile) & 1)) continue;
        float product = 0;
        for (int64_t d = lane; d < p.head_dim; d += 32) {
          product += simt::to_float(query.row(row)[d * query.col_stride]) * simt::to_float(key.row(j)[d * key.col_stride]);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(0xffffffffu, product, offset);
        const float score = scores(product, row, j);
        if (score == minus_infinity(0.0f)) continue;
        const float weight = dropout.active && !dropout.keeps(row, j) ? 0.0f : simt::ex2((score - lse) * kLog2E);
        for (int64_t d = lane; d < p.head_dim_v; d += 32) {
          const float v = simt::to_float(value.row(j)[d * value.col_stride]);
          if (is_finite(v)) continue;
          T& to = out.row(row)[d * out.col_stride];
          to = simt::from_float<T>(simt::to_float(to) + weight * v);
        }
      }
    }
  }
}

}  // namespace

// After `out` and `lse` are written.
template <class T>
void add_values_that_are_not_finite(const AttentionParams& p, const RowTable& table, void* stream) {
  if (!table.not_finite) return;
  const int64_t blocks = min_of(int64_t(kNotFiniteBlocks), (p.batch * p.num_heads * p.seqlen_q + 3) / 4);
  SIMT_LAUNCH(add_not_finite<T>, unsigned(blocks), kNotFiniteThreads, 0, stream, p, table);
}

}  // namespace cuda
}  // namespace tiled_attention
