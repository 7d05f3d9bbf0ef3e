#pragma once
// Additive attention, backward. Nothing of size n x n is kept, nothing of size n x n x head_dim exists: a tile of scores is computed again from
// the exponentials of its rows, and once it has become gradients of scores G, a second sweep over the columns adds up
//
//   grad_query_id = w_d sum_j G_ij (1 - t_ijd^2)   grad_key_jd = w_d sum_i G_ij (1 - t_ijd^2)   grad_w_d = sum_ij G_ij t_ijd
//
// with t = N/D, D = N + 1, and 1 - t^2 = (N + D) / D^2, which is 0 where t is saturated. How a head is cut into chunks of queries follows from the shape and the mask: sums do not
// depend on the threads.

#include "additive_scores.h"
#include "backward_queries.h"
#include "score_gradient.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Adds what `rows` rows and one vector of keys give in one quad. `grads` [rows][kLanes] are the gradients of the scores, `by_query`
// [rows][kQuad][kLanes] sums over keys, lane by lane. One division gives the four 1/D of a pair.
template <bool kCap, class Real>
ALWAYS_INLINE void additive_gradient_rows(int rows, const Real* query, int query_stride, const Real* key, const Real* grads, Real* by_query,
                                          NativeVec<Real> (&by_key)[kQuad], NativeVec<Real> (&by_weight)[kQuad]) {
  using V = NativeVec<Real>;
  const V one(Real(1));
#pragma GCC unroll 1
  for (int i = 0; i < rows; i++, query += query_stride, grads += V::kLanes, by_query += kQuad * V::kLanes) {
    const V grad = V::load(grads);
    V n[kQuad], d[kQuad];
#pragma GCC unroll 4
    for (int c = 0; c < kQuad; c++) n[c] = half_excess<kCap>(query[c], query[query_stride / 2 + c], key + c * kKeyParts * kPanel<Real>), d[c] = n[c] + one;
    const V low = d[0] * d[1], high = d[2] * d[3], inverse = one / (low * high);
    const V inverse_low = high * inverse, inverse_high = low * inverse;
    const V r[kQuad] = {d[1] * inverse_low, d[0] * inverse_low, d[3] * inverse_high, d[2] * inverse_high};
#pragma GCC unroll 4
    for (int c = 0; c < kQuad; c++) {
      const V slope = grad * r[c] * (r[c] * (n[c] + d[c]));
      (V::load(by_query + c * V::kLanes) + slope).store(by_query + c * V::kLanes);
      by_key[c] = by_key[c] + slope;
      by_weight[c] = multiply_add(grad, n[c] * r[c], by_weight[c]);
    }
  }
}

// What one worker holds of the key side of one query head.
template <class Real>
struct AdditiveKeys {
  ScoreWeight<Real> weight;
  Real *key, *value_transposed;  // [panels of keys][slots][kKeyParts][kPanel], [panels of keys][head_dim_v][kPanel]
  bool* marked;                  // [seqlen_kv, whole tiles]
  Real* top;                     // [tiles] the largest argument
  Real* grad_key;                // [panels of keys][slots][kPanel], not yet times the weight
  Real* raw;                     // [head_dim][kPanel]
  int64_t value_stride;

  AdditiveKeys(const AttentionParams& p, Scratch& scratch) {
    const int64_t padded = round_up(int(p.seqlen_kv), kBwdTileKV), slots = ScoreWeight<Real>::slots_of(p.head_dim);
    weight = ScoreWeight<Real>::take(p.head_dim, scratch);
    value_stride = p.head_dim_v * kPanel<Real>;
    key = scratch.take<Real>(padded * slots * kKeyParts);
    value_transposed = scratch.take<Real>(padded * p.head_dim_v);
    marked = scratch.take<bool>(padded);
    top = scratch.take<Real>(padded / kBwdTileKV);
    grad_key = scratch.take<Real>(padded * slots);
    raw = scratch.take<Real>(p.head_dim * kPanel<Real>);
  }
};

// What one chunk adds up for one kv head, rows of keys.
template <class Real>
struct AdditiveSums {
  Real *grad_key, *grad_value;  // [seqlen_kv][stride]
  double* grad_weight;          // [group][head_dim]
  int64_t key_stride, value_stride, group, head_dim;

