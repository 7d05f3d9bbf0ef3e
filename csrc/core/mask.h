#pragma once
// The row rule of a mask: which keys one query row sees, as at most two intervals.

#include "host_device.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

struct Interval {
  int begin, end;  // half open; empty where begin >= end
};

HOST_DEVICE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
HOST_DEVICE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
HOST_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
HOST_DEVICE int max_of(int a, int b) { return a > b ? a : b; }
HOST_DEVICE bool is_empty(Interval a) { return a.begin >= a.end; }
HOST_DEVICE int length(Interval a) { return is_empty(a) ? 0 : a.end - a.begin; }
HOST_DEVICE bool covers(Interval a, int begin, int end) { return a.begin <= begin && end <= a.end; }
HOST_DEVICE bool contains(Interval a, int key) { return a.begin <= key && key < a.end; }
HOST_DEVICE Interval intersect(Interval a, int begin, int end) { return {max_of(a.begin, begin), min_of(a.end, end)}; }
// The smallest interval that holds both.
HOST_DEVICE Interval hull(Interval a, Interval b) {
  if (is_empty(a)) return b;
  if (is_empty(b)) return a;
  return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
}

// The keys of one row: `main`, and the sinks in front of it. Disjoint, inside [0, seqlen_kv); where only one is not empty it is `main`.
struct RowKeys {
  Interval sinks, main;
};
HOST_DEVICE bool contains(const RowKeys& row, int key) { return contains(row.main, key) || contains(row.sinks, key); }
HOST_DEVICE bool sees_some(const RowKeys& row, int begin, int end) {
  return !is_empty(intersect(row.main, begin, end)) || !is_empty(intersect(row.sinks, begin, end));
}
HOST_DEVICE int64_t visible_keys(const RowKeys& row) { return int64_t(length(row.sinks)) + length(row.main); }

// MaskParams for one batch item.
struct RowMask {
  const MaskParams& params;
  int64_t query_offset, key_end;

  HOST_DEVICE RowMask(const MaskParams& params, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv) : params(params) {
    query_offset = params.query_offsets ? params.query_offsets[batch] : params.query_offset == kUnbounded ? seqlen_kv - seqlen_q : params.query_offset;
    // Offsets come from the caller: keep sums with them inside int64.
    query_offset = max_of(-kUnbounded, min_of(query_offset, kUnbounded));
    key_end = min_of(seqlen_kv, params.key_end);
    if (params.key_lengths) key_end = min_of(key_end, params.key_lengths[batch]);
    key_end = max_of(key_end, int64_t(0));
  }

  HOST_DEVICE int64_t position(int64_t query) const { return query + query_offset; }

  HOST_DEVICE RowKeys row(int64_t query) const {
    const int64_t p = position(query);
    int64_t begin = max_of(int64_t(0), p - params.limit_left), end = min_of(key_end, p + params.limit_right + 1);
    if (params.prefix >= 0) end = min_of(end, max_of(params.prefix, p + 1));
    if (params.top_left) end = min_of(end, query + 1);
    if (params.chunk > 0) {
      const int64_t chunk_begin = p / params.chunk * params.chunk;
      begin = max_of(begin, chunk_begin);
      end = p < 0 ? 0 : min_of(end, chunk_begin + params.chunk);
    }
    if (params.documents) {
      const int64_t document = find_document(p);
      if (document < 0) end = 0;
      else {
        begin = max_of(begin, params.documents[document]);
        end = min_of(end, params.documents[document + 1]);
      }
    }
    int64_t main_begin = max_of(begin, p - params.window_left), main_end = min_of(end, p + params.window_right + 1);
    int64_t sinks_begin = begin, sinks_end = min_of(end, params.num_sinks);
    if (main_begin >= main_end) main_begin = sinks_begin, main_end = sinks_end, sinks_end = sinks_begin;
    if (main_begin >= main_end) return {{0, 0}, {0, 0}};
    if (sinks_begin < sinks_end && sinks_end >= main_begin) {  // adjacent or overlapping: one interval
      main_end = max_of(main_end, sinks_end);
      main_begin = min_of(main_begin, sinks_begin);
      sinks_end = sinks_begin;
    }
    if (sinks_begin >= sinks_end) sinks_begin = sinks_end = 0;
    return {{int(sinks_begin), int(sinks_end)}, {int(main_begin), int(main_end)}};
  }

 private:
  // The segment that position p stands in, -1 outside all.
  HOST_DEVICE int64_t find_document(int64_t p) const {
    int64_t low = 0, high = params.num_documents;  // documents[low] <= p < documents[high]
    if (high == 0 || p < params.documents[0] || p >= params.documents[high]) return -1;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (params.documents[middle] <= p ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
