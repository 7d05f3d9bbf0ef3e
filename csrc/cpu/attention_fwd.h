#pragma once
// Exact attention, forward: out = softmax(scale * query key^T) value, online softmax over tiles of keys.

#include "in_place.h"
#include "next_tile.h"
#include "packed_tiles.h"
#include "result_rows.h"
#include "turn.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

#ifndef FWD_TILE_Q
#define FWD_TILE_Q 96
#endif
#ifndef FWD_TILE_KV
#define FWD_TILE_KV 512
#endif
constexpr int kFwdTileQ = whole_steps(FWD_TILE_Q, kBlockRows), kFwdTileKV = whole_steps(FWD_TILE_KV, kPanel<float>);

// Keys are summed in splits of this many, each with its own maximum, and the splits added in order: threads can then share the keys of one row.
#ifndef SPLIT_KV
#define SPLIT_KV 2048
#endif
constexpr int kSplitKV = SPLIT_KV;
static_assert(kSplitKV % kFwdTileKV == 0 && kFwdTileKV <= kMaxCols, "");

// What one worker needs besides packed tiles.
template <class T, class Unit, bool kDrop>
struct ForwardBuffers {
  using Real = Accumulator<Unit>;
  TileRow* rows;    // [tile_q]
  Unit* query;      // [tile_q][query_stride]
  Real* scores;     // [block][tile_kv], and for bf16 pairs the probabilities apart from them
  Unit* probs;
  Real* tile_out;   // [block, or in place rows][out_stride]
  RowState<Real> state, total;  // of the split, and of the splits before where there are any
  Philox::Keys* dropout_keys;
  uint32_t* dropout_bits;       // [block][tile_kv and what row_bits() needs]
  T *query_temp, *key_temp, *value_temp;  // copies of what has strided columns or is turned
  int query_stride;

  static RowState<Real> take_state(int rows, int out_stride, Scratch& scratch) {
    RowState<Real> s;
    s.row_max = scratch.take<Real>(rows + kLanes<Real>);
    s.row_sum = scratch.take<Real>(rows * kLanes<Real>);
    s.out = scratch.take<Real>(int64_t(rows) * out_stride);
    s.out_stride = out_stride;
    return s;
  }
  ForwardBuffers(const AttentionParams& p, Scratch& scratch) {
    const int out_stride = round_up(int(p.head_dim_v), kLanes<Real>);
    query_stride = round_up(units<Unit>(int(p.head_dim)), kLanes<Unit>);
    rows = scratch.take<TileRow>(kFwdTileQ);
    query = scratch.take<Unit>(int64_t(kFwdTileQ) * query_stride);
    scores = scratch.take<Real>(kBlockRows * kFwdTileKV);
    probs = kUnitSize<Unit> == 1 ? (Unit*)scores : scratch.take<Unit>(kBlockRows * kFwdTileKV / 2);
    tile_out = scratch.take<Real>(max_of(kInPlaceRows, kBlockRows) * out_stride);
    state = take_state(kFwdTileQ, out_stride, scratch);
    total = p.seqlen_kv > kSplitKV ? take_state(kFwdTileQ, out_stride, scratch) : RowState<Real>();
    dropout_keys = scratch.take<Philox::Keys>(kDrop ? kFwdTileKV / kPhiloxGroup : 0);
    dropout_bits = scratch.take<uint32_t>(kDrop ? kBlockRows * Dropout::row_bits_size(kFwdTileKV) : 0);
    query_temp = scratch.take<T>(needs_copy(p.query, p.rotary.query_table) ? kFwdTileQ * p.head_dim : 0);
    key_temp = scratch.take<T>(needs_copy(p.key, p.rotary.key_table) ? kFwdTileKV * p.head_dim : 0);
    value_temp = scratch.take<T>(p.value.col_stride == 1 ? 0 : kFwdTileKV * p.head_dim_v);
  }
};

