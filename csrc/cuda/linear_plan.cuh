#pragma once
// Which chunks are done at a time, and what is kept of them.

#include "linear_launch.h"
#include "linear_states.cuh"

namespace tiled_attention {
namespace cuda {

struct LinearPlan {
  const LinearAttentionParams& p;
  int64_t key_chunks, query_chunks;
  Segment keys, queries;  // the first segment, and the largest; causal: the same

  // chunk_bytes: kept per chunk of all heads besides its state.
  LinearPlan(const LinearAttentionParams& p, size_t real_bytes, int64_t chunk_bytes, int states) : p(p) {
    const int64_t state_size = (p.head_dim * (p.head_dim_v + 1) + 15) / 16 * 16;
    keys.state_size = queries.state_size = state_size;
    key_chunks = cut(p.seqlen_kv, &keys), query_chunks = cut(p.seqlen_q, &queries);
    if (!p.causal) {
      keys.kept_tokens = blocks_of(p.seqlen_kv) * kTile, queries.kept_tokens = blocks_of(p.seqlen_q) * kTile;
      return;
    }
    const int64_t bytes = chunk_bytes + states * p.batch * p.num_heads_kv * state_size * int64_t(real_bytes);
    keys.chunks = queries.chunks = max_of(int64_t(1), min_of(keys.chunks, LINEAR_KEPT_BYTES / max_of(bytes, int64_t(1))));
  }
  // Without causality a chunk only says how many tokens are summed at a time.
  int64_t cut(int64_t seqlen, Segment* s) const {
    constexpr int64_t kMost = 64;
    const int64_t blocks = blocks_of(seqlen), each = p.causal ? 1 : max_of(int64_t(1), (blocks + kMost - 1) / kMost);
    s->span = each * kTile;
    return s->chunks = (blocks + each - 1) / each;
  }
  // Without causality: all tokens, in blocks of kTile.
  Segment all(int64_t seqlen) const {
    Segment s;
    s.chunks = blocks_of(seqlen), s.state_size = keys.state_size;
    return s;
  }
  int64_t segments() const { return max_of(int64_t(1), (key_chunks + keys.chunks - 1) / max_of(int64_t(1), keys.chunks)); }
  Segment segment(int64_t i) const {
    Segment s = keys;
    s.first_chunk = i * keys.chunks;
    s.chunks = min_of(keys.chunks, key_chunks - s.first_chunk);
    return s;
  }
  int64_t heads_kv() const { return p.batch * p.num_heads_kv; }
  int64_t heads() const { return p.batch * p.num_heads; }
  bool too_large() const {
    const int64_t feature_blocks = blocks_of(p.head_dim), value_blocks = blocks_of(p.head_dim_v);
    const int64_t chunks = max_of(blocks_of(p.seqlen_q), blocks_of(p.seqlen_kv));
    const double blocks = double(heads()) * double(chunks) * double(max_of(feature_blocks, int64_t(1)) * (value_blocks + 1));
    return blocks > 2147483647.0 || double(heads_kv()) * double(keys.state_size) / kScanThreads > 2147483647.0;
  }
};

template <class R> Decays<R> take_decays(const LinearAttentionParams& p, const Segment& s, Scratch* scratch) {
  Decays<R> decays;
  decays.columns = !p.log_decay.data ? 0 : p.decay_per_feature ? p.head_dim : 1;
  const int64_t count = p.batch * p.num_heads_kv * decays.columns;
  decays.in = scratch->take<R>(count * s.tokens());
  decays.out = scratch->take<R>(count * s.tokens());
  decays.through = scratch->take<R>(count * s.chunks);
  return decays;
}

}  // namespace cuda
}  // namespace tiled_attention
