#pragma once
// The gradient of the decays of linear attention: dg_t is the sum of what passes over token t, as pairs, from the state to a query, from a key to
// the state, and from state to state. Each is summed as it is: the usual difference (a . da - b . db summed from the end) subtracts numbers of the
// size of the gradients, and at decays of -20, where the true gradient is 1e-9 of them, nothing of it is left.

#include "linear_bwd_queries.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int kFlowThreads = 128;

// kept.state_flows: a warp takes a feature at a time.
template <class R>
__global__ void __launch_bounds__(kFlowThreads) linear_state_flow_kernel(LinearAttentionParams p, Segment s, Kept<R> kept) {
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carver(memory);
  R* const sums = carver.take<R>(kFlowThreads / 32);
  const int64_t item = blockIdx.x, columns = kept.decays.columns;
  if (ChunkRows(s, item % s.chunks, p.seqlen_kv).count == 0) return;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const R *const state = kept.states + item * s.state_size, *const grad = kept.grads + item * s.state_size;
  const R* const through = kept.decays.through + item * columns;
  const int64_t sums_at = p.head_dim * p.head_dim_v;
  R total = 0;
  for (int64_t d = warp; d < p.head_dim; d += kFlowThreads / 32) {
    const R decay = through[p.decay_per_feature ? d : 0];
    R sum = 0;
    if (decay != 0) {
      for (int64_t e = lane; e < p.head_dim_v; e += 32) sum = multiply_add(state[d * p.head_dim_v + e], grad[d * p.head_dim_v + e], sum);
      if (lane == 0) sum = multiply_add(state[sums_at + d], grad[sums_at + d], sum);
    }
#pragma unroll
    for (int width = 16; width; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    sum = decayed(sum, decay);
    if (p.decay_per_feature && lane == 0) kept.state_flows[item * columns + d] = sum;
    total += sum;
  }
  if (p.decay_per_feature) return;
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  total = 0;
  for (int i = 0; i < kFlowThreads / 32; i++) total += sums[i];
  kept.state_flows[item] = total;
}

// One decay per token.
template <class R>
__global__ void __launch_bounds__(kTile) linear_decay_grad_kernel(LinearAttentionBackwardParams params, Segment s, Kept<R> kept) {
  const LinearAttentionParams& p = params.forward;
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carver(memory);
  R* const key_flow = carver.take<R>(kTile);
  const BlockIndex at(1, s.chunks, p.num_heads_kv);
  const ChunkRows rows(s, at.chunk, p.seqlen_kv);
  if (rows.count == 0) return;
  const int64_t group = p.num_heads / p.num_heads_kv;
  const int t = int(threadIdx.x);
  if (t < rows.count) {
    R sum = 0;
    for (int64_t part = 0; part < blocks_of(p.head_dim); part++)
      sum += kept.key_flows[(part * p.batch * p.num_heads_kv + at.batch_head) * s.tokens() + rows.local + t];
    key_flow[t] = sum;
  }
  __syncthreads();
  if (t >= rows.count) return;
  R sum = kept.state_flows[at.batch_head * s.chunks + at.chunk];
  for (int j = 0; j < t; j++) sum += key_flow[j];
  for (int64_t h = 0; h < group; h++) sum += kept.flows[(at.batch * p.num_heads + at.head * group + h) * s.tokens() + rows.local + t];
  *rows_of<R>(p, params.grad_log_decay, at.batch, at.head).at(rows.begin + t, 0) = sum;
}

// A decay per feature: the pairs of a chunk, a thread with one feature, from the last token to the first. With e_tj = exp(g_(j+1) + .. + g_t) of
// the feature, and q_j(t) = sum over i >= t of G_ij a_i e_it, which moves from t + 1 to t by one gate and one term:
//   da_t += sum_(j<=t) G_tj b_j e_tj     db_j += q_j(j)     dg_t = sum_(j<t) q_j(t) b_j e_tj + the state's parts
// e_tj is a product of gates, built from t down; where it is 0 nothing is multiplied.
template <class T>
__global__ void __launch_bounds__(kTile) linear_gated_grad_kernel(LinearAttentionBackwardParams params, Segment s, Kept<Real<T>> kept) {
  using R = Real<T>;
  constexpr int kV = kVec<R>;
  const LinearAttentionParams& p = params.forward;
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carver(memory);
  const int lane = int(threadIdx.x);
  R* const b = carver.take<R>(kTile * kTile) + lane;  // [token][feature], as the others
  R* const gates = carver.take<R>(kTile * kTile) + lane;
  R* const from_keys = carver.take<R>(kTile * kTile) + lane;  // b_j db_j of the state, summed over j < t

  const BlockIndex at(blocks_of(p.head_dim), s.chunks, p.num_heads_kv);
  const ChunkRows rows(s, at.chunk, p.seqlen_kv);
  if (rows.count == 0) return;
  const int64_t d = at.part * kTile + lane, group = p.num_heads / p.num_heads_kv;
  if (d >= p.head_dim) return;
  const Rows<const T> key = rows_of<const T>(p, p.key, at.batch, at.head);
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, at.batch, at.head);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, at.batch, at.head);
  const Rows<const T> query = rows_of<const T>(p, p.query, at.batch, at.head * group);  // of the first head of the group
  const Rows<T> grad_query = rows_of<T>(p, params.grad_query, at.batch, at.head * group), grad_key = rows_of<T>(p, params.grad_key, at.batch, at.head);
  const Rows<R> grad_log_decay = rows_of<R>(p, params.grad_log_decay, at.batch, at.head);
  const R* const key_parts = kept.key_parts + (at.batch_head * s.tokens() + rows.local) * p.head_dim + d;

  R sum = params.grad_log_decay.data ? kept.state_flows[(at.batch_head * s.chunks + at.chunk) * p.head_dim + d] : R(0);
  for (int t = 0; t < rows.count; t++) {
    b[t * kTile] = is_visible(mask, rows.begin + t) ? feature(p.key_map, to_real(*key.at(rows.begin + t, d))) : R(0);
    gates[t * kTile] = exp_of(*log_decay.at(rows.begin + t, d));
    from_keys[t * kTile] = sum;
    if (is_visible(mask, rows.begin + t)) sum = multiply_add(b[t * kTile], key_parts[t * p.head_dim], sum);
  }

  R q[kTile];
