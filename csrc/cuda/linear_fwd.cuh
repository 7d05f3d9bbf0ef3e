#pragma once
// Linear attention forward. With a = query_map(query) and b = key_map(key), for query i of a chunk that starts from the state S, z:
//   out_i = (in_i a_i S + sum_j W_ij v_j) / (in_i a_i . z + sum_j W_ij)
// A thread block takes 64 queries of one head: the pairs of the chunk once, then 64 value columns at a time. Numerators and denominators are
// the same chains of multiply-adds, over features and then over keys. Without causality there are no pairs and one state.

#include "linear_pairs.cuh"
#include "linear_plan.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <class R, Decay kDecay> using OutShared = PairShared<R, kDecay, 3>;

template <class T, Decay kDecay>
__global__ void __launch_bounds__(Shape<Real<T>>::kThreads, kOutBlocks<Real<T>, kDecay>)
    linear_out_kernel(const __grid_constant__ LinearAttentionParams p, Segment s, Decays<Real<T>> decays, const Real<T>* states) {
  using R = Real<T>;
  constexpr int kThreads = Shape<R>::kThreads;
  SIMT_DYNAMIC_SHARED(memory);
  const OutShared<R, kDecay> shared(memory);
  R *const in = shared.vector(1), *const denominators = shared.vector(2);

  const BlockIndex at(1, s.chunks, p.num_heads);
  const int64_t head_kv = at.head / (p.num_heads / p.num_heads_kv), state_head = at.batch * p.num_heads_kv + head_kv;
  const ChunkRows rows(s, at.chunk, p.seqlen_q);
  if (rows.count == 0) return;
  const int64_t end = rows.begin + rows.count;
  const Rows<const T> query = rows_of<const T>(p, p.query, at.batch, at.head), key = rows_of<const T>(p, p.key, at.batch, head_kv),
                      value = rows_of<const T>(p, p.value, at.batch, head_kv);
  const Rows<T> out = rows_of<T>(p, p.out, at.batch, at.head);
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, at.batch, head_kv);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, at.batch, head_kv);
  const R* const state = states + state_of(p, s, state_head, at.chunk, rows) * s.state_size;
  const R* const k_sum = state + p.head_dim * p.head_dim_v;
  const Rows<const R> kv(state, p.head_dim_v, 1);
  const R* const decay_in = decays.in + (state_head * s.tokens() + rows.local) * decays.columns;
  const int thread = int(threadIdx.x);

  if (thread == 0) *shared.not_finite = 0;
  if (kDecay == Decay::Token && thread < kTile) in[thread] = thread < rows.count ? decay_in[thread] : R(1);
  __syncthreads();
  Block<R> acc;
  if (p.causal) {
    pair_weights<T, kDecay>(p, query, key, mask, log_decay, rows, shared, acc);
    put_block<R>(shared.tile, acc);
  }

  for (int64_t e = 0; e < p.head_dim_v; e += kTile) {
    clear<R>(acc);
    R sum = 0;  // the denominator of one row
    for (int64_t d = 0; d < p.head_dim; d += kStep) {
      load_tile<kTile, kStep, kThreads>(query, rows.begin, end, d, p.head_dim, KeepAll(), [&](int row, int col, R(&x)[kVec<T>]) {
#pragma unroll
        for (int k = 0; k < kVec<T>; k++) {
          const bool inside = row < rows.count && d + col + k < p.head_dim;
          x[k] = inside ? feature(p.query_map, x[k]) : R(0);
          if (kDecay == Decay::Feature && inside) x[k] = decayed(x[k], decay_in[row * p.head_dim + d + col + k]);
        }
        put<kStep, T>(shared.left, row, col, x);
      });
      bool bad = false;
      load_tile<kStep, kTile, kThreads>(kv, d, p.head_dim, e, p.head_dim_v, KeepAll(), [&](int row, int col, R(&x)[kVec<R>]) {
#pragma unroll
        for (int k = 0; k < kVec<R>; k++) bad |= !is_finite(x[k]);
        put<kTile, R>(shared.right, row, col, x);
      });
      if (kDecay == Decay::Feature && bad) atomicAdd(shared.not_finite, 1);
      __syncthreads();
      const int depth = depth_of(p.head_dim - d);
      const auto reads = [&](int row, int k) { return row < rows.count && d + k < p.head_dim && decay_in[row * p.head_dim + d + k] != 0; };
      if constexpr (kDecay == Decay::Feature)
        multiply<Lies::Along, kStep, Lies::Down, kTile>(acc, shared.left, 0, shared.right, depth, *shared.not_finite != 0, reads);
      else multiply<Lies::Along, kStep, Lies::Down, kTile>(acc, shared.left, 0, shared.right, depth);
      if (e == 0 && thread < kTile)
        for (int k = 0; k < depth && d + k < p.head_dim; k++)
          if (kDecay != Decay::Feature || *shared.not_finite == 0 || reads(thread, k))
            sum = multiply_add(element<kStep>(shared.left, thread, k), k_sum[d + k], sum);
      __syncthreads();
    }
    if (kDecay == Decay::Token) {
      for_block<R>([&](int r, int c) { acc[r][c] = decayed(acc[r][c], in[row_of<R>(r)]); });
      if (thread < kTile) sum = decayed(sum, in[thread]);
    }
    if (p.causal) {
      const auto visible = [&](int row) { return is_visible(mask, rows.begin + row); };
      for (int j0 = 0; j0 < rows.count; j0 += kStep) {
        const bool bad = load_features<kStep, kTile>(
            value, FeatureMap::kIdentity, rows.begin + j0, end, e, p.head_dim_v, [&](int row) { return visible(j0 + row); }, shared.right);
        if (bad) atomicAdd(shared.not_finite, 1);
        __syncthreads();
        const bool not_finite = *shared.not_finite != 0;
        if (not_finite) find_first<kDecay, T>(p, log_decay, rows, shared.first);
        multiply<Lies::Along, kTile, Lies::Down, kTile>(acc, shared.tile, j0, shared.right, depth_of(rows.count - j0), not_finite,
                                                        [&](int row, int k) { return shared.first[row] <= j0 + k && j0 + k <= row; });
        if (e == 0 && thread < kTile)
          for (int k = 0; k < kStep; k++) sum = multiply_add(element<kTile>(shared.tile, thread, j0 + k), R(1), sum);
        __syncthreads();
      }
    }

    if (e == 0 && thread < kTile) denominators[thread] = sum;
    __syncthreads();
    for_block<R>([&](int r, int c) {
      const R denominator = denominators[row_of<R>(r)];
      acc[r][c] = !p.normalize ? acc[r][c] * R(p.scale) : denominator == 0 ? R(0) : acc[r][c] / denominator;
    });
    put_block<R>(shared.stage, acc);
    __syncthreads();
    store_tile<kTile, kTile, kThreads>(out, rows.begin, end, e, p.head_dim_v,
                                       [&](int row, int col, R(&x)[kVec<T>]) { get<kTile, T>(shared.stage, row, col, x); });
    __syncthreads();
  }
}

