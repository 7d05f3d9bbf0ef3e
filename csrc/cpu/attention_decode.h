#pragma once
// Attention of few queries over the keys of a cache: one pass over keys and values where they lie, for all query heads of a kv head and all
// queries of the block together. Keys are cut at absolute multiples of kDecodeSplit, whoever takes a split, and splits are merged in order.

#include "../core/kv_cache.h"
#include "attention_fwd.h"
#include "decode_products.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

#ifndef DECODE_SPLIT
#define DECODE_SPLIT 1024
#endif
// Keys of a block of scores, which stays in cache between the two products, and keys of an item of work.
constexpr int kDecodeKeys = 512, kDecodeSplit = DECODE_SPLIT, kDecodeRows = 32;
static_assert(kDecodeSplit % kDecodeKeys == 0 && kDecodeKeys <= kMaxCols && kDecodeRows % kDecodeRowStep == 0, "");

// Where the rows of one (batch item, kv head) of a cache lie.
template <class T>
struct CacheRows {
  const CacheItem& item;
  const T* data;  // of the head, in the first page or in the batch item
  int64_t page_stride, row_stride, col_stride;

  CacheRows(const CacheItem& item, const TensorView& view, int64_t batch, int64_t head_kv)
      : item(item),
        data((const T*)view.data + head_kv * view.head_stride + (item.pages ? 0 : batch * view.batch_strides[0])),
        page_stride(view.batch_strides[0]),
        row_stride(view.row_stride),
        col_stride(view.col_stride) {}

  const T* row(int64_t key) const {
    const int64_t slot = item.slot(key);
    if (!item.pages) return data + slot * row_stride;
    return data + item.page(slot) * page_stride + item.row_of_page(slot) * row_stride;
  }
  // How many of the keys [key, end) lie one after the other from `key` on. At least one.
  int run(int64_t key, int64_t end) const {
    const int64_t slot = item.slot(key), slots = item.cache.slots;
    int64_t count = min_of(end - key, item.cache.pinned < 0 ? end - key : slots - slot);
    if (item.pages) count = min_of(count, item.cache.page_size - item.row_of_page(slot));
    return int(count);
  }
};

// What one worker needs.
template <class T, class Unit>
struct DecodeBuffers {
  using Real = Accumulator<Unit>;
  // Whole vectors behind the last column, and rows that do not fall onto the same lines of a cache.
  static constexpr int kStride = kDecodeKeys + 2 * kLanes<float>;
  TileRow* rows;
  Unit* query;     // [rows][query_stride]
  Real* scores;    // [rows][kStride], and for bf16 pairs the weights apart from them
  Unit* weights;
  Real* block_out;  // [rows][out_stride]
  RowState<Real> state;
  T *query_temp, *cache_temp;  // copies of what has strided columns
  int query_stride;

  DecodeBuffers(const AttentionParams& p, int tile_rows, Scratch& scratch) {
    const int out_stride = round_up(int(p.head_dim_v), kLanes<Real>);
    query_stride = round_up(units<Unit>(int(p.head_dim)), kLanes<Unit>);
    rows = scratch.take<TileRow>(tile_rows);
    query = scratch.take<Unit>(int64_t(tile_rows) * query_stride);
    scores = scratch.take<Real>(tile_rows * kStride);
    weights = kUnitSize<Unit> == 1 ? (Unit*)scores : scratch.take<Unit>(tile_rows * kStride / 2);
    block_out = scratch.take<Real>(int64_t(tile_rows) * out_stride);
    state = take_state(tile_rows, out_stride, scratch);
    query_temp = scratch.take<T>(p.query.col_stride == 1 ? 0 : p.head_dim);
    cache_temp = scratch.take<T>(p.key.col_stride == 1 && p.value.col_stride == 1 ? 0 : kDecodeKeys * max_of(p.head_dim, p.head_dim_v));
  }
  static RowState<Real> take_state(int tile_rows, int out_stride, Scratch& scratch) {
    return ForwardBuffers<T, Unit, false>::take_state(tile_rows, out_stride, scratch);
  }
};

template <class T, class Unit>
struct Decode {
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  using Buffers = DecodeBuffers<T, Unit>;
  static constexpr int kStride = Buffers::kStride;

  const AttentionParams& p;
  const CacheParams& cache;
  ThreadPool pool;
  int rows, tile_rows;  // of a kv head: group heads x seqlen_q queries; of a tile, padded
  int64_t tiles, splits = 0;  // of a kv head, and the most of a batch item

