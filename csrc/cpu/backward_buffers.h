#pragma once
// Memory of the backward pass, and how a head is cut into chunks of queries.

#include "packed_tiles.h"
#include "schedule.h"
#include "softmax_block.h"
#include "turn.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

#ifndef BWD_TILE_Q
#define BWD_TILE_Q 96
#endif
#ifndef BWD_TILE_KV
#define BWD_TILE_KV 256
#endif
#ifndef BWD_CHUNK_ROWS
#define BWD_CHUNK_ROWS 96
#endif
constexpr int kBwdTileQ = whole_steps(BWD_TILE_Q, kBlockRows), kBwdTileKV = whole_steps(BWD_TILE_KV, kPanel<float>), kMaxChunks = 4;

// How the heads of a call are shared out. A function of the shape alone, so that sums have one order.
//   groups > 0: groups of heads at the same time, the heads of a group one after the other because they add to the same elements of grad_bias;
//   groups == 0: one head after the other, its queries in `chunks` at the same time, each with sums of its own.
struct BackwardPlan {
  int64_t groups, heads_of_group;
  int chunks;
  bool over_batch;  // a group is one head of every batch item; otherwise all heads of one item, or one head

  explicit BackwardPlan(const AttentionBackwardParams& params) {
    const AttentionParams& p = params.forward;
    const int64_t heads = p.batch * p.num_heads_kv;
    const bool over_heads = params.grad_bias.data && p.num_heads_kv > 1 && params.grad_bias.head_stride == 0;
    over_batch = false;
    for (int d = 0; d < p.num_batch_dims; d++)
      if (params.grad_bias.data && p.batch_sizes[d] > 1 && params.grad_bias.batch_strides[d] == 0) over_batch = true;
    groups = over_heads && over_batch ? 1 : over_heads ? p.batch : over_batch ? p.num_heads_kv : heads;
    heads_of_group = heads / max_of(groups, int64_t(1));
    // Few groups: chunks, for threads to share. Their sums have to be added, so no more than that needs.
    const int64_t rows = over_heads || over_batch ? BWD_CHUNK_ROWS / 4 : BWD_CHUNK_ROWS;
    const int64_t counted = params.plan_heads > 0 ? params.plan_heads : groups;
    chunks = counted >= 8 ? 1 : int(min_of(max_of(int64_t(1), p.seqlen_q / rows), int64_t(counted >= 4 ? 2 : kMaxChunks)));
    if (chunks > 1) groups = 0;
  }
  int64_t head(int64_t group, int64_t i) const { return over_batch ? i * groups + group : group * heads_of_group + i; }
};
// Chunk i holds the queries [chunk_begin(i), chunk_begin(i + 1)): about equal numbers of visible pairs, whole steps of rows.
inline int chunk_begin(int chunk, int chunks, int seqlen_q, const RowMask& mask, int step) {
  if (chunk <= 0) return 0;
  if (chunk >= chunks) return seqlen_q;
  int64_t total = 0, sum = 0;
  const auto weight = [&](int i) { return visible_keys(mask.row(i)) + 16; };
  for (int i = 0; i < seqlen_q; i += step) total += weight(i);
  int i = 0;
  while (i < seqlen_q && (sum += weight(i)) * chunks <= total * chunk) i += step;
  return min_of(i, seqlen_q);
}

// Tiles of one kv head. *_transposed: panels of keys, reduction over head_dim. key: panels of columns, reduction over keys, 0 for what is not finite.
template <class Unit>
struct BackwardPacked {
  static constexpr int P = kPanel<Unit>;
  Unit *key_transposed, *value_transposed, *key;
  int* tiles;        // [slots] the tile that a slot holds, -1: none
  bool* key_finite;  // [slots]
  int64_t key_transposed_stride, value_transposed_stride, key_stride;  // units of one panel
  int key_panels, dim_panels;                                          // of one tile
  KeptTiles kept;

  BackwardPacked(const AttentionParams& p, const KeptTiles& kept, Scratch& scratch) : kept(kept) {
    const int rows = min_of(kBwdTileKV, round_up(int(p.seqlen_kv), P)), slots = kept.slots();
    key_panels = rows / P, dim_panels = round_up(int(p.head_dim), P) / P;
    key_transposed_stride = int64_t(units<Unit>(int(p.head_dim))) * P;
    value_transposed_stride = int64_t(units<Unit>(int(p.head_dim_v))) * P;
    key_stride = int64_t(units<Unit>(rows)) * P;
    key_transposed = scratch.take<Unit>(slots * key_panels * key_transposed_stride);
    value_transposed = scratch.take<Unit>(slots * key_panels * value_transposed_stride);
    key = scratch.take<Unit>(slots * dim_panels * key_stride);
    tiles = scratch.take<int>(slots);
    key_finite = scratch.take<bool>(slots);
  }
  void clear() const {
    for (int i = 0; i < kept.slots(); i++) tiles[i] = -1;
  }
  // Panels from the one of key `first`, which is in tile `tile`.
  int64_t key_panel(int tile, int first) const { return kept.slot(tile) * int64_t(key_panels) + (first - tile * kBwdTileKV) / P; }
  Unit* key_row(int tile, int first) const { return key + kept.slot(tile) * dim_panels * key_stride + (first - tile * kBwdTileKV) / kUnitSize<Unit> * P; }
};

