#pragma once
// Linear attention backward: the states before all chunks again, the query side, the gradients of the states behind all chunks, the key side, the
// decays. A sequence of several segments first leaves the state at the start of each, then takes them from the last to the first.

#include "linear_bwd_keys.cuh"
#include "linear_decay_grad.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <class T> struct LinearBackward {
  using R = Real<T>;
  const LinearAttentionBackwardParams& params;
  const LinearAttentionParams& p;
  LinearPlan plan;
  Kept<R> kept;
  R *starts, *carries;  // the states at the starts of segments but the first, [heads_kv][state_size] each; gradients of states, two of these
  R *state, *grad;      // not causal: the last state of sequences and its gradient, [..][heads_kv][state_size]

  static int64_t chunk_bytes(const LinearAttentionParams& p) { return p.batch * p.num_heads * 2 * kTile * kTile * int64_t(sizeof(R)); }
  LinearBackward(const LinearAttentionBackwardParams& params, Scratch* scratch)
      : params(params), p(params.forward), plan(p, sizeof(R), chunk_bytes(p), 2, scratch) {
    const int64_t size = plan.keys.state_size, heads = plan.heads(), heads_kv = plan.heads_kv();
    const int64_t tokens = p.causal ? plan.keys.tokens() : plan.queries.kept_tokens;
    const bool per_feature = p.log_decay.data && p.decay_per_feature, per_token = p.log_decay.data && !p.decay_per_feature;
    kept.decays = take_decays<R>(p, plan.keys, scratch);
    kept.states = scratch->take<R>(heads_kv * plan.keys.chunks * size);
    kept.grads = scratch->take<R>(heads_kv * plan.queries.chunks * size);
    kept.weights = scratch->take<R>(heads * tokens);
    kept.deltas = scratch->take<R>(heads * tokens);
    kept.pairs = scratch->take<R>(p.causal ? heads * plan.keys.chunks * (2 * kTile * kTile) : 0);
    kept.flows = scratch->take<R>(per_token ? heads * tokens : 0);
    kept.key_flows = scratch->take<R>(per_token ? blocks_of(p.head_dim) * heads_kv * tokens : 0);
    kept.state_flows = scratch->take<R>(heads_kv * plan.keys.chunks * kept.decays.columns);
    kept.query_parts = scratch->take<R>(per_feature ? heads * tokens * p.head_dim : 0);
    kept.key_parts = scratch->take<R>(per_feature ? heads_kv * tokens * p.head_dim : 0);
    starts = scratch->take<R>((plan.segments() - 1) * heads_kv * size);
    carries = scratch->take<R>(plan.segments() > 1 ? 2 * heads_kv * size : 0);
    state = scratch->take<R>(p.causal ? 0 : plan.ends() * size);
    grad = scratch->take<R>(p.causal ? 0 : plan.ends() * size);
  }

  StateEnd<const R> initial() const { return {(const R*)p.initial_kv, (const R*)p.initial_k_sum, nullptr}; }
  StateEnd<const R> final_grad() const { return {(const R*)params.grad_final_kv, (const R*)params.grad_final_k_sum, nullptr}; }
  StateEnd<R> initial_grad() const { return {(R*)params.grad_initial_kv, (R*)params.grad_initial_k_sum, p.causal ? nullptr : grad}; }
  R* start(int64_t segment) const { return starts + (segment - 1) * plan.heads_kv() * plan.keys.state_size; }

  // behind: whether the state at the start of the next segment is wanted.
  template <Decay kDecay> void states_of(int64_t i, bool behind, Stream stream) const {
    const Segment s = plan.segment(i);
    if (kDecay != Decay::None) launch_decays<R>(p, s, kept.decays, stream);
    launch_contributions<T, kDecay>(p, s, kept.decays, (const R*)nullptr, (const R*)nullptr, kept.states, stream);
    const Carry<R> carry{i > 0 ? start(i) : nullptr, behind && i + 1 < plan.segments() ? start(i + 1) : nullptr};
    launch_scan<R, false>(p, s, kept.decays, initial(), kept.states, StateEnd<R>{nullptr, nullptr, p.causal ? nullptr : state}, carry, stream);
  }
  template <Decay kDecay> void queries(const Segment& s, const Kept<R>& kept, Stream stream) const {
    const int64_t blocks = plan.heads() * s.chunks;
    if (blocks == 0) return;
    constexpr auto kernel = &linear_query_grad_kernel<T, kDecay>;
    SIMT_LAUNCH(kernel, unsigned(blocks), Shape<R>::kThreads, (QueryShared<R, kDecay>::bytes()), stream, params, s, kept);
  }
  template <Decay kDecay> void keys(const Segment& s, const Kept<R>& kept, Stream stream) const {
    const int64_t blocks = plan.heads_kv() * s.chunks * (blocks_of(p.head_dim) + blocks_of(p.head_dim_v));
    if (blocks == 0) return;
    constexpr auto kernel = &linear_key_grad_kernel<T, kDecay>;
    SIMT_LAUNCH(kernel, unsigned(blocks), Shape<R>::kThreads, KeyShared<R>::bytes(), stream, params, s, kept);
  }
  template <Decay kDecay> void decays(const Segment& s, Stream stream) const {
    const int64_t items = plan.heads_kv() * s.chunks;
    if (params.grad_log_decay.data) {
      constexpr auto kernel = &linear_state_flow_kernel<R>;
      SIMT_LAUNCH(kernel, unsigned(items), kFlowThreads, kFlowThreads / 32 * sizeof(R), stream, p, s, kept);
    }
    if constexpr (kDecay == Decay::Token) {
      if (!params.grad_log_decay.data) return;
      constexpr auto kernel = &linear_decay_grad_kernel<R>;
      SIMT_LAUNCH(kernel, unsigned(items), kTile, kTile * sizeof(R), stream, params, s, kept);
    } else {
      const int64_t blocks = items * blocks_of(p.head_dim);
      if (blocks == 0) return;
      constexpr auto kernel = &linear_gated_grad_kernel<T>;
      SIMT_LAUNCH(kernel, unsigned(blocks), kTile, 3 * kTile * kTile * sizeof(R), stream, params, s, kept);
    }
  }

  template <Decay kDecay> void gradients_of(int64_t i, const Segment& s, Stream stream) const {
    launch_contributions<T, kDecay>(params, s, kept.decays, (const R*)kept.weights, (const R*)kept.deltas, kept.grads, stream);
    launch_scan<R, true>(p, s, kept.decays, final_grad(), kept.grads, initial_grad(), Carry<R>{plan.boundary(carries, i + 1), plan.boundary(carries, i)},
                         stream);
  }

  template <Decay kDecay> void run_causal(Stream stream) const {
    const int64_t segments = plan.segments();
    for (int64_t i = 0; i < segments - 1; i++) states_of<kDecay>(i, true, stream);
    for (int64_t i = segments - 1; i >= 0; i--) {
      const Segment s = plan.segment(i);
      states_of<kDecay>(i, false, stream);
      queries<kDecay>(s, kept, stream);
      gradients_of<kDecay>(i, s, stream);
      keys<kDecay>(s, kept, stream);
      if constexpr (kDecay != Decay::None) decays<kDecay>(s, stream);
    }
  }
  // One state and one gradient of it for each head of a sequence.
  void run_full(Stream stream) const {
    const int64_t segments = plan.segments();
    for (int64_t i = 0; i < segments; i++) states_of<Decay::None>(i, true, stream);
    Kept<R> ends = kept;
    ends.states = state, ends.grads = grad;
    queries<Decay::None>(plan.all(p.seqlen_q), ends, stream);
    for (int64_t i = segments - 1; i >= 0; i--) gradients_of<Decay::None>(i, p.cu_seqlens ? plan.segment(i) : plan.queries, stream);
    keys<Decay::None>(plan.all(p.seqlen_kv), ends, stream);
  }
};

}  // namespace

template <class T> size_t linear_bwd_scratch_of(const LinearAttentionBackwardParams& p) {
  Scratch scratch(nullptr);
  LinearBackward<T>(p, &scratch);
  return scratch.used;
}

template <class T> const char* linear_bwd_of(const LinearAttentionBackwardParams& p, void* memory, Stream stream) {
  Scratch scratch(memory);
  const LinearBackward<T> backward(p, &scratch);
  if (backward.plan.too_large()) return kLinearTooLarge;
  backward.plan.find_chunks(stream);
  if (!p.forward.causal) backward.run_full(stream);
  else if (!p.forward.log_decay.data) backward.template run_causal<Decay::None>(stream);
  else if (!p.forward.decay_per_feature) backward.template run_causal<Decay::Token>(stream);
  else backward.template run_causal<Decay::Feature>(stream);
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