  AdditiveSums(const AttentionParams& p, Scratch& scratch) {
    const int64_t padded = p.seqlen_kv + kBlockRows;
    key_stride = round_up(int(p.head_dim), kLanes<Real>), value_stride = round_up(int(p.head_dim_v), kLanes<Real>);
    group = p.num_heads / p.num_heads_kv, head_dim = p.head_dim;
    grad_key = scratch.take<Real>(padded * key_stride);
    grad_value = scratch.take<Real>(padded * value_stride);
    grad_weight = scratch.take<double>(group * head_dim);
  }
  void clear(int64_t seqlen_kv) const {
    memset(grad_key, 0, seqlen_kv * key_stride * sizeof(Real));
    memset(grad_value, 0, seqlen_kv * value_stride * sizeof(Real));
    memset(grad_weight, 0, group * head_dim * sizeof(double));
  }
  void add(const AdditiveSums& other, int64_t seqlen_kv) const {
    for (int64_t i = 0; i < seqlen_kv * key_stride; i++) grad_key[i] += other.grad_key[i];
    for (int64_t i = 0; i < seqlen_kv * value_stride; i++) grad_value[i] += other.grad_value[i];
    for (int64_t i = 0; i < group * head_dim; i++) grad_weight[i] += other.grad_weight[i];
  }
};

// What the exact backward pass has for a tile of queries, and besides: exponentials, gradients of scores by vectors of keys, sums.
template <class T, class Real, bool kDrop>
struct AdditiveBackwardBuffers : BackwardBuffers<T, Real, kDrop> {
  Real *query, *by_keys, *by_query, *grad_slots;
  bool* marked_rows;
  T *query_row, *key_row;
  int query_stride, slot_stride;
  AdditiveBackwardBuffers(const AttentionBackwardParams& params, Scratch& scratch) : BackwardBuffers<T, Real, kDrop>(params, scratch) {
    const AttentionParams& p = params.forward;
    slot_stride = round_up(ScoreWeight<Real>::slots_of(p.head_dim), kLanes<Real>);
    query_stride = ScoreWeight<Real>::row_stride_of(p.head_dim);
    query = scratch.take<Real>(int64_t(kBwdTileQ) * query_stride);
    by_keys = scratch.take<Real>(kBwdTileQ * kBwdTileKV);                  // [vectors of keys][tile_q][kLanes]
    by_query = scratch.take<Real>(kBwdTileQ * kQuad * kLanes<Real>);
    grad_slots = scratch.take<Real>(int64_t(kBwdTileQ) * slot_stride);  // gradients of the queries, not yet times the weight
    marked_rows = scratch.take<bool>(kBwdTileQ);
    query_row = scratch.take<T>(p.head_dim);
    key_row = scratch.take<T>(p.head_dim);
  }
};

template <class T, class Real, bool kDrop>
struct AdditiveBackward : BackwardQueries<T, Real, kDrop> {
  using Queries = BackwardQueries<T, Real, kDrop>;
  using V = NativeVec<Real>;
  using Buffers = AdditiveBackwardBuffers<T, Real, kDrop>;
  using Keys = AdditiveKeys<Real>;
  using Sums = AdditiveSums<Real>;
  static constexpr int kTileQ = kBwdTileQ, kTileKV = kBwdTileKV, kBlocks = kTileQ / kBlockRows;

  using Queries::p;
  using Queries::params;
  const AdditiveAttentionBackwardParams& additive;
  ThreadPool pool;
  int group, chunks;
  int64_t heads;