  Decode(const AttentionDecodeParams& params, const ThreadPool& all) : p(params.attention), cache(params.cache), pool(all) {
    const int64_t all_rows = p.num_heads_kv ? p.num_heads / p.num_heads_kv * p.seqlen_q : 0;
    tiles = (all_rows + kDecodeRows - 1) / kDecodeRows;
    rows = int(min_of(all_rows, int64_t(kDecodeRows)));
    tile_rows = round_up(rows, kDecodeRowStep);
    int64_t keys = 0;
    for (int64_t b = 0; b < p.batch; b++) {
      const CacheItem item(cache, b);
      const CacheKeys seen = keys_of(item, RowMask(p.mask, b, p.seqlen_q, item.length));
      splits = max_of(splits, SplitIds(seen).count());
      keys += length(seen.low) + length(seen.high);
    }
    // Waking a thread costs as much as some 10^5 multiply-adds.
    if (double(keys) * double(p.num_heads) * double(p.seqlen_q) * double(p.head_dim + p.head_dim_v + 16) < 1e5) pool.num_workers = 1;
    splits = max_of(splits, int64_t(1));
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(items(), int64_t(1))));
  }

  size_t scratch_bytes() const {
    return pool.num_workers * buffer_bytes() + (splits > 1 ? items() * partial_bytes() + (heads() * tiles * sizeof(int) + 63) / 64 * 64 : 0);
  }

  void run(void* memory) const {
    if (heads() == 0 || rows == 0) return;
    const size_t buffer_size = buffer_bytes(), partial_size = partial_bytes();
    char* const partials = (char*)memory + pool.num_workers * buffer_size;
    int* const done = (int*)(partials + items() * partial_size);  // [heads][tiles] splits that are finished
    if (splits > 1) memset(done, 0, heads() * tiles * sizeof(int));
    const auto partial = [&](int64_t index) {
      Scratch s(partials + index * partial_size);
      return Buffers::take_state(tile_rows, out_stride(), s);
    };
    const ResultRows<T, Real> results{p, Real(1), false};
    for_each_item(pool, items(), [&](int worker, int64_t index) {
      const int64_t tile_index = index / splits, split = index % splits, head = tile_index / tiles, batch = head / p.num_heads_kv;
      Scratch s((char*)memory + worker * buffer_size);
      Buffers buf(p, tile_rows, s);
      if (splits > 1) buf.state = partial(index);
      const CacheItem item(cache, batch);
      const RowMask mask(p.mask, batch, p.seqlen_q, item.length);
      const int count = fill_rows(int(tile_index % tiles), int(head % p.num_heads_kv), mask, buf.rows);
      const SplitIds ids(keys_of(item, mask));
      add_split(item, mask, batch, int(head % p.num_heads_kv), count, split < ids.count() ? ids[split] : -1, buf);
      if (splits > 1) {
        // Whoever finishes the last split merges all of them.
        if (__atomic_add_fetch(done + tile_index, 1, __ATOMIC_ACQ_REL) < splits) return;
        buf.state = partial(tile_index * splits);
        for (int64_t other = 1; other < ids.count(); other++)
          for (int i = 0; i < count; i++) merge_row(buf.state.from(i), partial(tile_index * splits + other).from(i), int(p.head_dim_v));
      }
      results.write(batch, count, buf.state, buf.rows);
    });
  }

 private:
  // The splits that a batch item needs: those of its low keys, then those of its high keys that are not among them.
  struct SplitIds {
    int64_t low_begin, low_end, high_begin, high_end;
    explicit SplitIds(const CacheKeys& keys) {
      const bool low = !is_empty(keys.low), high = !is_empty(keys.high);
      low_begin = low ? keys.low.begin / kDecodeSplit : 0, low_end = low ? (keys.low.end - 1) / kDecodeSplit + 1 : 0;
      high_begin = high ? keys.high.begin / kDecodeSplit : 0, high_end = high ? (keys.high.end - 1) / kDecodeSplit + 1 : 0;
      if (low && high && high_begin < low_end) low_begin = min_of(low_begin, high_begin), high_begin = low_end;
      high_end = max_of(high_begin, high_end);
    }
    int64_t count() const { return low_end - low_begin + high_end - high_begin; }
    int64_t operator[](int64_t i) const { return i < low_end - low_begin ? low_begin + i : high_begin + i - (low_end - low_begin); }
  };

  int64_t heads() const { return p.batch * p.num_heads_kv; }
  int64_t items() const { return heads() * tiles * splits; }
  int out_stride() const { return round_up(int(p.head_dim_v), kLanes<Real>); }
  size_t buffer_bytes() const {
    Scratch s(nullptr);
    Buffers(p, tile_rows, s);
    return s.used;
  }
  size_t partial_bytes() const {
    Scratch s(nullptr);
    Buffers::take_state(tile_rows, out_stride(), s);
    return s.used;
  }
  CacheKeys keys_of(const CacheItem& item, const RowMask& mask) const {
    CacheKeys keys;
    for (int64_t i = 0; i < p.seqlen_q; i++) keys.add(item, mask.row(i));
    return keys;
  }
  // The rows of a tile, head after head. Returns how many there are.
  int fill_rows(int tile, int head_kv, const RowMask& mask, TileRow* to) const {
    const int group = int(p.num_heads / p.num_heads_kv), seqlen_q = int(p.seqlen_q), first = tile * kDecodeRows;
    const int count = int(min_of(int64_t(kDecodeRows), int64_t(group) * seqlen_q - first));
    for (int i = 0; i < count; i++) {
      const int query = (first + i) % seqlen_q;
      to[i] = {head_kv * group + (first + i) / seqlen_q, query, mask.row(query)};
    }
    return count;
  }

  // The keys of split `id`, or none where it is negative, into buf.state.
  void add_split(const CacheItem& item, const RowMask& mask, int64_t batch, int head_kv, int count, int64_t id, const Buffers& buf) const {
    const ScoreMods<Real> mods(p, mask, batch);
    buf.state.clear(tile_rows);
    memset(buf.state.out, 0, int64_t(tile_rows) * buf.state.out_stride * sizeof(Real));
    if (id < 0) return;
    memset(buf.query, 0, int64_t(tile_rows) * buf.query_stride * sizeof(Unit));
    if (kUnitSize<Unit> > 1) memset(buf.weights, 0, tile_rows * kStride / kUnitSize<Unit> * sizeof(Unit));  // of the rows that only pad the tile
    for (int i = 0; i < count; i++) {
      const auto query = adjacent_columns(matrix<const T>(p, p.query, batch, buf.rows[i].head), buf.rows[i].query, 1, int(p.head_dim), buf.query_temp);
      pack_rows(query.data, query.row_stride, 1, int(p.head_dim), mods.factor() < 0, buf.query + i * buf.query_stride, buf.query_stride);
    }
    const BlockKeys seen(buf.rows, count);
    const CacheRows<T> key(item, p.key, batch, head_kv), value(item, p.value, batch, head_kv);
    const Interval held_by_cache[] = {item.pinned, item.recent};
    for (const Interval held : held_by_cache) {
      const Interval range = intersect(held, int(id) * kDecodeSplit, int(id + 1) * kDecodeSplit);
      for (int begin = range.begin; begin < range.end; begin = round_down(begin, kDecodeKeys) + kDecodeKeys) {
        const Interval keys = seen.within(begin, min_of(round_down(begin, kDecodeKeys) + kDecodeKeys, range.end));
        if (!is_empty(keys)) add_block(mods, count, keys, seen.full, key, value, buf);
      }
    }
  }

  void add_block(const ScoreMods<Real>& mods, int count, Interval keys, Interval full, const CacheRows<T>& key, const CacheRows<T>& value,
                 const Buffers& buf) const {
    const int begin = keys.begin, end = keys.end, cols = round_up(end - begin, 2 * kLanes<Real>);
    for (int j = begin; j < end;) {
      const CacheRun<T> run = {key.row(j), key.row_stride, key.run(j, end)};
      decode_scores(tile_rows, int(p.head_dim), buf.query, buf.query_stride, adjacent(run, key.col_stride, int(p.head_dim), buf), next_page(key, j + run.count),
                    buf.scores + j - begin, kStride);
      j += run.count;
    }
    const Real factor = mods.apply(buf.rows, count, begin, end, buf.scores, kStride, nullptr, nullptr);
    if (!covers(full, begin, begin + cols) || begin + cols > end) {
      for (int i = 0; i < count; i++) {
        const RowKeys& row = buf.rows[i].keys;
        mask_row(buf.scores + i * kStride, cols, begin, {intersect(row.sinks, begin, end), intersect(row.main, begin, end)});
      }
    }
    for (int i = 0; i < count; i += kBlockRows) {
      softmax_block<Unit, false>(min_of(kBlockRows, count - i), cols, kStride, buf.scores + i * kStride, buf.weights + i * kStride / kUnitSize<Unit>, factor,
                                 buf.state.from(i), int(p.head_dim_v), BlockDropout<Real>());
    }

    const int head_dim_v = int(p.head_dim_v), stride = kStride / kUnitSize<Unit>;
    memset(buf.block_out, 0, int64_t(tile_rows) * buf.state.out_stride * sizeof(Real));
    for (int j = begin; j < end;) {
      CacheRun<T> run = {value.row(j), value.row_stride, value.run(j, end)};
      // Pairs of keys that lie apart.
      if (run.count % kUnitSize<Unit> != 0 && j + run.count < end) {
        if (run.count > 1) run.count--;
        else run = {run.data, value.row(j + 1) - run.data, 2};
      }
      decode_values(tile_rows, head_dim_v, buf.weights + (j - begin) / kUnitSize<Unit>, stride, adjacent(run, value.col_stride, head_dim_v, buf),
                    next_page(value, j + run.count), buf.block_out, buf.state.out_stride);
      j += run.count;
    }
    for (int i = 0; i < count; i++) {
      Real* out = buf.block_out + i * buf.state.out_stride;
      V check(Real(0));
      for (int d = 0; d < head_dim_v; d += V::kLanes) {
        const V x = V::load(out + d);
        check = check + (x - x);
      }
      // Weights of 0 times what nobody sees.
      if (reduce_add(check) != Real(0)) sum_visible(buf.rows[i].keys, keys, buf.weights + i * stride, value, out);
      Real* total = buf.state.out + i * buf.state.out_stride;
      for (int d = 0; d < head_dim_v; d += V::kLanes) (V::load(total + d) + V::load(out + d)).store(total + d);
    }
  }

  // One row over the keys that it sees.
  __attribute__((noinline)) void sum_visible(const RowKeys& row, Interval keys, const Unit* weights, const CacheRows<T>& value, Real* out) const {
    for (int d = 0; d < p.head_dim_v; d++) {
      Real sum = 0;
      for (int j = keys.begin; j < keys.end; j++) {
        if (!contains(row, j)) continue;
        T element[kLanes<Real>] = {value.row(j)[d * value.col_stride]};
        sum += unit_element(weights, j - keys.begin) * load_converted(element).v[0];
      }
      out[d] = sum;
    }
  }

  // The run itself where its columns are adjacent, otherwise a copy.
  static CacheRun<T> adjacent(const CacheRun<T>& run, int64_t col_stride, int cols, const Buffers& buf) {
    const auto m = adjacent_columns(Matrix<const T>{run.data, run.row_stride, col_stride}, 0, run.count, cols, buf.cache_temp);
    return {m.data, m.row_stride, run.count};
  }
  // What is read after the run before `key`, null where it just goes on.
  static const T* next_page(const CacheRows<T>& rows, int64_t key) {
    return rows.item.pages && rows.item.holds(int(key)) && rows.item.page(rows.item.slot(key)) >= 0 ? rows.row(key) : nullptr;
  }
};

