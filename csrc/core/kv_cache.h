#pragma once
// Which keys of a batch item a cache holds, and where they lie.

#include "mask.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Positions stay below this, with room above them for a tile that ends beyond: as checks.h limits lengths.
constexpr int64_t kMaxCacheLength = (int64_t(1) << 31) - (int64_t(1) << 12);

// One batch item. Lengths out of range act as if limited to it; an operator that can read them refuses them before.
struct CacheItem {
  const CacheParams& cache;
  const int32_t* pages;  // of this item, null: not paged
  int64_t before, length;  // keys before the new ones, and with them
  Interval pinned, recent;  // the keys that the cache holds

  HOST_DEVICE CacheItem(const CacheParams& cache, int64_t batch) : cache(cache) {
    pages = cache.page_table ? cache.page_table + batch * cache.table_pages : nullptr;
    const int64_t most = cache.pinned < 0 ? cache.slots : kMaxCacheLength - 1;
    before = !cache.cache_seqlens ? 0 : cache.seqlens_are_64_bit ? ((const int64_t*)cache.cache_seqlens)[batch] : ((const int32_t*)cache.cache_seqlens)[batch];
    before = max_of(int64_t(0), min_of(before, most));
    length = min_of(before + cache.num_new, most);
    const bool wraps = length > cache.slots;
    pinned = {0, wraps ? int(cache.pinned) : 0};
    recent = {wraps ? int(length - (cache.slots - cache.pinned)) : 0, int(length)};
  }
  HOST_DEVICE bool holds(int key) const { return contains(recent, key) || contains(pinned, key); }
  // Everything here is below 2^31: a division of 32 bits is some 20 instructions of a GPU, one of 64 bits five times as many.
  HOST_DEVICE int64_t slot(int64_t key) const {
    return key < cache.slots || cache.pinned < 0 ? key : cache.pinned + uint32_t(key - cache.pinned) % uint32_t(cache.slots - cache.pinned);
  }
  // -1 where the entry of the table is out of range.
  HOST_DEVICE int64_t page(int64_t slot) const {
    const int64_t page = pages[uint32_t(slot) / uint32_t(cache.page_size)];
    return page < 0 || page >= cache.num_pages ? -1 : page;
  }
  HOST_DEVICE int64_t row_of_page(int64_t slot) const { return uint32_t(slot) % uint32_t(cache.page_size); }
};

// The keys of the cache that some of the rows [first, first + count) see: a low and a high interval.
struct CacheKeys {
  Interval low = {0, 0}, high = {0, 0};
  HOST_DEVICE void add(const CacheItem& item, const RowKeys& row) {
    low = hull(low, hull(intersect(row.sinks, item.pinned.begin, item.pinned.end), intersect(row.main, item.pinned.begin, item.pinned.end)));
    low = hull(low, intersect(row.sinks, item.recent.begin, item.recent.end));
    high = hull(high, intersect(row.main, item.recent.begin, item.recent.end));
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
