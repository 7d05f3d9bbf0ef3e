#pragma once
// Exact attention forward on tensor cores, float16 and bfloat16: one block per (batch item, query head, kRows queries), keys and values
// in tiles of kKeys through shared memory, scores and weights in registers only.

#include "attention_launch.h"
#include "block_list.cuh"
#include "dropout.cuh"
#include "not_finite.cuh"
#include "row_table.cuh"
#include "score.cuh"
#include "tile.cuh"

namespace tiled_attention {
namespace cuda {

// D is head_dim and head_dim_v, rounded up. kFeatures: needs_features().
template <class T_, int D_, bool kFeatures_>
struct ForwardTile {
  using T = T_;
  static constexpr int D = D_, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr bool kFeatures = kFeatures_;
  // Two sets of 16 rows a warp share every fragment of keys and values, where their accumulators fit in registers.
  static constexpr int kSets = D <= 128 && !kFeatures ? 2 : 1;
  static constexpr int kRows = 16 * kSets * kWarps;
  // Scores of 32 x 64 a warp beside 32 x 128 of output do not fit.
  static constexpr int kKeys = kSets * D == 256 && kSets == 2 ? 32 : 64;
  static_assert(kFlagKeys % kKeys == 0, "a tile of keys has one flag");
  static_assert(!kFeatures || (kRows == kListTile && kKeys == kListTile), "a tile of a list");
  // What is needed once per tile of keys lies in shared memory: the accumulators leave few registers.
  struct Block {
    Matrix<const T> key, value;
    int64_t seqlen_kv;
    const uint8_t* not_finite;
    RowBounds bounds;
    float sums[kSets * 2][kThreads];  // each lane's share of its row sums, of the weights as they are rounded
    float exact_sums[kRows];          // row sums of the weights as they were, for lse
  };
  // Queries (later the output), keys, values, what the rows see, and with features the list.
  static constexpr int kSharedBytes =
      (kRows + 2 * kKeys) * D * int(sizeof(T)) + kRows * int(sizeof(RowEntry)) + (int(sizeof(Block)) + 15) / 16 * 16 + (kFeatures ? int(sizeof(HeadList)) : 0);
};

namespace {

// Rows g and g + 8 of each set; columns 2 t and 2 t + 1 of each 8 columns.
template <class Tile>
struct ForwardState {
  static constexpr int kScoreTiles = Tile::kKeys / 8, kOutTiles = Tile::D / 8;
  float out[Tile::kSets][kOutTiles][4] = {};
  float max[Tile::kSets][2];  // of the scores; without features in units of log 2
};

// Which queries a block computes. Late ones see most keys where the mask is causal: they start first.
struct ForwardItem {
  int64_t batch, head;
  int first_query;
  SIMT_DEVICE ForwardItem(const AttentionParams& p, int rows) {
    const int64_t tiles = (p.seqlen_q + rows - 1) / rows, index = block_index(), item = index / tiles;
    batch = item / p.num_heads, head = item % p.num_heads;
    first_query = int(tiles - 1 - index % tiles) * rows;
  }
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_fwd_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ RowTable table) {
  using T = typename Tile::T;
  constexpr int D = Tile::D, kSets = Tile::kSets, kKeys = Tile::kKeys, kRows = Tile::kRows, kThreads = Tile::kThreads;
  constexpr int kScoreTiles = kKeys / 8, kOutTiles = D / 8;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  T* const queries = carve.template take<T>(kRows * D);
  T* const keys = carve.template take<T>(kKeys * D);
  T* const values = carve.template take<T>(kKeys * D);
  RowEntry* const rows = carve.template take<RowEntry>(kRows);
  typename Tile::Block* const block = carve.template take<typename Tile::Block>(1);
  HeadList* const list = carve.template take<HeadList>(Tile::kFeatures ? 1 : 0);

  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const ForwardItem item(p, kRows);
  const int64_t batch = item.batch, head = item.head, kv_head = head / (p.num_heads / p.num_heads_kv);
  const int first_query = item.first_query, warp_query = first_query + warp * kSets * 16;
  const Segment of_queries = query_segment(p, batch), of_keys = key_segment(p, batch);
  if (first_query >= of_queries.length) return;
  const RowBounds bounds = table.bounds_of(batch, first_query, kRows);
  if (threadIdx.x == 0) {
    block->key = matrix<const T>(p, p.key, batch, kv_head).from(of_keys.begin);
    block->value = matrix<const T>(p, p.value, batch, kv_head).from(of_keys.begin);
    block->seqlen_kv = of_keys.length;
    block->not_finite = table.flags_of(batch * p.num_heads_kv + kv_head);
    block->bounds = bounds;
    if (Tile::kFeatures) *list = HeadList(p, batch, head);
  }

  ForwardState<Tile> state;
  const float sink = p.sinks ? ((const float*)p.sinks)[head] * (Tile::kFeatures ? 1.0f : kLog2E) : minus_infinity(0.0f);
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      state.max[s][r] = sink;
      block->sums[s * 2 + r][threadIdx.x] = t == 0 && sink != minus_infinity(0.0f) ? 1.0f : 0.0f;
      if (t == 0) block->exact_sums[(warp * kSets + s) * 16 + g + 8 * r] = sink != minus_infinity(0.0f) ? 1.0f : 0.0f;
    }
  // The power of two that a score stands for. Without features one multiply-add; with them scores may be near the largest float.
  const float unit = float(p.scale) * kLog2E;
  const auto power = [&](float score, float base) { return simt::ex2(Tile::kFeatures ? (score - base) * kLog2E : fmaf(score, unit, -base)); };
  int tile = bounds.next_tile(0, kKeys);
  if constexpr (Tile::kFeatures) tile = HeadList(p, batch, head).next_tile<kKeys>(bounds, first_query, 0);