// Keys that some of the rows of a chunk see lie in these two. They may overlap.
struct SeenKeys {
  Interval sinks = {0, 0}, main = {0, 0};
  bool sees_some(int begin, int end) const { return !is_empty(intersect(main, begin, end)) || !is_empty(intersect(sinks, begin, end)); }
};

// What one chunk adds up for one kv head.
template <class Real>
struct BackwardSums {
  Real *grad_key, *grad_value;     // [seqlen_kv][stride]
  SeenKeys* seen;                  // the rows of them that mean something: whole tiles
  double* bias_columns = nullptr;    // [group][bias_width], where the gradient of bias has no rows
  int64_t key_stride, value_stride, bias_width;

  // Where a gradient of bias is a sum over rows, over keys, or by distance, it is kept in double until the end.
  static bool is_summed(const TensorView& bias) { return bias.data && (bias.row_stride == 0 || bias.col_stride == 0 || is_by_distance(bias)); }
  // Distance of grad_bias's first element from where it is for row 0 and key 0.
  static int64_t bias_origin(const AttentionBackwardParams& params) { return is_by_distance(params.grad_bias) ? params.forward.seqlen_q - 1 : 0; }
  // This many elements of bias, 0 where they are not kept in double.
  static int64_t summed_bias(const AttentionBackwardParams& params) {
    const AttentionParams& p = params.forward;
    const TensorView& bias = params.grad_bias;
    if (!is_summed(bias)) return 0;
    const int64_t last_row = is_by_distance(bias) ? p.seqlen_q - 1 : (p.seqlen_q - 1) * bias.row_stride;
    int64_t last = (p.num_heads - 1) * bias.head_stride + last_row + (p.seqlen_kv - 1) * bias.col_stride;
    for (int d = 0; d < p.num_batch_dims; d++) last += (p.batch_sizes[d] - 1) * bias.batch_strides[d];
    return last + 1;
  }

  BackwardSums(const AttentionBackwardParams& params, Scratch& scratch) {
    const AttentionParams& p = params.forward;
    const int64_t padded = p.seqlen_kv + kBlockRows;
    key_stride = round_up(int(p.head_dim), kLanes<Real>);
    value_stride = round_up(int(p.head_dim_v), kLanes<Real>);
    grad_key = scratch.take<Real>(padded * key_stride);
    grad_value = scratch.take<Real>(padded * value_stride);
    seen = scratch.take<SeenKeys>(1);
    bias_width = bias_origin(params) + p.seqlen_kv;
    if (params.grad_bias.col_stride != 0 && is_summed(params.grad_bias)) bias_columns = scratch.take<double>(p.num_heads / p.num_heads_kv * bias_width);
  }
  void clear(int64_t group) const {
    *seen = SeenKeys();
    if (bias_columns) memset(bias_columns, 0, group * bias_width * sizeof(double));
  }
  void clear_rows(int begin, int end) const {
    if (begin >= end) return;
    memset(grad_key + begin * key_stride, 0, (end - begin) * key_stride * sizeof(Real));
    memset(grad_value + begin * value_stride, 0, (end - begin) * value_stride * sizeof(Real));
  }
  // Zeros in the rows of the tiles that `sinks` and `main` touch and that were not seen before.
  void see(Interval sinks, Interval main, int seqlen_kv) const {
    const auto see = [&](Interval keys, Interval& had, Interval other) {
      if (is_empty(keys)) return;
      const Interval now = hull(had, {round_down(keys.begin, kBwdTileKV), min_of(round_up(keys.end, kBwdTileKV), seqlen_kv)});
      const auto clear_but = [&](int begin, int end) {
        clear_rows(begin, min_of(end, is_empty(other) ? end : max_of(other.begin, begin)));
        if (!is_empty(other)) clear_rows(max_of(begin, other.end), end);
      };
      if (is_empty(had)) clear_but(now.begin, now.end);
      else clear_but(now.begin, had.begin), clear_but(had.end, now.end);
      had = now;
    };
    see(sinks, seen->sinks, seen->main);
    see(main, seen->main, seen->sinks);
  }
  // Adds the rows [begin, end) of another chunk.
  void add(const BackwardSums& other, int begin, int end) const {
    using V = NativeVec<Real>;
    const auto add_rows = [&](Real* to, const Real* from, int64_t stride) {
      for (int64_t i = begin * stride; i < end * stride; i += V::kLanes) (V::load(to + i) + V::load(from + i)).store(to + i);
    };
    add_rows(grad_key, other.grad_key, key_stride);
    add_rows(grad_value, other.grad_value, value_stride);
  }
};