template <class T, class Unit, bool kDrop>
struct Forward {
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  using Buffers = ForwardBuffers<T, Unit, kDrop>;
  using Packed = PackedTiles<Unit, kFwdTileKV>;
  static constexpr int kBlocks = kFwdTileQ / kBlockRows;

  // How the threads share the call.
  enum class Sharing {
    kHeads,   // slices of heads; each worker packs the head it is at
    kTiles,   // fewer heads than workers: all heads are packed first, by all
    kSingle,  // one tile of queries per head: nothing packed is used twice
    kSplits   // the same with few heads: workers share the keys of one tile, split by split
  };
  const AttentionParams& p;
  ThreadPool pool;
  QueryTiles tiles;
  int64_t heads;
  Sharing sharing;
  bool in_place;  // keys and values are not packed
  int slices = 1, splits = 1;
  KeptTiles kept;
  bool adds = false;  // to results over other keys

  Forward(const AttentionParams& p, const ThreadPool& all)
      : p(p),
        pool(with_workers(all, p)),
        tiles(p.num_heads / p.num_heads_kv, 0, p.seqlen_q, query_tile_rows(p, kFwdTileQ)),
        heads(p.batch * p.num_heads_kv),
        kept(int((p.seqlen_kv + kFwdTileKV - 1) / kFwdTileKV)) {
    const int workers = pool.num_workers;
    splits = int((p.seqlen_kv + kSplitKV - 1) / kSplitKV);
    in_place = tiles.group * p.seqlen_q <= kInPlaceRows && tiles.count <= 1 && !needs_copy(p.key, p.rotary.key_table) && p.value.col_stride == 1;
    if (tiles.count <= 1) sharing = splits > 1 && heads < 4 * workers && workers > 1 ? Sharing::kSplits : Sharing::kSingle;
    else {
      sharing = heads < workers ? Sharing::kTiles : Sharing::kHeads;
      // Slices of a head that is packed only once may be small.
      const int per_worker = sharing == Sharing::kTiles ? 16 : 4;
      if (heads % workers != 0 && heads < 4 * workers) slices = min_of(tiles.count, int((per_worker * workers + heads - 1) / heads));
    }
    const int64_t key_tiles = kept.count;
    if (sharing == Sharing::kHeads) kept = KeptTiles::of(p, kFwdTileQ, kFwdTileKV);
    if (sharing == Sharing::kSingle || sharing == Sharing::kSplits) kept.ring = 1;
    const int64_t items = heads * (sharing == Sharing::kSplits ? splits : sharing == Sharing::kTiles ? max_of(int64_t(slices), key_tiles) : slices);
    pool.num_workers = int(min_of(int64_t(workers), max_of(items, int64_t(1))));
  }

  static size_t buffer_bytes(const AttentionParams& p) {
    Scratch s(nullptr);
    Buffers(p, s);
    return s.used;
  }
  size_t packed_bytes() const {
    Scratch s(nullptr);
    Packed(p, kept, s);
    return s.used;
  }
  size_t partial_bytes() const {
    Scratch s(nullptr);
    Buffers::take_state(kFwdTileQ, round_up(int(p.head_dim_v), kLanes<Real>), s);
    return s.used;
  }
  size_t current_bytes() const { return (pool.num_workers * sizeof(int64_t) + 63) / 64 * 64; }
  size_t scratch_bytes() const {
    const int64_t packings = sharing == Sharing::kTiles ? heads : pool.num_workers;
    return current_bytes() + pool.num_workers * buffer_bytes(p) + packings * packed_bytes() +
           (sharing == Sharing::kSplits ? heads * splits * partial_bytes() : 0);
  }

