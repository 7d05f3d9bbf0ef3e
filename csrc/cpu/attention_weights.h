#pragma once
// The weights of chosen rows, computed again from lse: what was never kept, for those who ask to see it.

#include "dropout.h"
#include "schedule.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

constexpr int kWeightsTileQ = kBlockRows * 8, kWeightsTileKV = 512;

template <class T, class Unit, bool kDrop>
struct Weights {
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  const AttentionWeightsParams& params;
  const AttentionParams& p;
  ThreadPool pool;
  int row_tiles, key_tiles, query_stride, key_panel;
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
    row_tiles = int((params.num_rows + kWeightsTileQ - 1) / kWeightsTileQ);
    key_tiles = int((p.seqlen_kv + kWeightsTileKV - 1) / kWeightsTileKV);
    query_stride = round_up(units<Unit>(int(p.head_dim)), kLanes<Unit>);
    key_panel = units<Unit>(int(p.head_dim)) * kPanel<Unit>;
    heads = params.average ? 1 : p.num_heads;
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(p.batch * heads * row_tiles * key_tiles, int64_t(1))));
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
      const int row_begin = int(item % tiles / key_tiles) * kWeightsTileQ, key_begin = int(item % key_tiles) * kWeightsTileKV;
      const int rows = int(min_of(int64_t(kWeightsTileQ), params.num_rows - row_begin)), cols = int(min_of(int64_t(kWeightsTileKV), p.seqlen_kv - key_begin));
      memset(buf.weights, 0, kWeightsTileQ * kWeightsTileKV * sizeof(Real));
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
    const Matrix<const T> query = matrix<const T>(p, p.query, batch, head);
    for (int i = 0; i < rows; i++) {
      const int row = int(params.rows ? params.rows[row_begin + i] : row_begin + i);
      buf.rows[i] = {head, row, mask.row(row)};
      const auto q = adjacent_columns(query, row, 1, head_dim, buf.temp);
      pack_rows(q.data, q.row_stride, 1, head_dim, mods.factor(), buf.query + int64_t(i) * query_stride, query_stride);
    }
    const auto key = adjacent_columns(matrix<const T>(p, p.key, batch, head_kv), key_begin, key_count, head_dim, buf.temp);
    pack_transposed(key.data, key.row_stride, key_count, head_dim, buf.key, key_panel);
    const Dropout dropout(p.dropout, batch, head, nullptr);
    for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
      const int count = min_of(kBlockRows, rows - i0);
      const TileRow* block = buf.rows + i0;
      gemm<Left::RowMajor, Store::Overwrite>(count, key_count, units<Unit>(head_dim), buf.query + int64_t(i0) * query_stride, query_stride, buf.key, key_panel,
                                             buf.scores, kWeightsTileKV);
      Real factor = kUnitSize<Unit> == 1 ? Real(1) : mods.factor() < 0 ? -mods.factor() : mods.factor();
      if (mods.any()) mods.apply(block, count, key_begin, key_begin + key_count, buf.scores, kWeightsTileKV, factor, (Real*)nullptr), factor = Real(1);
      for (int i = 0; i < count; i++) {
        Real *row = buf.scores + i * kWeightsTileKV, *sums = buf.weights + (i0 + i) * kWeightsTileKV;
        if (!covers(block[i].keys.main, key_begin, key_begin + cols)) mask_row(row, cols, key_begin, block[i].keys);
        const Real lse = ((const Real*)p.lse)[(batch * p.num_heads + head) * p.seqlen_q + block[i].query];
        const V hidden(Real(-INFINITY)), shift(lse == Real(-INFINITY) ? Real(0) : Real(lse * kLog2e)), scale(share * Real(kDrop ? dropout.inverse_keep : 1));
        const uint32_t* bits = kDrop ? dropout.row_bits(block[i].query, key_begin, cols, buf.dropout_bits) : nullptr;
        for (int j = 0; j < cols; j += V::kLanes) {
          const V score = V::load(row + j);
          V weight = exp2(score * V(factor) - shift);
          weight = score.v == hidden.v ? V(Real(0)).v : weight.v;
          if (kDrop) weight = dropout.keep(weight, bits + j);
          multiply_add(weight, scale, V::load(sums + j)).store(sums + j);
        }
      }
    }
  }
  void store(int64_t batch, int64_t head, int row_begin, int rows, int key_begin, int cols, const Real* from) const {
    const Matrix<Real> to = matrix<Real>(p, params.weights, batch, head);
    for (int i = 0; i < rows; i++) store_row(from + i * kWeightsTileKV, cols, Real(1), to.row(row_begin + i) + key_begin * to.col_stride, to.col_stride);
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