template <class T, Decay kDecay>
void launch_out(const LinearAttentionParams& p, const Segment& s, const Decays<Real<T>>& decays, const Real<T>* states, Stream stream) {
  const int64_t blocks = p.batch * p.num_heads * s.chunks;
  if (blocks == 0) return;
  constexpr auto kernel = &linear_out_kernel<T, kDecay>;
  SIMT_LAUNCH(kernel, unsigned(blocks), Shape<Real<T>>::kThreads, (OutShared<Real<T>, kDecay>::bytes()), stream, p, s, decays, states);
}

template <class T> struct LinearForward {
  using R = Real<T>;
  const LinearAttentionParams& p;
  LinearPlan plan;
  R *states, *carries, *ends;  // [heads_kv][chunks][state_size]; [2][heads_kv][state_size]; not causal: of sequences [..][heads_kv][state_size]
  Decays<R> decays;

  LinearForward(const LinearAttentionParams& p, Scratch* scratch) : p(p), plan(p, sizeof(R), 0, 1, scratch) {
    const int64_t size = plan.keys.state_size;
    states = scratch->take<R>(plan.heads_kv() * plan.keys.chunks * size);
    carries = scratch->take<R>(plan.segments() > 1 ? 2 * plan.heads_kv() * size : 0);
    ends = scratch->take<R>(p.causal ? 0 : plan.ends() * size);
    decays = take_decays<R>(p, plan.keys, scratch);
  }
  template <Decay kDecay> void run(Stream stream) const {
    const StateEnd<const R> initial{(const R*)p.initial_kv, (const R*)p.initial_k_sum, nullptr};
    const StateEnd<R> final_state{(R*)p.final_kv, (R*)p.final_k_sum, p.causal ? nullptr : ends};
    plan.find_chunks(stream);
    for (int64_t i = 0; i < plan.segments(); i++) {
      const Segment s = plan.segment(i);
      if (kDecay != Decay::None) launch_decays<R>(p, s, decays, stream);
      launch_contributions<T, kDecay>(p, s, decays, (const R*)nullptr, (const R*)nullptr, states, stream);
      launch_scan<R, false>(p, s, decays, initial, states, final_state, Carry<R>{plan.boundary(carries, i), plan.boundary(carries, i + 1)}, stream);
      if (p.causal) launch_out<T, kDecay>(p, s, decays, states, stream);
    }
    if (!p.causal) launch_out<T, kDecay>(p, plan.all(p.seqlen_q), decays, ends, stream);
  }
};

}  // namespace

template <class T> size_t linear_fwd_scratch_of(const LinearAttentionParams& p) {
  Scratch scratch(nullptr);
  LinearForward<T>(p, &scratch);
  return scratch.used;
}

template <class T> const char* linear_fwd_of(const LinearAttentionParams& p, void* memory, Stream stream) {
  Scratch scratch(memory);
  const LinearForward<T> forward(p, &scratch);
  if (forward.plan.too_large()) return kLinearTooLarge;
  if (!p.log_decay.data) forward.template run<Decay::None>(stream);
  else if (!p.decay_per_feature) forward.template run<Decay::Token>(stream);
  else forward.template run<Decay::Feature>(stream);
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
