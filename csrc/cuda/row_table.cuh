#pragma once
// What a mask lets through, worked out once per call before the main kernels: the key intervals of every row, their bounds over groups of
// rows, and which key tiles hold a value that must not be multiplied by zero.

#include "../core/mask.h"
#include "../core/packed.h"
#include "../core/scratch.h"
#include "../core/view.h"
#include "address.cuh"

namespace tiled_attention {
namespace cuda {

constexpr int kGroupRows = 16, kFlagKeys = 64;

// RowKeys of one query, as one 16-byte access.
struct alignas(16) RowEntry {
  int sinks_begin, sinks_end, main_begin, main_end;
  SIMT_DEVICE bool contains(int key) const { return (main_begin <= key && key < main_end) || (sinks_begin <= key && key < sinks_end); }
};

// Over some rows: the hulls of their intervals (empty ones left out) and the keys that every row sees in its main interval.
struct RowBounds {
  int sinks_begin = 0, sinks_end = 0, main_begin = 0, main_end = 0, full_begin = 0, full_end = 0x7fffffff;

  SIMT_DEVICE void add(const RowEntry& row) {
    hull(sinks_begin, sinks_end, row.sinks_begin, row.sinks_end);
    hull(main_begin, main_end, row.main_begin, row.main_end);
    full_begin = max_of(full_begin, row.main_begin);
    full_end = min_of(full_end, row.main_end);
  }
  SIMT_DEVICE void add(const RowBounds& other) {
    hull(sinks_begin, sinks_end, other.sinks_begin, other.sinks_end);
    hull(main_begin, main_end, other.main_begin, other.main_end);
    full_begin = max_of(full_begin, other.full_begin);
    full_end = min_of(full_end, other.full_end);
  }
  // Whether some row sees a key of [begin, end), and whether all rows see all of them.
  SIMT_DEVICE bool sees(int64_t begin, int64_t end) const { return (begin < main_end && main_begin < end) || (begin < sinks_end && sinks_begin < end); }
  SIMT_DEVICE bool covers(int64_t begin, int64_t end) const { return full_begin <= begin && end <= full_end; }
  // The first tile of `keys` keys at or behind `tile` that some row sees; -1 where there is none.
  SIMT_DEVICE int next_tile(int tile, int keys) const {
    const int64_t begin = int64_t(tile) * keys;
    int next = -1;
    if (begin < main_end) next = max_of(tile, main_begin / keys);
    if (begin < sinks_end) {
      const int sink = max_of(tile, sinks_begin / keys);
      if (next < 0 || sink < next) next = sink;
    }
    return next;
  }

 private:
  SIMT_DEVICE static void hull(int& begin, int& end, int other_begin, int other_end) {
    if (other_begin >= other_end) return;
    begin = begin < end ? min_of(begin, other_begin) : other_begin;
    end = max_of(end, other_end);
  }
};

// In scratch memory. Without key lengths and offsets per item all batch items share one set of rows. Those of packed sequences lie as query does,
// and the groups of item b begin at group cu_seqlens_q[b] / kGroupRows + b.
struct RowTable {
  RowEntry* rows;       // [items][seqlen_q], or [total_q]
  RowBounds* bounds;    // [items][groups], groups of kGroupRows rows, or [total_q / kGroupRows + items]
  uint8_t* not_finite;  // [batch][num_heads_kv][flag_tiles], kFlagKeys keys each; null where no key is hidden
  int* num_not_finite;  // how many of them are set
  int64_t items, seqlen_q, groups, flag_tiles;
  const int64_t* cu_seqlens_q;  // null: not packed
  int64_t total_q;

