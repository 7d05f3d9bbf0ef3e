#pragma once
// Where a batch item lies in packed tensors.

#include "host_device.h"
#include "mask.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Rows [begin, begin + length); all rows from 0 on where nothing is packed.
struct Segment {
  int64_t begin, length;
};

// Offsets come from the caller: whatever they are, a segment lies inside the tensor and is no longer than `max_seqlen`.
HOST_DEVICE Segment segment_of(const int64_t* cu_seqlens, int64_t item, int64_t total, int64_t max_seqlen) {
  if (!cu_seqlens) return {0, max_seqlen};
  const int64_t begin = max_of(int64_t(0), min_of(cu_seqlens[item], total)), end = max_of(begin, min_of(cu_seqlens[item + 1], total));
  return {begin, min_of(end - begin, max_seqlen)};
}
HOST_DEVICE Segment query_segment(const AttentionParams& p, int64_t batch) { return segment_of(p.cu_seqlens_q, batch, p.total_q, p.seqlen_q); }
HOST_DEVICE Segment key_segment(const AttentionParams& p, int64_t batch) { return segment_of(p.cu_seqlens_kv, batch, p.total_kv, p.seqlen_kv); }

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
