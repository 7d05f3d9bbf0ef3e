#pragma once
// Additive attention, forward: out = softmax(w . tanh(q + k)) value, online softmax over tiles of keys. Time goes into the scores; the rest is
// that of exact attention.

#include "additive_scores.h"
#include "schedule.h"
#include "softmax_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// The exponentials of a tile of keys are made for each tile of queries: a twentieth of the time of its scores.
constexpr int kAdditiveTileQ = whole_steps(192, kBlockRows), kAdditiveTileKV = 256;

template <class T, class Real, bool kDrop>
struct AdditiveForwardBuffers {
  TileRow* rows;                                       // [tile_q]
  ScoreWeight<Real> weight;
  Real *query, *key;                                   // [tile_q][query_stride], [panels of the tile][slots][kKeyParts][kPanel]
  Real *value, *scores, *temp;                         // [panels of columns][tile_kv][kPanel], [block][tile_kv]
  bool *marked_rows, *marked_keys;
  RowState<Real> state;
  Philox::Keys* dropout_keys;
  uint32_t* dropout_bits;                              // [block][tile_kv and what row_bits() needs]
  T *key_temp, *value_temp, *query_row, *key_row;
  int query_stride, value_panel;

  AdditiveForwardBuffers(const AttentionParams& p, Scratch& scratch) {
    const int out_stride = round_up(int(p.head_dim_v), kLanes<Real>), slots = ScoreWeight<Real>::slots_of(p.head_dim);
    weight = ScoreWeight<Real>::take(p.head_dim, scratch);
    query_stride = ScoreWeight<Real>::row_stride_of(p.head_dim);
    value_panel = kAdditiveTileKV * kPanel<Real>;
    rows = scratch.take<TileRow>(kAdditiveTileQ);
    query = scratch.take<Real>(int64_t(kAdditiveTileQ) * query_stride);
    key = scratch.take<Real>(int64_t(kAdditiveTileKV) * slots * kKeyParts);
    value = scratch.take<Real>(int64_t(round_up(int(p.head_dim_v), kPanel<Real>)) * kAdditiveTileKV);
    scores = scratch.take<Real>(kBlockRows * kAdditiveTileKV);
    temp = scratch.take<Real>(int64_t(slots) * kPanel<Real> + kPanel<Real>);
    marked_rows = scratch.take<bool>(kAdditiveTileQ);
    marked_keys = scratch.take<bool>(kAdditiveTileKV);
    state.row_max = scratch.take<Real>(kAdditiveTileQ + kLanes<Real>);
    state.row_sum = scratch.take<Real>(kAdditiveTileQ * kLanes<Real>);
    state.out = scratch.take<Real>(int64_t(kAdditiveTileQ) * out_stride);
    state.out_stride = out_stride;
    dropout_keys = scratch.take<Philox::Keys>(kDrop ? kAdditiveTileKV / kPhiloxGroup : 0);
    dropout_bits = scratch.take<uint32_t>(kDrop ? kBlockRows * Dropout::row_bits_size(kAdditiveTileKV) : 0);
    key_temp = scratch.take<T>(p.key.col_stride == 1 ? 0 : kAdditiveTileKV * p.head_dim);
    value_temp = scratch.take<T>(p.value.col_stride == 1 ? 0 : kAdditiveTileKV * p.head_dim_v);
    query_row = scratch.take<T>(p.head_dim);
    key_row = scratch.take<T>(p.head_dim);
  }
};

template <class T, class Real, bool kDrop>
struct AdditiveForward {
  using V = NativeVec<Real>;
  using Buffers = AdditiveForwardBuffers<T, Real, kDrop>;
  static constexpr int kBlocks = kAdditiveTileQ / kBlockRows, kTileKV = kAdditiveTileKV;
  const AdditiveAttentionParams& params;
  const AttentionParams& p;
  ThreadPool pool;
  int tile_rows, tiles;