  void run(void* memory) const {
    if (heads == 0 || tiles.count == 0) return;
    int64_t* current = (int64_t*)memory;  // [workers] the head that each worker has packed
    for (int i = 0; i < pool.num_workers; i++) current[i] = -1;
    char* base = (char*)memory + current_bytes();
    const size_t buffer_size = buffer_bytes(p);
    char* packed_base = base + pool.num_workers * buffer_size;
    const auto buffers = [&](int worker) {
      Scratch s(base + worker * buffer_size);
      return Buffers(p, s);
    };
    const auto packed = [&](int64_t index) {
      Scratch s(packed_base + index * packed_bytes());
      return Packed(p, kept, s);
    };
    if (sharing == Sharing::kTiles) {
      const int64_t key_tiles = kept.count;
      for_each_item(pool, heads * key_tiles, [&](int worker, int64_t item) {
        const int64_t head = item / key_tiles, tile = item % key_tiles;
        const Packed to = packed(head);
        to.tiles[tile] = -1;
        pack_tile(head / p.num_heads_kv, head % p.num_heads_kv, int(tile), to, buffers(worker));
      });
    }
    if (sharing == Sharing::kSplits) return run_splits(buffers, packed);
    for_each_item(pool, heads * slices, [&](int worker, int64_t item) {
      const int64_t head = item / slices, batch = head / p.num_heads_kv;
      // The last queries first: where masks are causal they see the most, and small items at the end keep the workers together.
      const int slice = slices - 1 - int(item % slices), head_kv = int(head % p.num_heads_kv);
      const bool single = sharing == Sharing::kSingle;
      const Packed keys = packed(sharing == Sharing::kTiles ? head : worker);
      if (sharing != Sharing::kTiles && (single || current[worker] != head)) keys.clear(), current[worker] = head;
      const Buffers buf = buffers(worker);
      const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
      const int end = tiles.slice_begin(slice + 1, slices, mask);
      for (int tile = tiles.slice_begin(slice, slices, mask); tile < end; tile++) {
        const int rows = tiles.fill(tile, head_kv * tiles.group, mask, buf.rows);
        const int64_t next_head = slices == 1 && head + pool.num_workers < heads ? head + pool.num_workers : -1;  // if the workers go on in step
        NextTile<T> next(p, tiles, tile, tile + 1 == end, head, next_head, kept.count == 1);
        next.add(p, p.query, p.head_dim);
        query_tile(batch, head_kv, rows, mask, 0, int(p.seqlen_kv), keys, buf, next);
        write_rows(batch, rows, p.seqlen_kv > kSplitKV ? buf.total : buf.state, buf.rows);
      }
    });
  }

 private:
  void write_rows(int64_t batch, int rows, const RowState<Real>& state, const TileRow* tile_rows) const {
    ResultRows<T, Real>{p, Real(kDrop ? inverse_keep_of(p.dropout.p) : 1), adds}.write(batch, rows, state, tile_rows);
  }

  template <class GetBuffers, class GetPacked>
  void run_splits(const GetBuffers& buffers, const GetPacked& packed) const {
    const size_t partial_size = partial_bytes();
    char* partials = (char*)packed(pool.num_workers).key;
    const auto partial = [&](int64_t index) {
      Scratch s(partials + index * partial_size);
      return Buffers::take_state(kFwdTileQ, round_up(int(p.head_dim_v), kLanes<Real>), s);
    };
    for_each_item(pool, heads * splits, [&](int worker, int64_t item) {
      const int64_t head = item / splits, batch = head / p.num_heads_kv;
      const int split = int(item % splits), head_kv = int(head % p.num_heads_kv);
      const Packed keys = packed(worker);
      keys.clear();
      Buffers buf = buffers(worker);
      buf.total = partial(item);
      const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
      const int rows = tiles.fill(0, head_kv * tiles.group, mask, buf.rows);
      query_tile(batch, head_kv, rows, mask, split * kSplitKV, min_of(int(p.seqlen_kv), (split + 1) * kSplitKV), keys, buf);
    });
    for_each_item(pool, heads, [&](int worker, int64_t head) {
      const int64_t batch = head / p.num_heads_kv;
      const Buffers buf = buffers(worker);
      const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
      const int rows = tiles.fill(0, int(head % p.num_heads_kv) * tiles.group, mask, buf.rows);
      const RowState<Real> total = partial(head * splits);
      for (int split = 1; split < splits; split++)
        for (int i = 0; i < rows; i++) merge_row(total.from(i), partial(head * splits + split).from(i), int(p.head_dim_v));
      write_rows(batch, rows, total, buf.rows);
    });
  }