  AdditiveBackward(const AdditiveAttentionBackwardParams& additive, const ThreadPool& all)
      : Queries{additive.attention, additive.attention.forward}, additive(additive), pool(with_workers(all, p)) {
    group = int(p.num_heads / p.num_heads_kv);
    heads = p.batch * p.num_heads_kv;
    chunks = BackwardPlan(params).chunks;
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(heads * chunks, int64_t(1))));
  }

  template <class Part, class Params>
  static size_t bytes_of(const Params& params) {
    Scratch s(nullptr);
    Part(params, s);
    return s.used;
  }
  int64_t weight_parts() const { return heads * group * p.head_dim; }
  size_t parts_bytes() const { return (weight_parts() * sizeof(double) + 63) / 64 * 64; }
  size_t worker_bytes() const { return bytes_of<Buffers>(params) + bytes_of<Keys>(p); }
  size_t scratch_bytes() const {
    return parts_bytes() + pool.num_workers * worker_bytes() + (chunks > 1 ? heads * chunks : pool.num_workers) * bytes_of<Sums>(p);
  }

  void run(void* memory) const {
    if (heads == 0) return;
    double* parts = (double*)memory;  // [heads][group][head_dim] of grad_score_weight
    char* workers_at = (char*)memory + parts_bytes();
    const size_t worker_size = worker_bytes(), buffers_size = bytes_of<Buffers>(params), sums_size = bytes_of<Sums>(p);
    char* sums_at = workers_at + pool.num_workers * worker_size;
    const auto sums_of = [&](int64_t index) {
      Scratch s(sums_at + index * sums_size);
      return Sums(p, s);
    };
    const auto finish = [&](int64_t head, const Sums& sums) {
      store_keys(head, sums);
      memcpy(parts + head * group * p.head_dim, sums.grad_weight, group * p.head_dim * sizeof(double));
    };
    for_each_item(pool, heads * chunks, [&](int worker, int64_t item) {
      Scratch first(workers_at + worker * worker_size), second(workers_at + worker * worker_size + buffers_size);
      const Buffers buf(params, first);
      Keys keys(p, second);
      const Sums sums = sums_of(chunks > 1 ? item : worker);
      run_chunk(item / chunks, int(item % chunks), keys, sums, buf);
      if (chunks == 1) finish(item, sums);
    });
    if (chunks > 1)
      for_each_item(pool, heads, [&](int, int64_t head) {
        for (int chunk = 1; chunk < chunks; chunk++) sums_of(head * chunks).add(sums_of(head * chunks + chunk), p.seqlen_kv);
        finish(head, sums_of(head * chunks));
      });
    if (additive.grad_score_weight) store_weight(parts);
  }

 private:
  void store_weight(const double* parts) const {
    const int64_t rows = additive.weight_head_stride == 0 ? 1 : p.num_heads;
    for (int64_t h = 0; h < rows; h++)
      for (int64_t d = 0; d < p.head_dim; d++) {
        double sum = 0;
        for (int64_t b = 0; b < p.batch; b++)
          for (int64_t head = rows == 1 ? 0 : h; head < (rows == 1 ? p.num_heads : h + 1); head++) sum += parts[(b * p.num_heads + head) * p.head_dim + d];
        ((Real*)additive.grad_score_weight)[h * p.head_dim + d] = Real(sum);
      }
  }

  void store_keys(int64_t head, const Sums& sums) const {
    const int64_t batch = head / p.num_heads_kv, head_kv = head % p.num_heads_kv;
    const Real keep = Real(kDrop ? inverse_keep_of(p.dropout.p) : 1);
    for (int64_t j = 0; j < p.seqlen_kv; j++) {
      if (params.grad_key.data) {
        const Matrix<T> to = matrix<T>(p, params.grad_key, batch, head_kv);
        store_row(sums.grad_key + j * sums.key_stride, int(p.head_dim), Real(1), to.row(j), to.col_stride);
      }
      if (params.grad_value.data) {
        const Matrix<T> to = matrix<T>(p, params.grad_value, batch, head_kv);
        store_row(sums.grad_value + j * sums.value_stride, int(p.head_dim_v), keep, to.row(j), to.col_stride);
      }
    }
  }

  void run_chunk(int64_t head, int chunk, Keys& keys, const Sums& sums, const Buffers& buf) const {
    const int64_t batch = head / p.num_heads_kv;
    const int head_kv = int(head % p.num_heads_kv), seqlen_kv = int(p.seqlen_kv), head_dim = int(p.head_dim);
    const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
    const ScoreMods<Real> mods(p, mask, batch);
    sums.clear(p.seqlen_kv);
    const int begin = chunk_begin(chunk, chunks, int(p.seqlen_q), mask, kBlockRows);
    const int end = chunk_begin(chunk + 1, chunks, int(p.seqlen_q), mask, kBlockRows);
    if (begin >= end) return;
    const QueryTiles tiles(1, begin, end - begin, kTileQ);
    for (int g = 0; g < group; g++) {
      const int query_head = head_kv * group + g;
      pack_keys(batch, head_kv, query_head, g == 0, keys, buf);
      memset(keys.grad_key, 0, int64_t(round_up(seqlen_kv, kTileKV)) * keys.weight.slots * sizeof(Real));
      for (int tile = 0; tile < tiles.count; tile++) {
        const int rows = tiles.fill(tile, query_head, mask, buf.rows);
        query_tile(batch, head_kv, rows, mods, keys, sums, sums.grad_weight + int64_t(g) * head_dim, buf);
      }
      // To rows of keys, times the weights; where those are not finite, all went the direct way.
      if (!keys.weight.finite) continue;
      for (int j = 0; j < seqlen_kv; j++)
        for (int d = 0; d < head_dim; d++)
          sums.grad_key[j * sums.key_stride + d] +=
              keys.weight.weight[d] * keys.grad_key[(int64_t(j / kPanel<Real>) * keys.weight.slots + d) * kPanel<Real> + j % kPanel<Real>];
    }
  }

  void pack_keys(int64_t batch, int head_kv, int query_head, bool values, Keys& keys, const Buffers& buf) const {
    const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    const Matrix<const T> key = matrix<const T>(p, p.key, batch, head_kv), value = matrix<const T>(p, p.value, batch, head_kv);
    keys.weight.set(weight_of<Real>(additive, query_head));
    for (int begin = 0; begin < p.seqlen_kv; begin += kTileKV) {
      const int rows = min_of(kTileKV, int(p.seqlen_kv) - begin);
      const auto k = adjacent_columns(key, begin, rows, head_dim, buf.key_temp);
      pack_exponential_keys(keys.weight, k.data, k.row_stride, rows, keys.key + int64_t(begin) * keys.weight.slots * kKeyParts, keys.marked + begin, keys.raw,
                            keys.top + begin / kTileKV);
      if (!values) continue;
      const auto v = adjacent_columns(value, begin, rows, head_dim_v, buf.value_temp);
      pack_transposed(v.data, v.row_stride, rows, head_dim_v, keys.value_transposed + begin / kPanel<Real> * keys.value_stride, keys.value_stride);
    }
  }

  void query_tile(int64_t batch, int head_kv, int rows, const ScoreMods<Real>& mods, const Keys& keys, const Sums& sums, double* grad_weight,
                  const Buffers& buf) const {
    this->pack_queries(batch, rows, false, buf);
    const int head = buf.rows[0].head;
    const Matrix<const T> query = matrix<const T>(p, p.query, batch, head), key = matrix<const T>(p, p.key, batch, head_kv);
    Real query_top;
    pack_exponential_rows(keys.weight, query.from(buf.rows[0].query), rows, buf.query, buf.marked_rows, &query_top);
    memset(buf.grad_slots, 0, int64_t(kTileQ) * buf.slot_stride * sizeof(Real));
    // Of pairs that go the direct way, by columns, with the weights.
    memset(buf.grad_query, 0, int64_t(kTileQ) * sums.key_stride * sizeof(Real));
    BlockKeys blocks[kBlocks];
    Interval main = {0, 0}, sinks = {0, 0};
    for (int i = 0; i < rows; i += kBlockRows) {
      const BlockKeys& block = blocks[i / kBlockRows] = BlockKeys(buf.rows + i, min_of(kBlockRows, rows - i));
      main = hull(main, block.main), sinks = hull(sinks, block.sinks);
    }
    bool coarse = false;
    for (int i = 0; i < rows; i++) coarse = coarse || lse_is_coarse<T>(buf.row_lse[i]);
    if (coarse) normalise_again(rows, blocks, hull(main, sinks), query_top, mods, query, key, keys, buf);
    int next = 0;
    const Interval ranges[] = {sinks, main};
    for (const Interval range : ranges)
      for (int kv_begin = max_of(next, round_down(range.begin, kTileKV)); kv_begin < range.end; kv_begin += kTileKV) {
        next = kv_begin + kTileKV;
        const int kv_end = min_of(kv_begin + kTileKV, max_of(main.end, sinks.end));
        const bool cap = query_top + keys.top[kv_begin / kTileKV] > AdditiveRange<Real>::kSum;
        Interval seen[kBlocks];
        for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
          const int count = min_of(kBlockRows, rows - i0);
          const Interval s = seen[i0 / kBlockRows] =
              mods.runs(buf.rows + i0, count, blocks[i0 / kBlockRows].within(kv_begin, kv_end), kPanel<Real>, nullptr).hull();
          if (is_empty(s)) zero_block(buf, i0, kv_begin, kv_begin, kv_end);
          else block_of_rows(batch, i0, count, kv_begin, kv_end, s, blocks[i0 / kBlockRows], cap, coarse, mods, query, key, keys, sums, grad_weight, buf);
        }
        if (params.grad_value.data) add_grad_value(rows, kv_begin, kv_end, seen, sums, buf);
        if (params.grad_query.data || params.grad_key.data || additive.grad_score_weight) {
          if (cap) sweep<true>(rows, kv_begin, seen, keys, grad_weight, buf);
          else sweep<false>(rows, kv_begin, seen, keys, grad_weight, buf);
        }
      }
    if (!params.grad_query.data) return;
    for (int i = 0; i < rows; i++) {
      Real* row = buf.grad_query + i * sums.key_stride;
      for (int d = 0; d < p.head_dim && keys.weight.finite; d++) row[d] += keys.weight.weight[d] * buf.grad_slots[int64_t(i) * buf.slot_stride + d];
      const Matrix<T> to = matrix<T>(p, params.grad_query, batch, head);
      store_row(row, int(p.head_dim), Real(1), to.row(buf.rows[i].query), to.col_stride);
    }
  }

  // grad_value += probs^T grad_out: blocks of keys, reduction over the rows that see them.
  void add_grad_value(int rows, int kv_begin, int kv_end, const Interval* seen, const Sums& sums, const Buffers& buf) const {
    for (int j = kv_begin; j < kv_end; j += kBlockRows) {
      const int count = min_of(kBlockRows, kv_end - j);
      int begin = 0, end = rows;
      while (begin < end && is_empty(intersect(seen[begin / kBlockRows], j, j + count))) begin += kBlockRows;
      while (end > begin && is_empty(intersect(seen[(end - 1) / kBlockRows], j, j + count))) end = round_down(end - 1, kBlockRows);
      if (begin >= end) continue;
      gemm<Left::Transposed, Store::Accumulate>(count, int(p.head_dim_v), end - begin, buf.probs + begin * kTileKV + j - kv_begin, kTileKV,
                                                buf.grad_out_panels + begin * kPanel<Real>, buf.tile_stride, sums.grad_value + int64_t(j) * sums.value_stride,
                                                sums.value_stride);
    }
  }

  // Probabilities, in rows, and gradients of the scores, by vectors of keys, of one block of rows; 0 outside of what it sees.
  void block_of_rows(int64_t batch, int i0, int rows, int kv_begin, int kv_end, Interval seen, const BlockKeys& block, bool cap, bool coarse,
                     const ScoreMods<Real>& mods, const Matrix<const T>& query, const Matrix<const T>& key, const Keys& keys, const Sums& sums,
                     double* grad_weight, const Buffers& buf) const {
    constexpr int P = kPanel<Real>;
    const int begin = round_down(seen.begin, P), end = seen.end, left = begin - kv_begin, cols = round_up(end - begin, P);
    Real *scores = buf.probs + i0 * kTileKV + left, *grads = buf.grad_scores + i0 * kTileKV + left;
    const TileRow* tile_rows = buf.rows + i0;
    gemm<Left::RowMajor, Store::Overwrite>(rows, end - begin, int(p.head_dim_v), buf.grad_out_rows + int64_t(i0) * buf.grad_out_stride, buf.grad_out_stride,
                                           keys.value_transposed + begin / P * keys.value_stride, keys.value_stride, grads, kTileKV);
    Real factor = block_scores(i0, rows, begin, end, cap, block, mods, query, key, keys, scores, buf);
    if (coarse) {
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j += V::kLanes) (V::load(scores + i * kTileKV + j) * V(factor) - V(buf.row_shift[i0 + i])).store(scores + i * kTileKV + j);
      factor = Real(1);
    }
    const bool select = !covers(block.full, begin, begin + cols) || mods.hides();
    for (int i = 0; i < rows; i++) {
      const Dropout dropout(p.dropout, batch, tile_rows[i].head, nullptr);
      const uint32_t* bits = kDrop ? dropout.row_bits(tile_rows[i].query, begin, cols, buf.dropout_bits) : nullptr;
      const Real lse = buf.row_lse[i0 + i], low = buf.row_lse_low[i0 + i], delta = buf.row_delta[i0 + i];
      Real *s = scores + i * kTileKV, *g = grads + i * kTileKV;
      if (select) score_gradient_row<true, kDrop>(s, g, cols, factor, lse, low, delta, &dropout, bits);
      else score_gradient_row<false, kDrop>(s, g, cols, factor, lse, low, delta, &dropout, bits);
    }
    for_marked(i0, rows, begin, end, mods, query, key, keys, buf, [&](int i, int j, const T* q, const T* k) {
      Real& grad = grads[i * kTileKV + j - begin];
      if (grad == 0) return;
      direct_gradient(grad, q, k, keys.weight.weight, buf.grad_query + int64_t(i0 + i) * sums.key_stride, sums.grad_key + int64_t(j) * sums.key_stride,
                      grad_weight);
      grad = 0;
    });
    zero_block(buf, i0, kv_begin, kv_begin, begin);
    zero_block(buf, i0, kv_begin, begin + cols, kv_end);
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < cols; j += V::kLanes) V::load(grads + i * kTileKV + j).store(by_keys(buf, left + j, i0 + i));
  }

  // Calls f(row, key, elements of the row, elements of the key) for the visible pairs of a block that are out of range.
  template <class F>
  void for_marked(int i0, int rows, int begin, int end, const ScoreMods<Real>& mods, const Matrix<const T>& query, const Matrix<const T>& key, const Keys& keys,
                  const Buffers& buf, const F& f) const {
    for_each_marked_pair(mods, buf.rows + i0, buf.marked_rows + i0, rows, begin, end, keys.marked + begin, !keys.weight.finite, [&](int i, int j) {
      f(i, j, whole_row(query, buf.rows[i0 + i].query, int(p.head_dim), buf.query_row), whole_row(key, j, int(p.head_dim), buf.key_row));
    });
  }

  // Scores of a block of rows and the keys [begin, end) from a whole panel on, hidden ones -inf. Returns what they are still to be multiplied by.
  Real block_scores(int i0, int rows, int begin, int end, bool cap, const BlockKeys& block, const ScoreMods<Real>& mods, const Matrix<const T>& query,
                    const Matrix<const T>& key, const Keys& keys, Real* scores, const Buffers& buf) const {
    const int cols = round_up(end - begin, kPanel<Real>);
    additive_scores(rows, cols, cap, keys.weight, buf.query + int64_t(i0) * buf.query_stride, keys.key + int64_t(begin) * keys.weight.slots * kKeyParts, scores,
                    kTileKV);
    for_marked(i0, rows, begin, end, mods, query, key, keys, buf,
               [&](int i, int j, const T* q, const T* k) { scores[i * kTileKV + j - begin] = keys.weight.direct(q, k); });
    const Real factor = scale_large(keys.weight, rows, cols, mods.apply(buf.rows + i0, rows, begin, end, scores, kTileKV, nullptr, nullptr), scores, kTileKV);
    if (!covers(block.full, begin, begin + cols))
      for (int i = 0; i < rows; i++) mask_row(scores + i * kTileKV, cols, begin, buf.rows[i0 + i].keys);
    return factor;
  }

  // The maximum and sum of the rows whose lse is too coarse: row_shift and row_lse of a tile, from one more pass over its scores.
  __attribute__((noinline)) void normalise_again(int rows, const BlockKeys* blocks, Interval all, Real query_top, const ScoreMods<Real>& mods,
                                                 const Matrix<const T>& query, const Matrix<const T>& key, const Keys& keys, const Buffers& buf) const {
    buf.coarse.clear(kTileQ);
    for (int kv_begin = round_down(all.begin, kTileKV); kv_begin < all.end; kv_begin += kTileKV)
      for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
        const BlockKeys& block = blocks[i0 / kBlockRows];
        const int count = min_of(kBlockRows, rows - i0);
        const Interval seen = mods.runs(buf.rows + i0, count, block.within(kv_begin, min_of(kv_begin + kTileKV, all.end)), kPanel<Real>, nullptr).hull();
        if (is_empty(seen)) continue;
        const int begin = round_down(seen.begin, kPanel<Real>);
        const bool cap = query_top + keys.top[kv_begin / kTileKV] > AdditiveRange<Real>::kSum;
        const Real factor = block_scores(i0, count, begin, seen.end, cap, block, mods, query, key, keys, buf.probs, buf);
        softmax_block<Real, false>(count, round_up(seen.end - begin, kPanel<Real>), kTileKV, buf.probs, buf.probs, factor, buf.coarse.from(i0), 0,
                                   BlockDropout<Real>());
      }
    for (int i = 0; i < rows; i++) {
      if (!lse_is_coarse<T>(buf.row_lse[i])) continue;
      buf.row_shift[i] = buf.coarse.row_max[i];
      buf.row_lse_low[i] = 0;
      buf.row_lse[i] = log2(V(reduce_add(V::load(buf.coarse.row_sum + i * kLanes<Real>)))).v[0];
    }
  }

  static Real* by_keys(const Buffers& buf, int col, int row) { return buf.by_keys + (int64_t(col / V::kLanes) * kTileQ + row) * V::kLanes; }

  // The keys [begin, end), whole panels, that a block of rows does not see.
  static void zero_block(const Buffers& buf, int i0, int kv_begin, int begin, int end) {
    for (int j = begin; j < end; j += V::kLanes)
      for (int i = i0; i < i0 + kBlockRows; i++) {
        V(Real(0)).store(buf.probs + i * kTileKV + j - kv_begin);
        V(Real(0)).store(by_keys(buf, j - kv_begin, i));
      }
  }

  // One pair whose numbers are too large for exponentials. Columns are in their order.
  void direct_gradient(Real grad, const T* q, const T* k, const Real* weight, Real* grad_query, Real* grad_key, double* grad_weight) const {
    for (int d = 0; d < p.head_dim; d += V::kLanes) {
      const int count = min_of(V::kLanes, int(p.head_dim) - d);
      const V t = tanh(load_converted(q + d, count) + load_converted(k + d, count));
      const V slope = V(grad) * load_converted(weight + d, count) * (V(Real(1)) - t * t);
      (V::load(grad_query + d) + slope).store(grad_query + d);
      (V::load(grad_key + d) + slope).store(grad_key + d);
      for (int c = 0; c < count; c++) grad_weight[d + c] += double(grad) * double(t.v[c]);
    }
  }

  // The second sweep: one quad of columns at a time, whose sums stay in registers (keys, weight) and in L1 (queries).
  template <bool kCap>
  void sweep(int rows, int kv_begin, const Interval* seen, const Keys& keys, double* grad_weight, const Buffers& buf) const {
    constexpr int P = kPanel<Real>, kN = V::kLanes;
    const int slots = keys.weight.slots;
    Interval all = {0, 0};
    for (int i = 0; i < rows; i += kBlockRows) all = hull(all, seen[i / kBlockRows]);
    for (int s = 0; s < slots; s += kQuad) {
      memset(buf.by_query, 0, int64_t(rows) * kQuad * kN * sizeof(Real));
      V by_weight[kQuad] = {V(Real(0)), V(Real(0)), V(Real(0)), V(Real(0))};
      for (int j = round_down(all.begin, kN); j < all.end; j += kN) {
        const int64_t at = (int64_t(j / P) * slots + s) * P + j % P;
        const Real* const key = keys.key + (int64_t(j / P) * slots + s) * kKeyParts * P + j % P;
        V by_key[kQuad], part[kQuad];
        for (int c = 0; c < kQuad; c++) by_key[c] = part[c] = V(Real(0));
        for (int begin = 0; begin < rows;) {
          // Runs of blocks that see some of these keys.
          const auto sees = [&](int row) { return !is_empty(intersect(seen[row / kBlockRows], j, j + kN)); };
          while (begin < rows && !sees(begin)) begin += kBlockRows;
          int end = begin;
          while (end < rows && sees(end)) end += kBlockRows;
          if (begin >= rows) break;
          additive_gradient_rows<kCap>(min_of(end, rows) - begin, buf.query + int64_t(begin) * buf.query_stride + s, buf.query_stride, key,
                                       by_keys(buf, j - kv_begin, begin), buf.by_query + int64_t(begin) * kQuad * kN, by_key, part);
          begin = end;
        }
        for (int c = 0; c < kQuad; c++) {
          (V::load(keys.grad_key + at + c * P) + by_key[c]).store(keys.grad_key + at + c * P);
          by_weight[c] = by_weight[c] + part[c];
        }
      }
      for (int i = 0; i < rows; i++)
        for (int c = 0; c < kQuad; c++) buf.grad_slots[int64_t(i) * buf.slot_stride + s + c] += reduce_add(V::load(buf.by_query + (i * kQuad + c) * kN));
      for (int c = 0; c < kQuad; c++)
        if (s + c < keys.weight.head_dim) grad_weight[s + c] += double(reduce_add(by_weight[c]));
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
