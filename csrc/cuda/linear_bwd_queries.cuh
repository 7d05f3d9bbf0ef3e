#pragma once
// The query side of the backward of linear attention. With w_i = 1 / (a_i . z_i), o = out, do = grad_out (not normalised: w_i = scale, t_i = 0),
// and S, z the state in front of the chunk:
//   t_i = o_i . do_i = w_i (sum_j W_ij do_i . v_j + in_i a_i . (S do_i))
//   G_ij = P_ij w_i (do_i . v_j - t_i)
//   da_i = sum_j G_ij b_j + in_i w_i (S do_i - t_i z)
// Neither out nor denominators are read: everything comes from the inputs and S. w_i, t_i, W_ij w_i and G_ij are kept for the key side. With a
// decay per feature G is kept without P, and da without the sum over j: linear_gated.cuh does that.

#include "linear_pairs.cuh"
#include "linear_plan.cuh"

namespace tiled_attention {
namespace cuda {

// What the kernels of the backward hand to each other, for one segment.
template <class R> struct Kept {
  Decays<R> decays;
  R *states = nullptr, *grads = nullptr;    // [heads_kv][chunks][state_size]: the state before a chunk, the gradient of the state behind it
  R *weights = nullptr, *deltas = nullptr;  // [heads][tokens]: w_i and t_i
  R* pairs = nullptr;                       // [heads][chunks][2][kTile][kTile]: W_ij w_i and G_ij, 0 where nothing is seen
  R* flows = nullptr;                       // [heads][tokens]: what the pairs and queries of a chunk give to the gradient of the decay of a token
  R* key_flows = nullptr;                   // [feature blocks][heads_kv][tokens]: b_j . (what db_j gets through the state)
  R* state_flows = nullptr;                 // [heads_kv][chunks][1 or head_dim]: through S . dS + through z . dz
  R *query_parts = nullptr, *key_parts = nullptr;  // per feature: [heads or heads_kv][tokens][head_dim], da and db through the state
};

namespace {

template <class R, Decay kDecay> using QueryShared = PairShared<R, kDecay, 3>;

// acc = S do for 64 features; the sum over all value columns. Begins and ends with all threads in step.
template <class T, class Shared>
SIMT_DEVICE void read_state(const Rows<const T>& grad_out, const Rows<const Real<T>>& kv, const ChunkRows& rows, int64_t first_feature, int64_t head_dim,
                            int64_t head_dim_v, const Shared& shared, Block<Real<T>>& acc) {
  using R = Real<T>;
  clear<R>(acc);
  for (int64_t e = 0; e < head_dim_v; e += kStep) {
    load_features<kTile, kStep>(grad_out, FeatureMap::kIdentity, rows.begin, rows.begin + rows.count, e, head_dim_v, KeepAll(), shared.left);
    load_features<kTile, kStep>(kv, FeatureMap::kIdentity, first_feature, head_dim, e, head_dim_v, KeepAll(), shared.right);
    __syncthreads();
    multiply<Lies::Along, kStep, Lies::Along, kStep>(acc, shared.left, 0, shared.right, depth_of(head_dim_v - e));
    __syncthreads();
  }
}

template <class T, Decay kDecay>
__global__ void __launch_bounds__(Shape<Real<T>>::kThreads, kQueryGradBlocks<Real<T>, kDecay>)
    linear_query_grad_kernel(LinearAttentionBackwardParams params, Segment s, Kept<Real<T>> kept) {
  using R = Real<T>;
  constexpr int kThreads = Shape<R>::kThreads, kRows = Shape<R>::kRows;
  const LinearAttentionParams& p = params.forward;
  SIMT_DYNAMIC_SHARED(memory);
  const QueryShared<R, kDecay> shared(memory);
  R *const in = shared.vector(1), *const from_state = shared.vector(2);

  const BlockIndex at(1, s.chunks, p.num_heads);
  const int64_t head_kv = at.head / (p.num_heads / p.num_heads_kv), state_head = at.batch * p.num_heads_kv + head_kv;
  const ChunkRows rows(s, at.chunk, p.seqlen_q);
  if (rows.count == 0) return;
  const int64_t end = rows.begin + rows.count;
  const Rows<const T> query = rows_of<const T>(p, p.query, at.batch, at.head), key = rows_of<const T>(p, p.key, at.batch, head_kv),
                      value = rows_of<const T>(p, p.value, at.batch, head_kv), grad_out = rows_of<const T>(p, params.grad_out, at.batch, at.head);
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, at.batch, head_kv);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, at.batch, head_kv);
  const R* const state = kept.states + state_of(p, s, state_head, at.chunk, rows) * s.state_size;
  const R* const k_sum = state + p.head_dim * p.head_dim_v;
  const Rows<const R> kv(state, p.head_dim_v, 1);
  const R* const decay_in = kept.decays.in + (state_head * s.tokens() + rows.local) * kept.decays.columns;
  const auto visible = [&](int row) { return is_visible(mask, rows.begin + row); };
  const int thread = int(threadIdx.x);