  const Fragments<D> query_fragments = Fragments<D>::a(queries, warp * kSets * 16, lane), key_fragments = Fragments<D>::b_transposed(keys, lane),
                     value_fragments = Fragments<D>::b(values, lane);

  static_assert(kRows <= kThreads, "one row of the table per thread");
  if (int(threadIdx.x) < kRows) {
    const int64_t row = first_query + int64_t(threadIdx.x);
    rows[threadIdx.x] = row < of_queries.length ? table.rows_of(batch)[row] : RowEntry{0, 0, 0, 0};
  }
  const TileMatrix<const T> query(matrix<const T>(p, p.query, batch, head).from(of_queries.begin), of_queries.length, p.head_dim);
  load_tile<D, kRows, kThreads>(queries, query, first_query);
  if (tile >= 0) {
    const TileMatrix<const T> key(matrix<const T>(p, p.key, batch, kv_head).from(of_keys.begin), of_keys.length, p.head_dim);
    load_tile<D, kKeys, kThreads>(keys, key, int64_t(tile) * kKeys);
  }
  simt::cp_async_commit();

  while (tile >= 0) {
    const int first_key = tile * kKeys;
    // Keys are there, and all warps have left the values of the tile before.
#if SIMT_FAULT != 2
    simt::cp_async_wait<0>();
#endif
#if SIMT_FAULT != 1
    __syncthreads();
#endif
    load_tile<D, kKeys, kThreads>(values, TileMatrix<const T>(block->value, block->seqlen_kv, p.head_dim_v), first_key);
    simt::cp_async_commit();

    PairTile<kSets, kScoreTiles> score;
    clear<kSets, kScoreTiles>(score);
    multiply_transposed<T, D, kSets, kScoreTiles>(score, query_fragments, key_fragments);

    // Scores in natural units with features, in units of 1 / scale without; -inf where hidden.
    const bool edge = !block->bounds.covers(first_key, first_key + kKeys);
    if constexpr (Tile::kFeatures) {
      const Scores<float> scores(p, batch, head);
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int row = warp_query + s * 16 + g + 8 * (i >> 1), column = first_key + n * 8 + 2 * t + (i & 1);
            score[s][n][i] = row < p.seqlen_q && column < p.seqlen_kv ? scores(score[s][n][i], row, column) : minus_infinity(0.0f);
          }
      const int shown = list->state(first_query, first_key);
      if (shown != kListFull) {
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const uint64_t word = list->word(shown, warp_query + s * 16 + g + 8 * r) >> (2 * t);
#pragma unroll
            for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
              for (int c = 0; c < 2; c++) {
                if (!(word >> (n * 8 + c) & 1)) score[s][n][2 * r + c] = minus_infinity(0.0f);
              }
          }
      }
    }
    if (edge) {
      const int thread = thread_index();
      const RowEntry* const first_row = rows + thread / 32 * kSets * 16 + thread % 32 / 4;
      const int column = first_key + thread % 4 * 2;
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const RowEntry visible = first_row[s * 16 + 8 * r];
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
#if SIMT_FAULT == 4
              if (!visible.contains(column + n * 8 + c + 1)) score[s][n][2 * r + c] = minus_infinity(0.0f);
#else
              if (!visible.contains(column + n * 8 + c)) score[s][n][2 * r + c] = minus_infinity(0.0f);
#endif
            }
        }
    }

    // Online softmax. The output is divided by sums of the weights as they are rounded, lse has those of the weights as they were.
    PackedTile<kSets, kScoreTiles> weights;
    const int row_of_lane = thread_index() / 32 * kSets * 16 + thread_index() % 32 / 4;
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float top = score[s][0][2 * r];
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) top = fmaxf(top, fmaxf(score[s][n][2 * r], score[s][n][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        top = fmaxf(state.max[s][r], Tile::kFeatures ? top : top * unit);
        const float base = top == minus_infinity(0.0f) ? 0.0f : top;
        const float shrink = simt::ex2((state.max[s][r] - base) * (Tile::kFeatures ? kLog2E : 1.0f));
        float sum = 0, exact = 0;
#pragma unroll
        for (int n = 0; n < kScoreTiles; n++) {
          const float first = power(score[s][n][2 * r], base), second = power(score[s][n][2 * r + 1], base);
          const uint32_t pair = simt::pack2<T>(first, second);
          exact += first + second;
          weights[s][n][r] = pair;
          sum += simt::to_float(T{uint16_t(pair)}) + simt::to_float(T{uint16_t(pair >> 16)});
        }
        float& total = block->sums[s * 2 + r][threadIdx.x];
        total = total * shrink + sum;
        exact += __shfl_xor_sync(0xffffffffu, exact, 1);
        exact += __shfl_xor_sync(0xffffffffu, exact, 2);
        float& exact_total = block->exact_sums[row_of_lane + s * 16 + 8 * r];
        if (thread_index() % 4 == 0) exact_total = exact_total * shrink + exact;
        state.max[s][r] = top;
#pragma unroll
        for (int d = 0; d < kOutTiles; d++) state.out[s][d][2 * r] *= shrink, state.out[s][d][2 * r + 1] *= shrink;
      }
    if constexpr (Tile::kFeatures) {
      const Dropout dropout(p.dropout, batch, head);
      if (dropout.active) {
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int n = 0; n < kScoreTiles; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
              bool first, second;
              dropout.keeps_two(warp_query + s * 16 + g + 8 * r, first_key + n * 8 + 2 * t, first, second);
              if (!first) weights[s][n][r] &= 0xffff0000u;
              if (!second) weights[s][n][r] &= 0x0000ffffu;
            }
      }
    }

    // Values are there, and all warps have left the keys.
    simt::cp_async_wait<0>();
    __syncthreads();
    if (block->not_finite && block->not_finite[first_key / kFlagKeys]) {
      drop_not_finite<kKeys * D, kThreads>(values);
      __syncthreads();
    }
    if constexpr (Tile::kFeatures) tile = list->template next_tile<kKeys>(block->bounds, first_query, tile + 1);
    else tile = block->bounds.next_tile(tile + 1, kKeys);
    if (tile >= 0) {
      load_tile<D, kKeys, kThreads>(keys, TileMatrix<const T>(block->key, block->seqlen_kv, p.head_dim), int64_t(tile) * kKeys);
      simt::cp_async_commit();
    }
    multiply<T, D, kSets, kScoreTiles>(state.out, weights, value_fragments);
  }
  simt::cp_async_wait<0>();
  __syncthreads();

  // Divided by the sums, through the tile of the queries, first rounded and then what rounding took.
  const ForwardItem target(p, kRows);
  const Segment targets = query_segment(p, target.batch);
  const TileMatrix<T> out(matrix<T>(p, p.out, target.batch, target.head).from(targets.begin), targets.length, p.head_dim_v);
  const float keep = Tile::kFeatures && p.dropout.p > 0 ? float(inverse_keep_of(p.dropout.p)) : 1.0f;
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = block->sums[s * 2 + r][threadIdx.x];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = target.first_query + (warp * kSets + s) * 16 + g + 8 * r;
      if (p.lse && t == 0 && row < targets.length) {
        const float exact = block->exact_sums[(warp * kSets + s) * 16 + g + 8 * r];
        const float lse = exact == 0 ? minus_infinity(0.0f) : state.max[s][r] * (Tile::kFeatures ? 1.0f : kLn2) + logf(exact);
        ((float*)p.lse)[lse_offset(p, target.batch, target.head) + targets.begin + row] = lse;
      }
      const float factor = sum == 0 ? 0.0f : keep / sum;
