#pragma once
// The weights of chosen rows, computed again from lse: what was never kept, for those who ask to see it.

#include "schedule.h"
#include "softmax_block.h"
#include "turn.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Keys are packed once for each tile of rows: a sixteenth of the time of its product.
constexpr int kWeightsTileQ = whole_steps(192, kBlockRows), kWeightsTileKV = 512;

template <class T, class Unit, bool kDrop>
struct Weights {
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  const AttentionWeightsParams& params;
  const AttentionParams& p;
  ThreadPool pool;
  int row_tiles, tile_rows, key_tiles, query_stride, key_panel;
  int64_t heads;  // of weights

  struct Buffers {
    TileRow* rows;   // [tile_q]
    Unit *query, *key;
    Real* scores;  // [block][tile_kv]
    Real* weights;  // [tile_q][tile_kv]
    uint32_t* dropout_bits;
    T* temp;
  };

  Weights(const AttentionWeightsParams& params, const ThreadPool& all) : params(params), p(params.forward), pool(with_workers(all, p)) {
    key_tiles = int((p.seqlen_kv + kWeightsTileKV - 1) / kWeightsTileKV);
    query_stride = round_up(units<Unit>(int(p.head_dim)), kLanes<Unit>);
    key_panel = units<Unit>(int(p.head_dim)) * kPanel<Unit>;
    heads = params.average ? 1 : p.num_heads;
    // Few items are as many for every worker.
    const int64_t matrices = p.batch * heads * key_tiles, blocks = (params.num_rows + kBlockRows - 1) / kBlockRows;
    row_tiles = int((params.num_rows + kWeightsTileQ - 1) / kWeightsTileQ);
    while (matrices * row_tiles < 8 * pool.num_workers && matrices * row_tiles % pool.num_workers != 0 && row_tiles < blocks) row_tiles++;
    tile_rows = row_tiles ? int((blocks + row_tiles - 1) / row_tiles) * kBlockRows : 0;
    row_tiles = row_tiles ? int((params.num_rows + tile_rows - 1) / tile_rows) : 0;
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(matrices * row_tiles, int64_t(1))));
  }
  Buffers take(Scratch& s) const {
    Buffers b;
    b.rows = s.take<TileRow>(kWeightsTileQ);
    b.query = s.take<Unit>(int64_t(kWeightsTileQ) * query_stride);
    b.key = s.take<Unit>(int64_t(kWeightsTileKV / kPanel<Unit>) * key_panel);
    b.scores = s.take<Real>(kBlockRows * kWeightsTileKV);
    b.weights = s.take<Real>(kWeightsTileQ * kWeightsTileKV);
    b.dropout_bits = s.take<uint32_t>(kDrop ? Dropout::row_bits_size(kWeightsTileKV) : 0);
    b.temp = s.take<T>(kWeightsTileKV * p.head_dim);
    return b;
  }
  size_t worker_bytes() const {
    Scratch s(nullptr);
    take(s);
    return s.used;
  }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes(); }

  void run(void* memory) const {
    const int64_t tiles = int64_t(row_tiles) * key_tiles;
    for_each_item(pool, p.batch * heads * tiles, [&](int worker, int64_t item) {
      Scratch s((char*)memory + worker * worker_bytes());
      const Buffers buf = take(s);
      const int64_t batch = item / tiles / heads, head = item / tiles % heads;
      const int row_begin = int(item % tiles / key_tiles) * tile_rows, key_begin = int(item % key_tiles) * kWeightsTileKV;
      const int rows = int(min_of(int64_t(tile_rows), params.num_rows - row_begin)), cols = int(min_of(int64_t(kWeightsTileKV), p.seqlen_kv - key_begin));
      memset(buf.weights, 0, rows * kWeightsTileKV * sizeof(Real));
      if (params.average)
        for (int h = 0; h < p.num_heads; h++) add_head(batch, h, row_begin, rows, key_begin, cols, Real(1) / Real(p.num_heads), buf);
      else add_head(batch, int(head), row_begin, rows, key_begin, cols, Real(1), buf);
      store(batch, head, row_begin, rows, key_begin, cols, buf.weights);
    });
  }

 private:
  // buf.weights += the weights of one head times `share`, block of rows by block of rows: the scores stay in L1, the sums in L2.
  void add_head(int64_t batch, int head, int row_begin, int rows, int key_begin, int key_count, Real share, const Buffers& buf) const {
    const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
    const ScoreMods<Real> mods(p, mask, batch);
    const int head_dim = int(p.head_dim), head_kv = int(head / (p.num_heads / p.num_heads_kv)), cols = round_up(key_count, kPanel<Unit>);
    for (int i = 0; i < rows; i++) {
      const int row = int(params.rows ? params.rows[row_begin + i] : row_begin + i);
      buf.rows[i] = {head, row, mask.row(row)};
      const auto q = turned_rows(p, p.query, p.rotary.query_table, batch, head, row, 1, buf.temp);
      pack_rows(q.data, q.row_stride, 1, head_dim, mods.factor() < 0, buf.query + int64_t(i) * query_stride, query_stride);
    }
    // shift[i] + lse[i] is the lse of row i in log2 units.
    Real shift[kWeightsTileQ], lse[kWeightsTileQ];
    bool coarse = false;
    for (int i = 0; i < rows; i++) {
      const Real of_row = ((const Real*)p.lse)[(batch * p.num_heads + head) * p.seqlen_q + buf.rows[i].query];
      shift[i] = 0, lse[i] = of_row == Real(-INFINITY) ? Real(0) : in_log2_units(of_row);
      coarse = coarse || lse_is_coarse<T>(lse[i]);
    }
    if (coarse) normalise_again(batch, head_kv, rows, mods, buf, shift, lse);
    pack_keys(batch, head_kv, key_begin, key_count, buf);
    const Dropout dropout(p.dropout, batch, head, nullptr);
    ListedKeys listed_keys, *const listed = mods.list.is_given() ? &listed_keys : nullptr;
    for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
      const int count = min_of(kBlockRows, rows - i0);
      const TileRow* block = buf.rows + i0;
      if (listed && !mods.look_up(block, count, key_begin, key_begin + key_count, listed)) continue;
      const Real factor = score_rows(i0, count, key_begin, key_count, mods, listed, buf);
      for (int i = 0; i < count; i++) {
        const int at = i0 + i;
        Real *row = buf.scores + i * kWeightsTileKV, rest = factor;
        if (shift[at] != 0) {
          for (int j = 0; j < cols; j += V::kLanes) (V::load(row + j) * V(factor) - V(shift[at])).store(row + j);
          rest = 1;
        }
        const Real scale = share * Real(kDrop ? dropout.inverse_keep : 1);
        const uint32_t* bits = kDrop ? dropout.row_bits(block[i].query, key_begin, cols, buf.dropout_bits) : nullptr;
        const bool hides = mods.hides() || !covers(block[i].keys.main, key_begin, key_begin + cols);
        if (hides) add_row<true>(row, cols, rest, lse[at], scale, dropout, bits, buf.weights + at * kWeightsTileKV);
        else add_row<false>(row, cols, rest, lse[at], scale, dropout, bits, buf.weights + at * kWeightsTileKV);
      }
    }
  }
  // sums += exp2(scores * factor - lse) * scale; 0 where the score is -inf, even if lse is NaN.
  template <bool kHides>
  static void add_row(const Real* scores, int cols, Real factor, Real lse, Real scale, const Dropout& dropout, const uint32_t* bits, Real* sums) {
    for (int j = 0; j < cols; j += V::kLanes) {
      const V score = V::load(scores + j);
      V weight = exp2(score * V(factor) - V(lse));
      if (kHides) weight = score.v == V(Real(-INFINITY)).v ? V(Real(0)).v : weight.v;
      if (kDrop) weight = dropout.keep(weight, bits + j);
      multiply_add(weight, V(scale), V::load(sums + j)).store(sums + j);
    }
  }
  void pack_keys(int64_t batch, int head_kv, int begin, int count, const Buffers& buf) const {
    const auto key = turned_rows(p, p.key, p.rotary.key_table, batch, head_kv, begin, count, buf.temp);
    pack_transposed(key.data, key.row_stride, count, int(p.head_dim), buf.key, key_panel);
  }
  // Scores of rows [i0, i0 + count) of the tile and the packed keys, hidden ones -inf. Returns what they are still to be multiplied by.
  Real score_rows(int i0, int count, int key_begin, int key_count, const ScoreMods<Real>& mods, const ListedKeys* listed, const Buffers& buf) const {
    const int cols = round_up(key_count, kPanel<Unit>);
    gemm<Left::RowMajor, Store::Overwrite>(count, key_count, units<Unit>(int(p.head_dim)), buf.query + int64_t(i0) * query_stride, query_stride, buf.key,
                                           key_panel, buf.scores, kWeightsTileKV);
    const Real factor = mods.apply(buf.rows + i0, count, key_begin, key_begin + key_count, buf.scores, kWeightsTileKV, nullptr, listed);
    for (int i = 0; i < count; i++)
      if (!covers(buf.rows[i0 + i].keys.main, key_begin, key_begin + cols)) mask_row(buf.scores + i * kWeightsTileKV, cols, key_begin, buf.rows[i0 + i].keys);
    return factor;
  }
  // Rows whose lse is too coarse, from their maximum and sum over all keys.
  __attribute__((noinline)) void normalise_again(int64_t batch, int head_kv, int rows, const ScoreMods<Real>& mods, const Buffers& buf, Real* shift,
                                                 Real* lse) const {
    alignas(64) Real row_max[kWeightsTileQ], row_sum[kWeightsTileQ * kLanes<Real>];
    const RowState<Real> state = {row_max, row_sum, row_max, 0};
    state.clear(kWeightsTileQ);
    ListedKeys listed_keys, *const listed = mods.list.is_given() ? &listed_keys : nullptr;
    for (int64_t key_begin = 0; key_begin < p.seqlen_kv; key_begin += kWeightsTileKV) {
      const int key_count = int(min_of(int64_t(kWeightsTileKV), p.seqlen_kv - key_begin));
      pack_keys(batch, head_kv, int(key_begin), key_count, buf);
      for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
        const int count = min_of(kBlockRows, rows - i0);
        if (listed && !mods.look_up(buf.rows + i0, count, int(key_begin), int(key_begin) + key_count, listed)) continue;
        const Real factor = score_rows(i0, count, int(key_begin), key_count, mods, listed, buf);
        softmax_block<Unit, false>(count, round_up(key_count, kPanel<Unit>), kWeightsTileKV, buf.scores, (Unit*)buf.scores, factor, state.from(i0), 0,
                                   BlockDropout<Real>());
      }
    }
    for (int i = 0; i < rows; i++) {
      if (!lse_is_coarse<T>(lse[i])) continue;
      const Real sum = log2(V(reduce_add(V::load(row_sum + i * kLanes<Real>)))).v[0];
      // A larger lse is a sink's, and stays.
      const Real tolerance = (lse[i] < 0 ? -lse[i] : lse[i]) * Real(sizeof(Real) == 4 ? 1e-6 : 1e-15);
      if (lse[i] <= row_max[i] + sum + tolerance) shift[i] = row_max[i], lse[i] = sum;
    }
  }
  void store(int64_t batch, int64_t head, int row_begin, int rows, int key_begin, int cols, const Real* from) const {
    const Matrix<Real> to = matrix<Real>(p, params.weights, batch, head);
    for (int i = 0; i < rows; i++) store_row(from + i * kWeightsTileKV, cols, Real(1), to.row(row_begin + i) + key_begin * to.col_stride, to.col_stride);
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