// What is summed up in double. parts, per (head, chunk): of the gradients of one slope, one sink and, if it is a number per head,
// one bias. bias: BackwardBackwardSums<float>::summed_bias().
struct BackwardDoubles {
  double *parts, *bias;
  int64_t num_parts, num_bias;
  BackwardDoubles(const AttentionBackwardParams& params, int chunks, Scratch& scratch) {
    num_parts = params.forward.batch * params.forward.num_heads * chunks * 3;
    num_bias = BackwardSums<float>::summed_bias(params);
    parts = scratch.take<double>(num_parts);
    bias = scratch.take<double>(num_bias);
  }
};

// One worker: a tile of queries as rows (left operand, reduction over head_dim) and as panels (right operand, reduction over queries), and
// one tile of scores. The two gradients of the kv side read it transposed, grad_query reads the rows of one block. With bf16 pairs these are
// different layouts; otherwise all are views of the same two [tile_q][tile_kv] arrays.
template <class T, class Unit, bool kDrop>
struct BackwardBuffers {
  using Real = Accumulator<Unit>;
  TileRow* rows;  // [tile_q]
  Unit *query_rows, *query_panels, *grad_out_rows, *grad_out_panels;
  Real *grad_query, *row_lse, *row_lse_low, *row_delta, *row_slope, *row_sink;
  Real* row_shift;         // [tile_q] subtracted from the scores before row_lse is
  RowState<Real> coarse;   // of rows that are normalised again; no out
  Unit *probs, *grad_scores, *grad_score_rows;
  Real *block_scores, *block_grad_scores;
  Real* tanhs;  // [block][tile_kv]
  Philox::Keys* dropout_keys;
  uint32_t* dropout_bits;
  T *query_temp, *grad_out_temp, *key_temp, *value_temp;
  int query_stride, grad_out_stride;
  int64_t tile_stride;

  BackwardBuffers(const AttentionBackwardParams& params, Scratch& scratch) {
    const AttentionParams& p = params.forward;
    constexpr int P = kPanel<Unit>, kSize = kUnitSize<Unit>;
    const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    query_stride = round_up(units<Unit>(head_dim), kLanes<Unit>);
    grad_out_stride = round_up(units<Unit>(head_dim_v), kLanes<Unit>);
    tile_stride = int64_t(kBwdTileQ / kSize) * P;
    rows = scratch.take<TileRow>(kBwdTileQ);
    query_rows = scratch.take<Unit>(int64_t(kBwdTileQ) * query_stride);
    grad_out_rows = scratch.take<Unit>(int64_t(kBwdTileQ) * grad_out_stride);
    query_panels = scratch.take<Unit>(round_up(head_dim, P) / P * tile_stride);
    grad_out_panels = scratch.take<Unit>(round_up(head_dim_v, P) / P * tile_stride);
    grad_query = scratch.take<Real>(int64_t(kBwdTileQ) * round_up(head_dim, kLanes<Real>));
    row_lse = scratch.take<Real>(kBwdTileQ);
    row_lse_low = scratch.take<Real>(kBwdTileQ);
    row_delta = scratch.take<Real>(kBwdTileQ);
    row_slope = scratch.take<Real>(kBwdTileQ);
    row_sink = scratch.take<Real>(kBwdTileQ);
    row_shift = scratch.take<Real>(kBwdTileQ);
    coarse.row_max = scratch.take<Real>(kBwdTileQ);
    coarse.row_sum = scratch.take<Real>(kBwdTileQ * kLanes<Real>);
    coarse.out = coarse.row_max, coarse.out_stride = 0;
    probs = scratch.take<Unit>(kBwdTileQ * kBwdTileKV / kSize + kLanes<Unit>);
    grad_scores = scratch.take<Unit>(kBwdTileQ * kBwdTileKV / kSize + kLanes<Unit>);
    tanhs = scratch.take<Real>(p.softcap > 0 ? kBlockRows * kBwdTileKV : 0);
    dropout_keys = scratch.take<Philox::Keys>(kDrop ? kBwdTileKV / kPhiloxGroup : 0);
    dropout_bits = scratch.take<uint32_t>(kDrop ? Dropout::row_bits_size(kBwdTileKV) : 0);
    query_temp = scratch.take<T>(kBwdTileQ * p.head_dim);
    grad_out_temp = scratch.take<T>(kBwdTileQ * p.head_dim_v);
    key_temp = scratch.take<T>(needs_copy(p.key, p.rotary.key_table) ? kBwdTileKV * p.head_dim : 0);
    value_temp = scratch.take<T>(p.value.col_stride == 1 ? 0 : kBwdTileKV * p.head_dim_v);
    if (kSize == 1) {
      grad_score_rows = nullptr, block_scores = block_grad_scores = nullptr;
      return;
    }
    grad_score_rows = scratch.take<Unit>(kBlockRows * kBwdTileKV / kSize);
    block_scores = scratch.take<Real>(kBlockRows * kBwdTileKV);
    block_grad_scores = scratch.take<Real>(kBlockRows * kBwdTileKV);
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
