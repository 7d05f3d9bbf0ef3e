#pragma once
// How decode is cut into blocks, and the functions that instances/ compiles, one dtype a file.

#include "../core/kv_cache.h"
#include "../core/scratch.h"
#include "kernels.h"

namespace tiled_attention {
namespace cuda {

constexpr int kDecodeBlockKeys = 64, kDecodeMaxRows = 8;

// The cut of a call: a block takes kRows rows of one kv head, which are group heads x seqlen_q queries, kCols columns of out, and one of `splits`
// shares of the keys. The lengths are not known to the host: the shares follow them on the device.
struct DecodePlan {
  int64_t tiles, pieces, splits;  // tiles of rows of a kv head
  int64_t rows;                   // batch * num_heads * seqlen_q

  int64_t blocks(const AttentionParams& p) const { return p.batch * p.num_heads_kv * tiles * pieces * splits; }
};

// Results of the shares, where there are several: Real max and sum [rows][splits], out [rows][splits][head_dim_v].
struct DecodeScratch {
  void *max, *sum, *out;

  DecodeScratch(const AttentionParams& p, const DecodePlan& plan, Scratch* scratch) {
    const int64_t bytes = plan.splits > 1 ? plan.rows * plan.splits * (p.dtype == DType::kFloat64 ? 8 : 4) : 0;
    max = scratch->take<char>(bytes);
    sum = scratch->take<char>(bytes);
    out = scratch->take<char>(bytes * p.head_dim_v);
  }
};

template <class T> DecodePlan decode_plan_of(const AttentionDecodeParams&);
template <class T> void launch_decode(const AttentionDecodeParams&, const DecodePlan&, void* scratch, Stream);
template <class T> void launch_cache_append(const CacheAppendParams&, Stream);

}  // namespace cuda
}  // namespace tiled_attention