#pragma unroll
  for (int j = 0; j < kTile; j++) q[j] = 0;
  R from_queries = 0;
  for (int t = rows.count - 1; t >= 0; t--) {
    const R gate = gates[t * kTile], gate_behind = t + 1 < rows.count ? gates[(t + 1) * kTile] : R(0);
    R grad_b = 0, crossing = 0;
    for (int64_t h = 0; h < group; h++) {
      const int64_t query_head = at.batch * p.num_heads + at.head * group + h;
      const R* const grads = kept.pairs + ((query_head * s.chunks + at.chunk) * 2 + 1) * (kTile * kTile) + t * kTile;
      const R a = feature(p.query_map, to_real(query.at(rows.begin + t, d)[h * p.query.head_stride]));
      const R part = kept.query_parts[(query_head * s.tokens() + rows.local + t) * p.head_dim + d], forget = h == 0 ? gate_behind : R(1);
      const bool last = h == group - 1;
      R grad_a = part, since = 1;
#pragma unroll
      for (int j0 = kTile - kV; j0 >= 0; j0 -= kV) {
        if (j0 > t) continue;
        const Vec16<R> g = *reinterpret_cast<const Vec16<R>*>(grads + j0);
#pragma unroll
        for (int k = kV - 1; k >= 0; k--) {
          const int j = j0 + k;
          if (j > t) continue;
          // since = e_tj
          q[j] = multiply_add(g.x[k], a, decayed(q[j], forget));
          if (j == t) grad_b = q[j];
          if (since != 0) {
            const R key_then = b[j * kTile] * since;
            grad_a = multiply_add(g.x[k], key_then, grad_a);
            if (last && j < t) crossing = multiply_add(q[j], key_then, crossing);
          }
          since = decayed(since, gates[j * kTile]);
        }
      }
      if (grad_query.data) grad_query.at(rows.begin + t, d)[h * params.grad_query.head_stride] = from_real<T>(grad_a * feature_slope(p.query_map, a));
      from_queries = multiply_add(a, part, from_queries);
    }
    if (grad_key.data) {
      const R grad = (grad_b + key_parts[t * p.head_dim]) * feature_slope(p.key_map, b[t * kTile]);
      *grad_key.at(rows.begin + t, d) = from_real<T>(is_visible(mask, rows.begin + t) ? grad : R(0));
    }
    if (grad_log_decay.data) *grad_log_decay.at(rows.begin + t, d) = gate == 0 ? R(0) : crossing + from_queries + from_keys[t * kTile];
  }
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