  AdditiveForward(const AdditiveAttentionParams& params, const ThreadPool& all) : params(params), p(params.attention), pool(with_workers(all, p)) {
    // Every worker gets some tiles. Results do not depend on how rows are put together.
    const int64_t heads = p.batch * p.num_heads, per_head = max_of(int64_t(1), (4 * pool.num_workers + heads - 1) / max_of(heads, int64_t(1)));
    tile_rows = min_of(kAdditiveTileQ, round_up(int((p.seqlen_q + per_head - 1) / per_head), kBlockRows));
    tiles = int((p.seqlen_q + tile_rows - 1) / tile_rows);
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(heads * tiles, int64_t(1))));
  }
  static size_t worker_bytes(const AttentionParams& p) {
    Scratch s(nullptr);
    Buffers(p, s);
    return s.used;
  }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes(p); }

  void run(void* memory) const {
    const size_t bytes = worker_bytes(p);
    for_each_item(pool, p.batch * p.num_heads * tiles, [&](int worker, int64_t item) {
      Scratch s((char*)memory + worker * bytes);
      const int64_t head = item / tiles;
      // The last queries first: where masks are causal they see the most.
      query_tile(head / p.num_heads, int(head % p.num_heads), (tiles - 1 - int(item % tiles)) * tile_rows, Buffers(p, s));
    });
  }

 private:
  void query_tile(int64_t batch, int head, int first, Buffers buf) const {
    const int rows = min_of(tile_rows, int(p.seqlen_q) - first), head_kv = int(head / (p.num_heads / p.num_heads_kv));
    const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
    const ScoreMods<Real> mods(p, mask, batch);
    const Matrix<const T> query = matrix<const T>(p, p.query, batch, head), key = matrix<const T>(p, p.key, batch, head_kv),
                          value = matrix<const T>(p, p.value, batch, head_kv);
    buf.weight.set(weight_of<Real>(params, head));
    for (int i = 0; i < rows; i++) buf.rows[i] = {head, first + i, mask.row(first + i)};
    Real query_top, key_top = 0;
    pack_exponential_rows(buf.weight, query.from(first), rows, buf.query, buf.marked_rows, &query_top);
    buf.state.clear(kAdditiveTileQ);

    BlockKeys blocks[kBlocks];
    bool started[kBlocks] = {};
    Interval main = {0, 0}, sinks = {0, 0};
    for (int i = 0; i < rows; i += kBlockRows) {
      const BlockKeys& block = blocks[i / kBlockRows] = BlockKeys(buf.rows + i, min_of(kBlockRows, rows - i));
      main = hull(main, block.main), sinks = hull(sinks, block.sinks);
    }
    const bool in_registers = sizeof(Real) == 4 && Dropout::in_registers(p.dropout) && first % 2 == 0;
    const Dropout dropout(p.dropout, batch, head, buf.dropout_keys);
    int next = 0;
    const Interval ranges[] = {sinks, main};
    for (const Interval range : ranges)
      for (int kv_begin = max_of(next, round_down(range.begin, kTileKV)); kv_begin < range.end; kv_begin += kTileKV) {
        next = kv_begin + kTileKV;
        const int keys = min_of(kTileKV, int(p.seqlen_kv) - kv_begin);
        bool packed = false, finite = true;
        for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
          const BlockKeys& block = blocks[i0 / kBlockRows];
          const int count = min_of(kBlockRows, rows - i0);
          const Interval seen = mods.runs(buf.rows + i0, count, block.within(kv_begin, kv_begin + keys), kPanel<Real>, nullptr).hull();
          if (is_empty(seen)) continue;
          if (!packed) {
            const auto k = adjacent_columns(key, kv_begin, keys, int(p.head_dim), buf.key_temp);
            const auto v = adjacent_columns(value, kv_begin, keys, int(p.head_dim_v), buf.value_temp);
            pack_exponential_keys(buf.weight, k.data, k.row_stride, keys, buf.key, buf.marked_keys, buf.temp, &key_top);
            finite = pack_finite_panels(v.data, v.row_stride, keys, int(p.head_dim_v), buf.value, buf.value_panel);
            if (kDrop && in_registers) dropout.begin_tile(kv_begin, kv_begin + keys);
            packed = true;
          }
          const bool cap = query_top + key_top > AdditiveRange<Real>::kSum;
          block_of_rows(i0, count, kv_begin, seen, block, cap, finite, started[i0 / kBlockRows], in_registers, mods, dropout, query, key, value, buf);
          started[i0 / kBlockRows] = true;
        }
      }
    write_rows(batch, rows, buf);
  }

  void block_of_rows(int i0, int rows, int kv_begin, Interval seen, const BlockKeys& block, bool cap, bool finite, bool started, bool in_registers,
                     const ScoreMods<Real>& mods, const Dropout& dropout, const Matrix<const T>& query, const Matrix<const T>& key,
                     const Matrix<const T>& value, const Buffers& buf) const {
    const int begin = round_down(seen.begin, kPanel<Real>), end = seen.end, cols = round_up(end - begin, kPanel<Real>);
    const TileRow* tile_rows = buf.rows + i0;
    additive_scores(rows, cols, cap, buf.weight, buf.query + int64_t(i0) * buf.query_stride, buf.key + int64_t(begin - kv_begin) * buf.weight.slots * kKeyParts,
                    buf.scores, kTileKV);
    for_each_marked_pair(mods, tile_rows, buf.marked_rows + i0, rows, begin, end, buf.marked_keys + begin - kv_begin, !buf.weight.finite, [&](int i, int j) {
      buf.scores[i * kTileKV + j - begin] =
          buf.weight.direct(whole_row(query, tile_rows[i].query, int(p.head_dim), buf.query_row), whole_row(key, j, int(p.head_dim), buf.key_row));
    });
    const Real factor =
        scale_large(buf.weight, rows, cols, mods.apply(tile_rows, rows, begin, end, buf.scores, kTileKV, nullptr, nullptr), buf.scores, kTileKV);
    if (!covers(block.full, begin, begin + cols))
      for (int i = 0; i < rows; i++) mask_row(buf.scores + i * kTileKV, cols, begin, tile_rows[i].keys);

    const RowState<Real> state = buf.state.from(i0);
    const uint32_t* bits[kBlockRows];
    const BlockDropout<Real> drop = {&dropout, in_registers, tile_rows[0].query, (begin - kv_begin) / kPhiloxGroup, bits};
    if (kDrop && !in_registers)
      for (int i = 0; i < rows; i++) bits[i] = dropout.row_bits(tile_rows[i].query, begin, cols, buf.dropout_bits + i * Dropout::row_bits_size(kTileKV));
    softmax_block<Real, kDrop>(rows, cols, kTileKV, buf.scores, buf.scores, factor, state, int(p.head_dim_v), drop);

    const Real* probs = buf.scores + seen.begin - begin;
    const Real* values = buf.value + int64_t(seen.begin - kv_begin) * kPanel<Real>;
    if (started)
      gemm<Left::RowMajor, Store::Accumulate>(rows, int(p.head_dim_v), end - seen.begin, probs, kTileKV, values, buf.value_panel, state.out, state.out_stride);
    else
      gemm<Left::RowMajor, Store::Overwrite>(rows, int(p.head_dim_v), end - seen.begin, probs, kTileKV, values, buf.value_panel, state.out, state.out_stride);
    if (!finite) add_nonfinite<Real>(mods, tile_rows, rows, seen.begin, end, probs, kTileKV, value, int(p.head_dim_v), state.out, state.out_stride);
  }

  // out = accumulated / row_sum, lse = ln2 * (row_max + log2(row_sum)); a row that saw nothing gets 0 and -inf.
  void write_rows(int64_t batch, int rows, const Buffers& buf) const {
    const RowState<Real>& state = buf.state;
    const Real keep = Real(kDrop ? inverse_keep_of(p.dropout.p) : 1);
    for (int i = 0; i < rows; i++) {
      const int64_t head = buf.rows[i].head, query = buf.rows[i].query;
      const Real sum = reduce_add(V::load(state.row_sum + i * V::kLanes));
      const bool empty = saw_no_key(state.row_max[i], state.row_sum + i * V::kLanes);
      const double lse = (double(state.row_max[i]) + log2(NativeVec<double>(double(sum))).v[0]) * kLn2;
      if (p.lse) ((Real*)p.lse)[(batch * p.num_heads + head) * p.seqlen_q + query] = empty ? Real(-INFINITY) : Real(lse);
      Real* row = state.out + int64_t(i) * state.out_stride;
      if (empty) memset(row, 0, p.head_dim_v * sizeof(Real));
      const Real scale = empty ? Real(1) : keep / sum;
      const Matrix<T> out = matrix<T>(p, p.out, batch, head);
      store_row(row, int(p.head_dim_v), scale, out.row(query), out.col_stride);
      if constexpr (sizeof(T) == 2)
        if (p.residual.data) {
          const Matrix<T> residual = matrix<T>(p, p.residual, batch, head);
          store_residual(row, int(p.head_dim_v), scale, residual.row(query), residual.col_stride);
        }
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
