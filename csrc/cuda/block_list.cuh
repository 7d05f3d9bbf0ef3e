#pragma once
// What a block list (core/block_list.h) shows: to a tile of queries one tile of keys after another, and by tile of keys the tiles of queries that
// list it. The host does not read lists: what their numbers point at outside of the list is cut off.

#include "row_table.cuh"

namespace tiled_attention {
namespace cuda {

// How the pairs of one tile of queries and one of keys are shown; where some are, the place of their bits, from 0 on.
constexpr int kListHidden = -2, kListFull = -1;

// The list of one head of a batch item. Tiles of kernels lie inside those of the list.
struct HeadList {
  const int32_t* ranges = nullptr;  // null: no list, everything is visible
  const ListedTile* tiles = nullptr;
  const uint64_t* bits = nullptr;
  int64_t row_stride = 0, col_stride = 0;
  int num_tiles = 0, num_bits = 0;
  struct Range {
    int begin, end;
  };

  HeadList() = default;
  SIMT_DEVICE HeadList(const AttentionParams& p, int64_t batch, int64_t head)
      : tiles(p.blocks.tiles), bits(p.blocks.bits), row_stride(p.blocks.rows.row_stride), col_stride(p.blocks.rows.col_stride) {
    if (p.blocks.rows.data) ranges = matrix<const int32_t>(p, p.blocks.rows, batch, head).data;
    num_tiles = int(p.blocks.num_tiles), num_bits = int(p.blocks.num_bits);
  }
  SIMT_DEVICE bool is_given() const { return ranges != nullptr; }

  // The entries of the tile of `query`, which is below seqlen_q.
  SIMT_DEVICE Range range(int64_t query) const {
    const int32_t* const at = ranges + query / kListTile * row_stride;
    const int begin = min_of(max_of(int(at[0]), 0), num_tiles);
    return {begin, min_of(max_of(int(at[col_stride]), begin), num_tiles)};
  }
  // The first entry whose tile of keys is not before `keys`, by each thread for itself.
  SIMT_DEVICE int find(Range in, int keys) const {
    while (in.begin < in.end) {
      const int middle = in.begin + (in.end - in.begin) / 2;
      if (tiles[middle].keys < keys) in.begin = middle + 1;
      else in.end = middle;
    }
    return in.begin;
  }
  // The same by a warp, all lanes for the same tiles: 32 entries are looked at together.
  SIMT_DEVICE int find_together(Range in, int keys) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (;;) {
      const int step = (in.end - in.begin + 31) / 32, at = in.begin + lane * step;
      const int before = __popc(__ballot_sync(0xffffffffu, at < in.end && tiles[at].keys < keys));
      if (step <= 1) return in.begin + before;
      if (before == 0) return in.begin;
      in.end = min_of(in.end, in.begin + before * step), in.begin += (before - 1) * step + 1;
    }
  }

  // By a warp: how the pairs of the tiles that `query` and `key` stand in are shown.
  SIMT_DEVICE int state(int64_t query, int64_t key) const {
    if (!ranges) return kListFull;
    const Range in = range(query);
    return shown(in, find_together(in, int(key / kListTile)), int(key / kListTile));
  }
  // What `query` sees of such a tile: bit c is key c.
  SIMT_DEVICE uint64_t word(int state, int64_t query) const {
    return state == kListFull ? ~uint64_t(0) : state == kListHidden ? uint64_t(0) : bits[int64_t(state) * kListTile + query % kListTile];
  }
  // The same from the start, by each thread for itself.
  SIMT_DEVICE uint64_t word_at(int64_t query, int64_t key) const {
    if (!ranges) return ~uint64_t(0);
    const Range in = range(query);
    return word(shown(in, find(in, int(key / kListTile)), int(key / kListTile)), query);
  }
  SIMT_DEVICE bool sees(int64_t query, int64_t key) const { return word_at(query, key) >> (key % kListTile) & 1; }
  SIMT_DEVICE bool lists(int64_t query, int keys) const {
    const Range in = range(query);
    return shown(in, find(in, keys), keys) != kListHidden;
  }