#pragma unroll
      for (int d = 0; d < kOutTiles; d++) {
        state.out[s][d][2 * r] *= factor, state.out[s][d][2 * r + 1] *= factor;
        const uint32_t pair = simt::pack2<T>(state.out[s][d][2 * r], state.out[s][d][2 * r + 1]);
        *(uint32_t*)(chunk_at<D>(queries, (warp * kSets + s) * 16 + g + 8 * r, d) + 2 * t) = pair;
      }
    }
  __syncthreads();
  store_tile<D, kRows, kThreads>(queries, out, target.first_query);
  if (!p.residual.data) return;
  __syncthreads();
  const TileMatrix<T> residual(matrix<T>(p, p.residual, target.batch, target.head).from(targets.begin), targets.length, p.head_dim_v);
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int d = 0; d < kOutTiles; d++) {
        uint32_t* const at = (uint32_t*)(chunk_at<D>(queries, (warp * kSets + s) * 16 + g + 8 * r, d) + 2 * t);
        const uint32_t pair = *at;
        *at = simt::pack2<T>(state.out[s][d][2 * r] - simt::to_float(T{uint16_t(pair)}), state.out[s][d][2 * r + 1] - simt::to_float(T{uint16_t(pair >> 16)}));
      }
  __syncthreads();
  store_tile<D, kRows, kThreads>(queries, residual, target.first_query);
}

}  // namespace

template <class T, int D, bool kFeatures>
void launch_attention_fwd(const AttentionParams& p, const RowTable& table, Stream stream) {
  using Tile = ForwardTile<T, D, kFeatures>;
  const int64_t tiles = (p.seqlen_q + Tile::kRows - 1) / Tile::kRows;
  SIMT_LAUNCH(attention_fwd_kernel<Tile>, unsigned(tiles * p.batch * p.num_heads), Tile::kThreads, Tile::kSharedBytes, stream, p, table);
}

}  // namespace cuda
}  // namespace tiled_attention
