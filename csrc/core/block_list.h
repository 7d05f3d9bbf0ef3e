#pragma once
// A block list: per tile of queries the tiles of keys that are visible, whole or in part. A pair is visible where the list and the row
// intervals of mask.h both say so; a tile of keys that is not listed is not visited.

#include "host_device.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// BlockListParams for one batch item, whose row ranges start at `ranges`. Without a list everything is visible.
struct BlockList {
  const BlockListParams& params;
  const int32_t* ranges;

  struct Range {
    const ListedTile *begin, *end;
  };
  HOST_DEVICE bool is_given() const { return ranges != nullptr; }
  // The entries of the tile that `query` stands in.
  HOST_DEVICE Range range(int64_t head, int64_t query) const {
    const int32_t* at = ranges + head * params.rows.head_stride + query / kListTile * params.rows.row_stride;
    return {params.tiles + at[0], params.tiles + at[params.rows.col_stride]};
  }
  // The first entry whose tile of keys is not before `tile`.
  HOST_DEVICE static const ListedTile* find(Range range, int tile) {
    while (range.begin < range.end) {
      const ListedTile* middle = range.begin + (range.end - range.begin) / 2;
      if (middle->keys < tile) range.begin = middle + 1;
      else range.end = middle;
    }
    return range.begin;
  }
  // What `query` sees of an entry of its tile: bit c is key c.
  HOST_DEVICE uint64_t word(const ListedTile& entry, int64_t query) const {
    return entry.bits < 0 ? ~uint64_t(0) : params.bits[int64_t(entry.bits) * kListTile + query % kListTile];
  }
  HOST_DEVICE bool visible(int64_t head, int64_t query, int64_t key) const {
    const Range all = range(head, query);
    const ListedTile* entry = find(all, int(key / kListTile));
    return entry < all.end && entry->keys == key / kListTile && (word(*entry, query) >> key % kListTile & 1);
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