// Writes new keys and values to their slots; those that a ring would overwrite at once are left out.
template <class T>
struct CacheAppend {
  const CacheAppendParams& p;

  void run(const ThreadPool& pool) const {
    for_each_item(pool, p.batch * p.num_heads_kv, [&](int, int64_t index) {
      const int64_t batch = index / p.num_heads_kv, head = index % p.num_heads_kv;
      const CacheItem item(p.cache, batch);
      copy(item, p.key, p.new_key, batch, head, int(p.head_dim));
      copy(item, p.value, p.new_value, batch, head, int(p.head_dim_v));
    });
  }

 private:
  void copy(const CacheItem& item, const TensorView& to, const TensorView& from, int64_t batch, int64_t head, int cols) const {
    const CacheRows<T> rows(item, to, batch, head);
    const T* source = (const T*)from.data + batch * from.batch_strides[0] + head * from.head_stride;
    for (int64_t key = item.before; key < item.length; key++, source += from.row_stride) {
      if (!item.holds(int(key))) continue;
      T* const target = const_cast<T*>(rows.row(key));
      if (to.col_stride == 1 && from.col_stride == 1) memcpy(target, source, cols * sizeof(T));
      else
        for (int d = 0; d < cols; d++) target[d * to.col_stride] = source[d * from.col_stride];
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