  void pack_tile(int64_t batch, int64_t head_kv, int tile, const Packed& to, const Buffers& buf) const {
    const int at = to.kept.slot(tile);
    if (to.tiles[at] == tile) return;
    const int begin = tile * kFwdTileKV, rows = min_of(kFwdTileKV, int(p.seqlen_kv) - begin);
    const Matrix<const T> keys = matrix<const T>(p, p.key, batch, head_kv), values = matrix<const T>(p, p.value, batch, head_kv);
    const auto key = turned_rows(p, p.key, p.rotary.key_table, batch, head_kv, begin, rows, buf.key_temp);
    const auto value = adjacent_columns(values, begin, rows, int(p.head_dim_v), buf.value_temp);
    pack_transposed(key.data, key.row_stride, rows, int(p.head_dim), to.key + at * to.key_tile, to.key_panel,
                    Ahead::of(values, begin, rows, int(p.head_dim_v)));
    const int next = begin + kFwdTileKV;
    to.finite[at] = pack_finite_panels(value.data, value.row_stride, rows, int(p.head_dim_v), to.value + at * to.value_tile, to.value_panel,
                                       Ahead::of(keys, next, min_of(kFwdTileKV, int(p.seqlen_kv) - next), int(p.head_dim)));
    to.tiles[at] = tile;
  }