  SIMT_DEVICE Segment segment(int64_t batch) const { return segment_of(cu_seqlens_q, batch, total_q, seqlen_q); }
  SIMT_DEVICE RowEntry* rows_of(int64_t batch) const { return rows + (cu_seqlens_q ? segment(batch).begin : (items == 1 ? 0 : batch) * seqlen_q); }
  // Over rows [row, row + count), `row` a multiple of kGroupRows.
  SIMT_DEVICE RowBounds bounds_of(int64_t batch, int64_t row, int count) const {
    const RowBounds* first = bounds + (items == 1 ? 0 : batch) * groups;
    int64_t all_groups = groups;
    if (cu_seqlens_q) {
      const Segment of_item = segment(batch);
      first = bounds + of_item.begin / kGroupRows + batch, all_groups = (of_item.length + kGroupRows - 1) / kGroupRows;
    }
    const int64_t begin = row / kGroupRows, end = min_of(all_groups, begin + (count + kGroupRows - 1) / kGroupRows);
    RowBounds all;
    if (begin >= end) all.full_end = 0;
    for (int64_t i = begin; i < end; i++) all.add(first[i]);
    return all;
  }
  // By key tile; null where no key is hidden.
  SIMT_DEVICE const uint8_t* flags_of(int64_t kv_head_of_batch) const { return not_finite ? not_finite + kv_head_of_batch * flag_tiles : nullptr; }
};

// Whether every query sees every key. A bias hides keys where it is -inf.
inline bool hides_nothing(const AttentionParams& p) {
  const MaskParams& m = p.mask;
  return !p.bool_mask.data && !p.bias.data && !p.blocks.rows.data && !m.key_lengths && !m.documents && !m.top_left && m.prefix < 0 && m.chunk == 0 &&
         m.key_end >= p.seqlen_kv && m.window_left == kUnbounded && m.window_right == kUnbounded && m.limit_left == kUnbounded && m.limit_right == kUnbounded;
}

// `flags`: whether not_finite is wanted; without tensor cores hidden pairs are left out one by one.
inline RowTable take_row_table(const AttentionParams& p, Scratch* scratch, bool flags = true) {
  RowTable table;
  table.cu_seqlens_q = p.cu_seqlens_q, table.total_q = p.total_q;
  table.items = p.cu_seqlens_q || p.mask.key_lengths || p.mask.query_offsets ? p.batch : 1;
  table.seqlen_q = p.seqlen_q;
  table.groups = (p.seqlen_q + kGroupRows - 1) / kGroupRows;
  table.flag_tiles = (p.seqlen_kv + kFlagKeys - 1) / kFlagKeys;
  table.rows = scratch->take<RowEntry>(p.cu_seqlens_q ? p.total_q : table.items * table.seqlen_q);
  table.bounds = scratch->take<RowBounds>(p.cu_seqlens_q ? p.total_q / kGroupRows + table.items : table.items * table.groups);
  table.num_not_finite = scratch->take<int>(1);
  table.not_finite = !flags || hides_nothing(p) ? nullptr : scratch->take<uint8_t>(p.batch * p.num_heads_kv * table.flag_tiles);
  return table;
}

namespace {

constexpr int kTableThreads = 128;

// One thread per group of rows.
__global__ void __launch_bounds__(kTableThreads) fill_rows(const __grid_constant__ AttentionParams p, const __grid_constant__ RowTable table) {
  const int64_t index = int64_t(blockIdx.x) * kTableThreads + threadIdx.x;
  if (index == 0) *table.num_not_finite = 0;
  if (index >= table.items * table.groups) return;
  const int64_t item = index / table.groups, first = index % table.groups * kGroupRows;
  const Segment queries = query_segment(p, item);
  if (first >= queries.length) return;
  const RowMask rule(p.mask, item, queries.length, key_segment(p, item).length);
  RowEntry* const rows = table.rows_of(item);
  RowBounds bounds;
  for (int64_t i = first; i < min_of(queries.length, first + kGroupRows); i++) {
    const RowKeys keys = rule.row(i);
    const RowEntry row{keys.sinks.begin, keys.sinks.end, keys.main.begin, keys.main.end};
    rows[i] = row;
    bounds.add(row);
  }
  table.bounds[(p.cu_seqlens_q ? queries.begin / kGroupRows + item : item * table.groups) + first / kGroupRows] = bounds;
}

template <class T>
SIMT_DEVICE bool is_finite(T x) {
  return x - x == T(0);
}

// One warp per tile of keys: whether a row of `view` there holds inf or NaN.
template <class T>
__global__ void __launch_bounds__(kTableThreads)
    flag_not_finite(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorView view, int64_t cols, const __grid_constant__ RowTable table) {
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * (kTableThreads / 32) + threadIdx.x / 32;
  if (index >= p.batch * p.num_heads_kv * table.flag_tiles) return;
  const int64_t kv_head = index / table.flag_tiles, first = index % table.flag_tiles * kFlagKeys;
  const Segment keys = key_segment(p, kv_head / p.num_heads_kv);
  const Matrix<const T> m = matrix<const T>(p, view, kv_head / p.num_heads_kv, kv_head % p.num_heads_kv).from(keys.begin);
  bool found = false;
  for (int64_t i = first; i < min_of(keys.length, first + kFlagKeys); i++)
    for (int64_t j = lane; j < cols; j += 32) found |= !is_finite(simt::to_float(m.row(i)[j * m.col_stride]));
  const bool any = __ballot_sync(0xffffffffu, found) != 0;
  if (lane != 0) return;
  table.not_finite[index] = any;
  if (any) atomicAdd(table.num_not_finite, 1);
}

}  // namespace

inline unsigned blocks_of(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

inline void fill_row_table(const AttentionParams& p, const RowTable& table, void* stream) {
  SIMT_LAUNCH(fill_rows, blocks_of(table.items * table.groups, kTableThreads), kTableThreads, 0, stream, p, table);
}

// Behind fill_row_table(). `view` is what zero weights will multiply: value in forward, key in backward.
template <class T>
void flag_not_finite_tiles(const AttentionParams& p, const TensorView& view, int64_t cols, const RowTable& table, void* stream) {
  if (!table.not_finite) return;
  const int64_t tiles = p.batch * p.num_heads_kv * table.flag_tiles;
  SIMT_LAUNCH(flag_not_finite<T>, blocks_of(tiles, kTableThreads / 32), kTableThreads, 0, stream, p, view, cols, table);
}

}  // namespace cuda
}  // namespace tiled_attention
