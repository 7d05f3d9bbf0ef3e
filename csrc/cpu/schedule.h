#pragma once
// How a call is cut into items for the threads, and how a head is cut into tiles of query rows.

#include "score_block.h"
#include "workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// The pool with as many workers as the call has work for: waking a thread costs as much as some 10^5 multiply-adds.
inline ThreadPool with_workers(ThreadPool pool, const AttentionParams& p) {
  const double work = double(p.batch) * p.num_heads * p.seqlen_q * p.seqlen_kv * double(p.head_dim + p.head_dim_v + 16);
  if (work < 1e5) pool.num_workers = 1;
  return pool;
}

// Rows of a tile of queries, of at most `most`: a tile of a block list where there is one, so that all its rows see the same tiles of keys.
inline int query_tile_rows(const AttentionParams& p, int most) { return p.blocks.rows.data ? min_of(kListTile, most) : most; }

// Query rows of one kv head, `group` query heads of rows [first_query, first_query + seqlen) each, in tiles of up to `tile_rows`. Short
// heads stand in one tile together, so that they share what is read of the keys.
struct QueryTiles {
  int group, first_query, seqlen, tile_rows, tiles_per_head, count;
  bool stacked;

  QueryTiles(int64_t group, int first_query, int64_t seqlen, int tile_rows)
      : group(int(group)), first_query(first_query), seqlen(int(seqlen)), tile_rows(tile_rows) {
    stacked = group > 1 && seqlen < tile_rows;
    tiles_per_head = int((seqlen + tile_rows - 1) / tile_rows);
    count = stacked ? int((group * seqlen + tile_rows - 1) / tile_rows) : int(group) * tiles_per_head;
  }

  // Fills rows[] of one tile; heads count from `first_head`. Returns how many there are.
  int fill(int tile, int first_head, const RowMask& mask, TileRow* rows) const {
    int head = 0, query = 0, size = 0;
    locate(tile, head, query, size);
    for (int i = 0; i < size; i++) {
      rows[i] = {first_head + head, first_query + query, mask.row(first_query + query)};
      if (++query == seqlen) query = 0, head++;
    }
    return size;
  }
  // Head, counted from 0, and query of the first row; how many rows there are.
  struct Rows {
    int head, query, size;
  };
  Rows rows_of(int tile) const {
    Rows rows = {0, 0, 0};
    locate(tile, rows.head, rows.query, rows.size);
    return rows;
  }
  // Visible pairs of the tile, from its first and last row: a weight to balance by.
  int64_t weight(int tile, const RowMask& mask) const {
    int head = 0, query = 0, size = 0;
    locate(tile, head, query, size);
    const int last = stacked ? query : query + size - 1;
    return (visible_keys(mask.row(first_query + query)) + visible_keys(mask.row(first_query + last)) + 64) * size;
  }
  // Tiles [slice_begin(i), slice_begin(i + 1)) are slice i of `slices` of about equal weight.
  int slice_begin(int slice, int slices, const RowMask& mask) const {
    if (slice <= 0) return 0;
    if (slice >= slices) return count;
    int64_t total = 0, sum = 0;
    for (int t = 0; t < count; t++) total += weight(t, mask);
    int t = 0;
    while (t < count && (sum += weight(t, mask)) * slices <= total * slice) t++;
    return t;
  }

 private:
  void locate(int tile, int& head, int& query, int& size) const {
    if (stacked) {
      const int row = tile * tile_rows;
      head = row / seqlen, query = row % seqlen, size = min_of(tile_rows, group * seqlen - row);
    } else {
      head = tile / tiles_per_head, query = tile % tiles_per_head * tile_rows, size = min_of(tile_rows, seqlen - query);
    }
  }
};

// Calls f(first, count) for each run of rows of one head with adjacent queries.
template <class F>
ALWAYS_INLINE void for_each_run(const TileRow* rows, int count, const F& f) {
  for (int first = 0; first < count;) {
    int end = first + 1;
    while (end < count && rows[end].head == rows[first].head && rows[end].query == rows[end - 1].query + 1) end++;
    f(first, end - first);
    first = end;
  }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