  if (thread == 0) *shared.not_finite = 0;
  if (kDecay == Decay::Token && thread < kTile) in[thread] = thread < rows.count ? decay_in[thread] : R(1);
  __syncthreads();

  // The pairs: W, and do . v in g. They wait in global memory while registers are needed for the state.
  R* const pairs = kept.pairs + (at.batch_head * s.chunks + at.chunk) * (2 * kTile * kTile);
  const Rows<R> kept_weights(pairs, kTile, 1), kept_grads(pairs + kTile * kTile, kTile, 1);
  Block<R> w, g, acc;
  clear<R>(w), clear<R>(g);
  R sums[kRows], weighted[kRows];
  const auto sees = [&](int r, int c) {
    const int i = row_of<R>(r), j = col_of<R>(c);
    if (!p.causal || j > i || i >= rows.count) return false;
    return kDecay != Decay::Token || element<kTile>(shared.tile, i, j) != 0;
  };
  if (p.causal) {
    pair_weights<T, kDecay>(p, query, key, mask, log_decay, rows, shared, w);
    for (int64_t e = 0; e < p.head_dim_v; e += kStep) {
      bool bad = load_features<kTile, kStep>(grad_out, FeatureMap::kIdentity, rows.begin, end, e, p.head_dim_v, KeepAll(), shared.left);
      bad |= load_features<kTile, kStep>(value, FeatureMap::kIdentity, rows.begin, end, e, p.head_dim_v, visible, shared.right);
      if (bad) atomicAdd(shared.not_finite, 1);
      __syncthreads();
      multiply<Lies::Along, kStep, Lies::Along, kStep>(g, shared.left, 0, shared.right, depth_of(p.head_dim_v - e));
      __syncthreads();
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    sums[r] = weighted[r] = 0;
#pragma unroll
    for (int c = 0; c < Shape<R>::kCols; c++)
      if (sees(r, c)) {
        sums[r] += w[r][c];
        // Per feature a pair that is forgotten entirely is a W of 0.
        if (kDecay != Decay::Feature || w[r][c] != 0) weighted[r] = multiply_add(w[r][c], g[r][c], weighted[r]);
      }
    sums[r] = sum_of_row<R>(sums[r]), weighted[r] = sum_of_row<R>(weighted[r]);
  }

  if (p.causal) {
    store_block<R>(kept_weights, 0, kTile, 0, kTile, w);
    store_block<R>(kept_grads, 0, kTile, 0, kTile, g);
  }

  // The state: a . z and a . (S do).
  R state_sums[kRows], state_grads[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) state_sums[r] = state_grads[r] = 0;
  for (int64_t d = 0; d < p.head_dim; d += kTile) {
    read_state<T>(grad_out, kv, rows, d, p.head_dim, p.head_dim_v, shared, acc);
    load_features<kTile, kTile>(query, p.query_map, rows.begin, end, d, p.head_dim, KeepAll(), shared.stage);
    __syncthreads();
    for_block<R>([&](int r, int c) {
      const int row = row_of<R>(r), col = col_of<R>(c);
      if (row >= rows.count || d + col >= p.head_dim) return;
      const R decay = kDecay == Decay::Feature ? decay_in[row * p.head_dim + d + col] : R(1), a = element<kTile>(shared.stage, row, col) * decay;
      if (decay == 0) return;
      state_sums[r] = multiply_add(a, k_sum[d + col], state_sums[r]);
      state_grads[r] = multiply_add(a, acc[r][c], state_grads[r]);
    });
    __syncthreads();
  }

  // w_i and t_i, and with them the pairs.
  const int64_t head_tokens = at.batch_head * s.tokens() + rows.local;
  R factors[kRows], deltas[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int row = row_of<R>(r);
    const R decay = kDecay == Decay::Token ? in[row] : R(1);
    const R state_sum = decayed(sum_of_row<R>(state_sums[r]), decay), state_grad = decayed(sum_of_row<R>(state_grads[r]), decay);
    R inverse = R(p.scale), delta = 0;
    if (p.normalize) {
      const R denominator = sums[r] + state_sum;
      inverse = denominator == 0 ? R(0) : 1 / denominator;
      delta = inverse == 0 ? R(0) : inverse * (weighted[r] + state_grad);
    }
    factors[r] = inverse, deltas[r] = delta;
    if (lane_x<R>() == 0) {
      from_state[row] = decay == 0 || inverse == 0 || row >= rows.count ? R(0) : inverse * (state_grad - delta * state_sum);
      if (row < rows.count) kept.weights[head_tokens + row] = inverse, kept.deltas[head_tokens + row] = delta;
    }
  }
  const bool flows = kDecay == Decay::Token && params.grad_log_decay.data;
  if (p.causal) {
    load_block<R>(kept_weights.data, w);
    load_block<R>(kept_grads.data, g);
    // Each thread reads and replaces its own elements of the tile.
    for_block<R>([&](int r, int c) {
      const bool inside = sees(r, c);
      const R difference = g[r][c] - deltas[r], scaled = inside ? w[r][c] * factors[r] : R(0);
      R grad = inside ? difference * factors[r] : R(0);
      if (kDecay == Decay::Token) grad = inside ? grad * element<kTile>(shared.tile, row_of<R>(r), col_of<R>(c)) : R(0);
      w[r][c] = scaled, g[r][c] = grad;
      if (flows) element<kTile>(shared.stage, row_of<R>(r), col_of<R>(c)) = inside && col_of<R>(c) < row_of<R>(r) ? scaled * difference : R(0);
    });
    store_block<R>(kept_weights, 0, kTile, 0, kTile, w);
    store_block<R>(kept_grads, 0, kTile, 0, kTile, g);
    put_block<R>(shared.tile, g);
    if (flows) {
      // The pairs (i, j) with j < t <= i: sums down the columns from the last row on, then along the rows.
      __syncthreads();
      if (thread < kTile) {
        R sum = 0;
        for (int i = kTile - 1; i >= 0; i--) {
          R& x = element<kTile>(shared.stage, i, thread);
          x = sum += x;
        }
      }
      __syncthreads();
      if (thread < rows.count) {
        R sum = 0;
        for (int j = 0; j < thread; j++) sum += element<kTile>(shared.stage, thread, j);
        for (int i = thread; i < rows.count; i++) sum += from_state[i];
        kept.flows[head_tokens + thread] = sum;
      }
    }
    __syncthreads();
  }

  // The gradient of the queries. Up to kTile features S do is still there.
  const bool parts = kDecay == Decay::Feature;
  if (!params.grad_query.data && !parts) return;
  const Rows<T> grad_query = rows_of<T>(p, params.grad_query, at.batch, at.head);
  for (int64_t d = 0; d < p.head_dim; d += kTile) {
    if (p.head_dim > kTile) read_state<T>(grad_out, kv, rows, d, p.head_dim, p.head_dim_v, shared, acc);
    for_block<R>([&](int r, int c) {
      const int row = row_of<R>(r), col = col_of<R>(c);
      const bool inside = row < rows.count && d + col < p.head_dim;
      R decay = 1;
      if (kDecay == Decay::Token) decay = in[row];
      if (kDecay == Decay::Feature) decay = inside ? decay_in[row * p.head_dim + d + col] : R(0);
      const R factor = decay == 0 ? R(0) : factors[r] * decay;
      acc[r][c] = factor == 0 || !inside ? R(0) : factor * (acc[r][c] - deltas[r] * k_sum[d + col]);
    });
    if constexpr (kDecay == Decay::Feature) {
      store_block<R>(Rows<R>(kept.query_parts + head_tokens * p.head_dim, p.head_dim, 1), 0, rows.count, d, p.head_dim, acc);
    } else {
      for (int j0 = 0; p.causal && j0 < rows.count; j0 += kStep) {
        load_features<kStep, kTile>(key, p.key_map, rows.begin + j0, end, d, p.head_dim, [&](int row) { return visible(j0 + row); }, shared.right);
        __syncthreads();
        const bool not_finite = *shared.not_finite != 0;
        if (not_finite) find_first<kDecay, T>(p, log_decay, rows, shared.first);
        multiply<Lies::Along, kTile, Lies::Down, kTile>(acc, shared.tile, j0, shared.right, depth_of(rows.count - j0), not_finite,
                                                        [&](int row, int k) { return shared.first[row] <= j0 + k && j0 + k <= row; });
        __syncthreads();
      }
      put_block<R>(shared.stage, acc);
      __syncthreads();
      store_tile<kTile, kTile, kThreads>(grad_query, rows.begin, end, d, p.head_dim, [&](int row, int col, R(&x)[kVec<T>]) {
        R a[kVec<T>];
        load_vec<T>(query, rows.begin + row, d + col, p.head_dim, a);
        get<kTile, T>(shared.stage, row, col, x);
#pragma unroll
        for (int k = 0; k < kVec<T>; k++) x[k] *= feature_slope(p.query_map, feature(p.query_map, a[k]));
      });
      __syncthreads();
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