  // By a warp: the first tile of kKeys keys at or behind `tile` that the rows of `bounds`, in the tile of `query`, see some of; -1 where there is none.
  template <int kKeys>
  SIMT_DEVICE int next_tile(const RowBounds& bounds, int64_t query, int tile) const {
    static_assert(kListTile % kKeys == 0, "inside a tile of the list");
    constexpr int kParts = kListTile / kKeys;
    if (!ranges) return bounds.next_tile(tile, kKeys);
    const Range in = range(query);
#pragma unroll 1
    for (;;) {
      tile = bounds.next_tile(tile, kKeys);
      if (tile < 0) return -1;
      const int at = find_together(in, tile / kParts);
      if (at >= in.end) return -1;
      const int keys = tiles[at].keys;
      if (keys <= tile / kParts) return tile;
      if (int64_t(keys) * kListTile >= max_of(bounds.main_end, bounds.sinks_end)) return -1;
      tile = keys * kParts;
    }
  }

 private:
  SIMT_DEVICE int shown(Range in, int at, int keys) const {
    if (at >= in.end || tiles[at].keys != keys) return kListHidden;
    const int place = tiles[at].bits;
    return place < 0 ? kListFull : place < num_bits ? place : kListHidden;
  }
};

// In scratch memory: by tile of keys the tiles of queries that list it, a bit each. Where lists are the same for all batch items or heads they are
// here once.
struct ListingQueries {
  uint32_t* words = nullptr;  // [lists][key_tiles][num_words]; null: no list
  int64_t lists = 0, heads = 0, key_tiles = 0, num_words = 0;
  bool by_item = false, by_head = false;

  ListingQueries() = default;
  ListingQueries(const AttentionParams& p, Scratch* scratch) {
    if (!p.blocks.rows.data) return;
    for (int d = 0; d < p.num_batch_dims; d++) by_item = by_item || p.blocks.rows.batch_strides[d] != 0;
    by_head = p.blocks.rows.head_stride != 0;
    heads = by_head ? p.num_heads : 1, lists = heads * (by_item ? p.batch : 1);
    key_tiles = (p.seqlen_kv + kListTile - 1) / kListTile;
    num_words = ((p.seqlen_q + kListTile - 1) / kListTile + 31) / 32;
    words = scratch->take<uint32_t>(lists * key_tiles * num_words);
  }
  SIMT_DEVICE bool is_given() const { return words != nullptr; }
  // Whether the tile of queries from `query` on lists the tile of `key`.
  SIMT_DEVICE bool sees(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    if (!words) return true;
    const int64_t list = (by_item ? batch : 0) * heads + (by_head ? head : 0), tile = query / kListTile;
    return words[(list * key_tiles + key / kListTile) * num_words + tile / 32] >> (tile % 32) & 1;
  }
};

namespace {

constexpr int kListingThreads = 128;
constexpr int64_t kListingBlocks = 1 << 16;

// A warp per word, in turns.
__global__ void __launch_bounds__(kListingThreads)
    fill_listing_queries_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ListingQueries to) {
  const int64_t step = int64_t(gridDim.x) * (kListingThreads / 32), count = to.lists * to.key_tiles * to.num_words;
  for (int64_t index = int64_t(blockIdx.x) * (kListingThreads / 32) + threadIdx.x / 32; index < count; index += step) {
    const int64_t list = index / to.num_words / to.key_tiles, query = (index % to.num_words * 32 + threadIdx.x % 32) * kListTile;
    const HeadList of(p, list / to.heads, list % to.heads);
    const uint32_t word = __ballot_sync(0xffffffffu, query < p.seqlen_q && of.lists(query, int(index / to.num_words % to.key_tiles)));
    if (threadIdx.x % 32 == 0) to.words[index] = word;
  }
}

}  // namespace

inline void fill_listing_queries(const AttentionParams& p, const ListingQueries& to, void* stream) {
  if (!to.words) return;
  const int64_t blocks = min_of(kListingBlocks, (to.lists * to.key_tiles * to.num_words + kListingThreads / 32 - 1) / (kListingThreads / 32));
  SIMT_LAUNCH(fill_listing_queries_kernel, unsigned(blocks), kListingThreads, 0, stream, p, to);
}

}  // namespace cuda
}  // namespace tiled_attention
