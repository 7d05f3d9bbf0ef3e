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
  LinearPlan(const LinearAttentionParams& p, size_t real_bytes, int64_t chunk_bytes, int states, Scratch* scratch) : p(p) {
    const int64_t state_size = (p.head_dim * (p.head_dim_v + 1) + 15) / 16 * 16;
    keys.state_size = queries.state_size = state_size;
    key_chunks = cut(p.seqlen_kv, &keys), query_chunks = cut(p.seqlen_q, &queries);
    if (!p.causal) {
      keys.kept_tokens = most_blocks(p.seqlen_kv) * kTile, queries.kept_tokens = most_blocks(p.seqlen_q) * kTile;
      if (!p.cu_seqlens) return;
    }
    if (p.cu_seqlens) keys.packed = queries.packed = take_chunks(p.num_sequences, key_chunks, scratch);
    const int64_t bytes = chunk_bytes + states * p.batch * p.num_heads_kv * state_size * int64_t(real_bytes);
    keys.chunks = queries.chunks = max_of(int64_t(1), min_of(keys.chunks, LINEAR_KEPT_BYTES / max_of(bytes, int64_t(1))));
  }
  // Packed: no more, whatever the lengths are.
  int64_t most_blocks(int64_t seqlen) const { return p.cu_seqlens ? most_chunks(p.num_sequences, seqlen) : blocks_of(seqlen); }
  // Without causality a chunk only says how many tokens are summed at a time.
  int64_t cut(int64_t seqlen, Segment* s) const {
    constexpr int64_t kMost = 64;
    const int64_t blocks = most_blocks(seqlen), each = p.causal || p.cu_seqlens ? 1 : max_of(int64_t(1), (blocks + kMost - 1) / kMost);
    s->span = each * kTile;
    return s->chunks = s->all_chunks = (blocks + each - 1) / each;
  }
  // Without causality: all tokens, in blocks of kTile.
  Segment all(int64_t seqlen) const {
    Segment s;
    s.chunks = s.all_chunks = most_blocks(seqlen), s.state_size = keys.state_size, s.packed = keys.packed;
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
  // States with which sequences begin and end.
  int64_t ends() const { return (p.cu_seqlens ? p.num_sequences : p.batch) * p.num_heads_kv; }
  // What is carried over the boundary in front of segment i, of two in turn.
  template <class R> R* boundary(R* carries, int64_t i) const { return carries + i % 2 * heads_kv() * keys.state_size; }
  // Packed: where the chunks lie.
  void find_chunks(Stream stream) const {
    if (p.cu_seqlens) launch_chunks(p.cu_seqlens, p.num_sequences, p.seqlen_kv, key_chunks, keys.packed, stream);
  }
  bool too_large() const {
    const int64_t feature_blocks = blocks_of(p.head_dim), value_blocks = blocks_of(p.head_dim_v);
    const int64_t chunks = max_of(most_blocks(p.seqlen_q), most_blocks(p.seqlen_kv));
    const double blocks = double(heads()) * double(chunks) * double(max_of(feature_blocks, int64_t(1)) * (value_blocks + 1));
    return blocks > 2147483647.0 || double(ends()) * double(keys.state_size) / kScanThreads > 2147483647.0;
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
