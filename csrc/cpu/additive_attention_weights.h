#pragma once
// The weights of chosen rows of additive attention, computed again from lse.

#include "additive_scores.h"
#include "schedule.h"
#include "softmax_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

constexpr int kAdditiveWeightsTileQ = whole_steps(96, kBlockRows), kAdditiveWeightsTileKV = 256;

template <class T, class Real, bool kDrop>
struct AdditiveWeights {
  using V = NativeVec<Real>;
  static constexpr int kTileQ = kAdditiveWeightsTileQ, kTileKV = kAdditiveWeightsTileKV;
  const AdditiveAttentionWeightsParams& params;
  const AttentionParams& p;
  ThreadPool pool;
  int row_tiles, key_tiles;

  struct Buffers {
    ScoreWeight<Real> weight;
    Real *query, *key, *scores, *temp;  // [tile_q][query_stride], [panels][slots][kKeyParts][kPanel], [block][tile_kv]
    bool *marked_rows, *marked_keys;
    uint32_t* dropout_bits;
    T *query_row, *key_row, *key_temp;
    int query_stride;
  };

  AdditiveWeights(const AdditiveAttentionWeightsParams& params, const ThreadPool& all)
      : params(params), p(params.attention.forward), pool(with_workers(all, p)) {
    row_tiles = int((params.attention.num_rows + kTileQ - 1) / kTileQ);
    key_tiles = int((p.seqlen_kv + kTileKV - 1) / kTileKV);
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(p.batch * p.num_heads * row_tiles * key_tiles, int64_t(1))));
  }
  Buffers take(Scratch& s) const {
    Buffers b;
    const int slots = ScoreWeight<Real>::slots_of(p.head_dim);
    b.weight = ScoreWeight<Real>::take(p.head_dim, s);
    b.query_stride = ScoreWeight<Real>::row_stride_of(p.head_dim);
    b.query = s.take<Real>(int64_t(kTileQ) * b.query_stride);
    b.key = s.take<Real>(int64_t(kTileKV) * slots * kKeyParts);
    b.scores = s.take<Real>(kBlockRows * kTileKV);
    b.temp = s.take<Real>(int64_t(slots + 1) * kPanel<Real>);
    b.marked_rows = s.take<bool>(kTileQ);
    b.marked_keys = s.take<bool>(kTileKV);
    b.dropout_bits = s.take<uint32_t>(kDrop ? Dropout::row_bits_size(kTileKV) : 0);
    b.query_row = s.take<T>(p.head_dim);
    b.key_row = s.take<T>(p.head_dim);
    b.key_temp = s.take<T>(p.key.col_stride == 1 ? 0 : kTileKV * p.head_dim);
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
    for_each_item(pool, p.batch * p.num_heads * tiles, [&](int worker, int64_t item) {
      Scratch s((char*)memory + worker * worker_bytes());
      const int64_t head = item / tiles;
      tile(head / p.num_heads, int(head % p.num_heads), int(item % tiles / key_tiles) * kTileQ, int(item % key_tiles) * kTileKV, take(s));
    });
  }

 private:
  void tile(int64_t batch, int head, int row_begin, int key_begin, Buffers buf) const {
    const AttentionWeightsParams& chosen = params.attention;
    const int rows = int(min_of(int64_t(kTileQ), chosen.num_rows - row_begin)), keys = int(min_of(int64_t(kTileKV), p.seqlen_kv - key_begin)),
              cols = round_up(keys, kPanel<Real>);
    const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
    const ScoreMods<Real> mods(p, mask, batch);
    const Matrix<const T> query = matrix<const T>(p, p.query, batch, head), key = matrix<const T>(p, p.key, batch, head / (p.num_heads / p.num_heads_kv));
    const Matrix<Real> to = matrix<Real>(p, chosen.weights, batch, head);
    const Dropout dropout(p.dropout, batch, head, nullptr);
    buf.weight.set(weight_of<Real>(params, head));
    TileRow tile_rows[kTileQ];
    // shift[i] + lse[i] is the lse of row i in log2 units, and low[i] what rounding took from it.
    Real query_top = -AdditiveRange<Real>::kArgument, shift[kTileQ], lse[kTileQ], low[kTileQ];
    bool coarse = false;
    for (int i = 0; i < rows; i++) {
      const int row = int(chosen.rows ? chosen.rows[row_begin + i] : row_begin + i);
      tile_rows[i] = {head, row, mask.row(row)};
      Real top;
      pack_exponential_rows(buf.weight, query.from(row), 1, buf.query + int64_t(i) * buf.query_stride, buf.marked_rows + i, &top);
      query_top = top > query_top ? top : query_top;
      const Real of_row = ((const Real*)p.lse)[(batch * p.num_heads + head) * p.seqlen_q + row];
      const bool empty = of_row == Real(-INFINITY);
      shift[i] = 0, lse[i] = empty ? Real(0) : in_log2_units(of_row), low[i] = empty ? Real(0) : lost_in_log2_units(of_row, lse[i]);
      coarse = coarse || lse_is_coarse<T>(lse[i]);
    }
    if (coarse) normalise_again(rows, tile_rows, query_top, mods, query, key, buf, shift, lse, low);
    const bool cap = pack_keys(key, key_begin, keys, query_top, buf);
    for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
      const int count = min_of(kBlockRows, rows - i0);
      const TileRow* block = tile_rows + i0;
      const Real factor = score_rows(i0, count, block, key_begin, keys, cap, mods, query, key, buf);
      for (int i = 0; i < count; i++) {
        Real* row = buf.scores + i * kTileKV;
        const uint32_t* bits = kDrop ? dropout.row_bits(block[i].query, key_begin, cols, buf.dropout_bits) : nullptr;
        for (int j = 0; j < cols; j += V::kLanes) {
          const V score = V::load(row + j);
          V weight = exp2(score * V(factor) - V(shift[i0 + i]) - V(lse[i0 + i]) - V(low[i0 + i]));
          weight = score.v == V(Real(-INFINITY)).v ? V(Real(0)).v : weight.v;
          if (kDrop) weight = dropout.keep(weight, bits + j);
          weight.store(row + j);
        }
        store_row(row, keys, Real(kDrop ? dropout.inverse_keep : 1), to.row(row_begin + i0 + i) + key_begin * to.col_stride, to.col_stride);
      }
    }
  }

  // Whether scores with these keys need the cap.
  bool pack_keys(const Matrix<const T>& key, int begin, int count, Real query_top, const Buffers& buf) const {
    Real top;
    const auto k = adjacent_columns(key, begin, count, int(p.head_dim), buf.key_temp);
    pack_exponential_keys(buf.weight, k.data, k.row_stride, count, buf.key, buf.marked_keys, buf.temp, &top);
    return query_top + top > AdditiveRange<Real>::kSum;
  }

  // Scores of rows [i0, i0 + count) of the tile and the packed keys, hidden ones -inf. Returns what they are still to be multiplied by.
  Real score_rows(int i0, int count, const TileRow* block, int key_begin, int keys, bool cap, const ScoreMods<Real>& mods, const Matrix<const T>& query,
                  const Matrix<const T>& key, const Buffers& buf) const {
    const int cols = round_up(keys, kPanel<Real>);
    additive_scores(count, cols, cap, buf.weight, buf.query + int64_t(i0) * buf.query_stride, buf.key, buf.scores, kTileKV);
    for_each_marked_pair(mods, block, buf.marked_rows + i0, count, key_begin, key_begin + keys, buf.marked_keys, !buf.weight.finite, [&](int i, int j) {
      buf.scores[i * kTileKV + j - key_begin] =
          buf.weight.direct(whole_row(query, block[i].query, int(p.head_dim), buf.query_row), whole_row(key, j, int(p.head_dim), buf.key_row));
    });
    const Real factor =
        scale_large(buf.weight, count, cols, mods.apply(block, count, key_begin, key_begin + keys, buf.scores, kTileKV, nullptr, nullptr), buf.scores, kTileKV);
    for (int i = 0; i < count; i++) mask_row(buf.scores + i * kTileKV, cols, key_begin, block[i].keys);
    return factor;
  }

  // Rows whose lse is too coarse, from their maximum and sum over all keys.
  __attribute__((noinline)) void normalise_again(int rows, const TileRow* tile_rows, Real query_top, const ScoreMods<Real>& mods, const Matrix<const T>& query,
                                                 const Matrix<const T>& key, const Buffers& buf, Real* shift, Real* lse, Real* low) const {
    alignas(64) Real row_max[kTileQ + kLanes<Real>], row_sum[kTileQ * kLanes<Real>];
    const RowState<Real> state = {row_max, row_sum, row_max, 0};
    state.clear(kTileQ);
    for (int begin = 0; begin < p.seqlen_kv; begin += kTileKV) {
      const int keys = min_of(kTileKV, int(p.seqlen_kv) - begin);
      const bool cap = pack_keys(key, begin, keys, query_top, buf);
      for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
        const int count = min_of(kBlockRows, rows - i0);
        const Real factor = score_rows(i0, count, tile_rows + i0, begin, keys, cap, mods, query, key, buf);
        softmax_block<Real, false>(count, round_up(keys, kPanel<Real>), kTileKV, buf.scores, buf.scores, factor, state.from(i0), 0, BlockDropout<Real>());
      }
    }
    for (int i = 0; i < rows; i++) {
      if (!lse_is_coarse<T>(lse[i])) continue;
      shift[i] = row_max[i], low[i] = 0;
      lse[i] = log2(V(reduce_add(V::load(row_sum + i * kLanes<Real>)))).v[0];
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