  // One tile of queries over the keys [kv_from, kv_to), kv_from a multiple of kSplitKV. The result stands in buf.total where there is more
  // than one split, in buf.state otherwise.
  void query_tile(int64_t batch, int head_kv, int rows, const RowMask& mask, int kv_from, int kv_to, const Packed& keys, const Buffers& buf,
                  const NextTile<T>& next_tile = NextTile<T>()) const {
    const ScoreMods<Real> mods(p, mask, batch);
    for_each_run(buf.rows, rows, [&](int first, int count) {
      const auto query = turned_rows(p, p.query, p.rotary.query_table, batch, buf.rows[first].head, buf.rows[first].query, count, buf.query_temp);
      pack_rows(query.data, query.row_stride, count, int(p.head_dim), mods.factor() < 0, buf.query + first * buf.query_stride, buf.query_stride);
    });
    const bool many_splits = p.seqlen_kv > kSplitKV;
    buf.state.clear(kFwdTileQ);
    if (many_splits) buf.total.clear(kFwdTileQ);
    const auto add_split = [&] {
      for (int i = 0; i < rows; i++) merge_row(buf.total.from(i), buf.state.from(i), int(p.head_dim_v));
      buf.state.clear(kFwdTileQ);
    };

    BlockKeys blocks[kBlocks];
    bool started[kBlocks] = {};
    Interval main = {0, 0}, sinks = {0, 0};
    for (int i = 0; i < rows; i += kBlockRows) {
      const BlockKeys& block = blocks[i / kBlockRows] = BlockKeys(buf.rows + i, min_of(kBlockRows, rows - i));
      main = hull(main, block.main), sinks = hull(sinks, block.sinks);
    }
    const Dropout dropout(p.dropout, batch, buf.rows[0].head, buf.dropout_keys);
    ListedKeys listed_keys, *const listed = mods.list.is_given() ? &listed_keys : nullptr;
    // The tile of keys stays in L2 while the blocks of query rows pass over it; one block of scores stays in L1. Tiles start at multiples
    // of their size, not where this tile of queries begins to see: a row is the same bits alone and among others.
    int split = kv_from / kSplitKV, next = kv_from;
    const Interval ranges[] = {intersect(sinks, kv_from, kv_to), intersect(main, kv_from, kv_to)};
    for (const Interval range : ranges)
      for (int kv_begin = max_of(next, round_down(range.begin, kFwdTileKV)); kv_begin < range.end; kv_begin += kFwdTileKV) {
        next = kv_begin + kFwdTileKV;
        if (listed) {
          const int key = mods.next_listed(buf.rows, rows, kv_begin);
          if (key >= range.end) break;
          if (key >= next) {
            kv_begin = round_down(key, kFwdTileKV) - kFwdTileKV;
            continue;
          }
        }
        if (kv_begin / kSplitKV != split) {
          add_split();
          for (bool& s : started) s = false;
          split = kv_begin / kSplitKV;
        }
        bool packed = false;
        for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
          const BlockKeys& block = blocks[i0 / kBlockRows];
          const int count = min_of(kBlockRows, rows - i0), kv_end = min_of(kv_begin + kFwdTileKV, kv_to);
          if (listed && !mods.look_up(buf.rows + i0, count, kv_begin, kv_end, listed)) continue;
          const KeyRuns seen = mods.runs(buf.rows + i0, count, block.within(kv_begin, kv_end), kPanel<Unit>, listed);
          if (!seen.count) continue;
          if (!started[i0 / kBlockRows]) {
            next_tile.fetch(i0, rows);
            Ahead::of(matrix<const T>(p, p.out, batch, buf.rows[i0].head), buf.rows[i0].query, count, int(p.head_dim_v)).fetch_to_write(0, count);
          }
          if (!packed) {
            if (!in_place) pack_tile(batch, head_kv, kv_begin / kFwdTileKV, keys, buf);
            if (kDrop && in_registers()) dropout.begin_tile(kv_begin, min_of(kv_begin + kFwdTileKV, kv_to));
            packed = true;
          }
          if (seen.count == 1 || in_place)
            block_of_rows(batch, head_kv, i0, count, kv_begin, seen.hull(), block, started[i0 / kBlockRows], mods, listed, dropout, keys, buf);
          else block_of_runs(batch, head_kv, i0, count, kv_begin, seen, block, started[i0 / kBlockRows], mods, listed, keys, buf);
          started[i0 / kBlockRows] = true;
        }
      }
    if (many_splits) add_split();
  }

  bool in_registers() const { return sizeof(Real) == 4 && !tiles.stacked && Dropout::in_registers(p.dropout); }

  // Rows [i0, i0 + rows) of the tile and the keys that they see of the key tile at kv_begin. Scores count from the panel in which those begin.
  ALWAYS_INLINE void block_of_rows(int64_t batch, int head_kv, int i0, int rows, int kv_begin, Interval seen, const BlockKeys& block, bool started,
                                   const ScoreMods<Real>& mods, const ListedKeys* listed, const Dropout& dropout, const Packed& keys,
                                   const Buffers& buf) const {
    const int begin = round_down(seen.begin, kPanel<Unit>), end = seen.end;
    const int cols = round_up(end - begin, kPanel<Unit>), stride = kFwdTileKV / kUnitSize<Unit>, tile = keys.kept.slot(kv_begin / kFwdTileKV);
    const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    const TileRow* tile_rows = buf.rows + i0;
    const Unit* query = buf.query + i0 * buf.query_stride;
    if (in_place) {
      const int first = round_down(seen.begin, kLanes<Unit>);
      const Matrix<const T> key = matrix<const T>(p, p.key, batch, head_kv).from(first);
      score_in_place<kInPlaceRows>(rows, end - first, head_dim, query, buf.query_stride, key, buf.scores + first - begin, kFwdTileKV);
    } else {
      const Unit* key = keys.key + tile * keys.key_tile + (begin - kv_begin) / kPanel<Unit> * keys.key_panel;
      gemm_from(seen.begin - begin, rows, end - begin, units<Unit>(head_dim), query, buf.query_stride, key, keys.key_panel, buf.scores, kFwdTileKV);
    }

    const Real factor = mods.apply(tile_rows, rows, begin, end, buf.scores, kFwdTileKV, nullptr, listed);
    if (!covers(block.full, begin, begin + cols))
      for (int i = 0; i < rows; i++) mask_row(buf.scores + i * kFwdTileKV, cols, begin, tile_rows[i].keys);

    const RowState<Real> state = buf.state.from(i0);
    const uint32_t* bits[kBlockRows];
    BlockDropout<Real> drop = {&dropout, in_registers(), tile_rows[0].query, (begin - kv_begin) / kPhiloxGroup, bits};
    if (kDrop && !drop.in_registers) draw_bits(batch, tile_rows, rows, begin, cols, buf, bits);
    softmax_block<Unit, kDrop>(rows, cols, kFwdTileKV, buf.scores, buf.probs, factor, state, int(p.head_dim_v), drop);

    const int first = round_down(seen.begin, kUnitSize<Unit>);
    const Unit* probs = buf.probs + (first - begin) / kUnitSize<Unit>;
    if (in_place) {
      if (add_values_in_place(batch, head_kv, rows, first, end, probs, started, state, buf)) return;
      pack_tile(batch, head_kv, kv_begin / kFwdTileKV, keys, buf);
    }
    const Unit* value = keys.value + tile * keys.value_tile + (first - kv_begin) / kUnitSize<Unit> * kPanel<Unit>;
    if (started)
      gemm<Left::RowMajor, Store::Accumulate>(rows, head_dim_v, units<Unit>(end - first), probs, stride, value, keys.value_panel, state.out, state.out_stride);
    else
      gemm<Left::RowMajor, Store::Overwrite>(rows, head_dim_v, units<Unit>(end - first), probs, stride, value, keys.value_panel, state.out, state.out_stride);
    if (!keys.finite[tile])
      add_nonfinite(mods, tile_rows, rows, first, end, probs, stride, matrix<const T>(p, p.value, batch, head_kv), head_dim_v, state.out, state.out_stride);
  }

  // The same where the rows see several runs of keys. Scores of the runs stand one behind the other, and the product with values is one chain
  // over all of them: rows that do not see a run keep the bits that they have without it.
  __attribute__((noinline)) void block_of_runs(int64_t batch, int head_kv, int i0, int rows, int kv_begin, const KeyRuns& seen, const BlockKeys& block,
                                               bool started, const ScoreMods<Real>& mods, const ListedKeys* listed, const Packed& keys,
                                               const Buffers& buf) const {
    const int stride = kFwdTileKV / kUnitSize<Unit>, tile = keys.kept.slot(kv_begin / kFwdTileKV), head_dim_v = int(p.head_dim_v);
    const TileRow* tile_rows = buf.rows + i0;
    Real factor = 1;
    int cols = 0;
    const uint32_t* bits[kBlockRows];
    for (int r = 0; r < seen.count; r++) {
      const int begin = round_down(seen.run[r].begin, kPanel<Unit>), end = seen.run[r].end, width = round_up(end - begin, kPanel<Unit>);
      Real* scores = buf.scores + cols;
      gemm<Left::RowMajor, Store::Overwrite>(rows, end - begin, units<Unit>(int(p.head_dim)), buf.query + i0 * buf.query_stride, buf.query_stride,
                                             keys.key + tile * keys.key_tile + (begin - kv_begin) / kPanel<Unit> * keys.key_panel, keys.key_panel, scores,
                                             kFwdTileKV);
      factor = mods.apply(tile_rows, rows, begin, end, scores, kFwdTileKV, nullptr, listed);
      if (!covers(block.full, begin, begin + width))
        for (int i = 0; i < rows; i++) mask_row(scores + i * kFwdTileKV, width, begin, tile_rows[i].keys);
      if (kDrop)
        for (int i = 0; i < rows; i++) {
          uint32_t words[Dropout::row_bits_size(kFwdTileKV)], *to = buf.dropout_bits + i * Dropout::row_bits_size(kFwdTileKV);
          const Dropout dropout(p.dropout, batch, tile_rows[i].head, nullptr);
          memcpy(to + cols, dropout.row_bits(tile_rows[i].query, begin, width, words), width * sizeof(uint32_t));
          bits[i] = to;
        }
      cols += width;
    }
    const RowState<Real> state = buf.state.from(i0);
    const Dropout dropout(p.dropout, batch, tile_rows[0].head, nullptr);
    softmax_block<Unit, kDrop>(rows, cols, kFwdTileKV, buf.scores, buf.probs, factor, state, head_dim_v, {&dropout, false, 0, 0, bits});

    cols = 0;
    for (int r = 0; r < seen.count; r++) {
      const int begin = round_down(seen.run[r].begin, kPanel<Unit>), first = round_down(seen.run[r].begin, kUnitSize<Unit>), end = seen.run[r].end;
      const Unit* probs = buf.probs + (cols + first - begin) / kUnitSize<Unit>;
      const Unit* value = keys.value + tile * keys.value_tile + (first - kv_begin) / kUnitSize<Unit> * kPanel<Unit>;
      const int count = units<Unit>(end - first);
      if (r == 0) gemm<Left::RowMajor, Store::Overwrite>(rows, head_dim_v, count, probs, stride, value, keys.value_panel, buf.tile_out, state.out_stride);
      else gemm<Left::RowMajor, Store::Continue>(rows, head_dim_v, count, probs, stride, value, keys.value_panel, buf.tile_out, state.out_stride);
      if (!keys.finite[tile])
        add_nonfinite(mods, tile_rows, rows, first, end, probs, stride, matrix<const T>(p, p.value, batch, head_kv), head_dim_v, buf.tile_out,
                      state.out_stride);
      cols += round_up(end - begin, kPanel<Unit>);
    }
    for (int i = 0; i < rows; i++)
      for (int d = 0; d < head_dim_v; d += V::kLanes) {
        Real* out = state.out + i * state.out_stride + d;
        const V x = V::load(buf.tile_out + i * state.out_stride + d);
        (started ? x + V::load(out) : x).store(out);
      }
  }

  // Adds the product with the values [begin, end) where they lie; false, and nothing added, where it is not finite.
  bool add_values_in_place(int64_t batch, int head_kv, int rows, int begin, int end, const Unit* probs, bool started, const RowState<Real>& state,
                           const Buffers& buf) const {
    const Matrix<const T> value = matrix<const T>(p, p.value, batch, head_kv).from(begin);
    const int cols = int(p.head_dim_v), last = min_of(begin + round_up(end - begin, kUnitSize<Unit>), int(p.seqlen_kv));
    values_in_place<kInPlaceRows>(rows, last - begin, cols, probs, kFwdTileKV / kUnitSize<Unit>, value, buf.tile_out, state.out_stride);
    V check(Real(0));
    for (int i = 0; i < rows; i++)
      for (int d = 0; d < cols; d += V::kLanes) {
        const V x = V::load(buf.tile_out + i * state.out_stride + d);
        check = check + (x - x);
      }
    if (reduce_add(check) != Real(0)) return false;
    for (int i = 0; i < rows; i++)
      for (int d = 0; d < cols; d += V::kLanes) {
        Real* out = state.out + i * state.out_stride + d;
        const V x = V::load(buf.tile_out + i * state.out_stride + d);
        (started ? x + V::load(out) : x).store(out);
      }
    return true;
  }

  __attribute__((noinline)) void draw_bits(int64_t batch, const TileRow* rows, int count, int begin, int cols, const Buffers& buf,
                                           const uint32_t** bits) const {
    for (int i = 0; i < count; i++) {
      const Dropout dropout(p.dropout, batch, rows[i].head, nullptr);
      bits[i] = dropout.row_bits(rows[i].query, begin, cols, buf.dropout_bits + i * Dropout::row_bits_size(kFwdTileKV));
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
