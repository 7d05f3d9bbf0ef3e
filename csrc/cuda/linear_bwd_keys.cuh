#pragma once
// The key side of the backward of linear attention, from the gradients dS, dz of the state behind the chunk and the pairs that the query side
// has kept:
//   db_j = sum_i G_ij a_i + out_j (dS v_j + dz)        dv_j = sum_i W_ij w_i do_i + out_j b_j dS
// the sums over i over all query heads of the group. A thread block takes 64 keys and 64 features or value columns. With a decay per feature db
// stays without the sum over i: linear_gated.cuh adds it.

#include "linear_bwd_queries.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <class R> using KeyShared = PairShared<R, Decay::None, 2>;

// acc += sum over the query heads and rows of pairs^T right, for 64 columns of right.
template <class T, Decay kDecay, class Load>
SIMT_DEVICE void add_pairs(const LinearAttentionParams& p, const Segment& s, const BlockIndex& at, const ChunkRows& rows, const Real<T>* pairs,
                           const Rows<const Real<T>>& log_decay, const KeyShared<Real<T>>& shared, const Load& load, Block<Real<T>>& acc) {
  using R = Real<T>;
  const int64_t group = p.num_heads / p.num_heads_kv;
  for (int64_t h = 0; h < group; h++) {
    const int64_t head = at.head * group + h;
    const Rows<const R> from(pairs + ((at.batch * p.num_heads + head) * s.chunks + at.chunk) * (2 * kTile * kTile), kTile, 1);
    for (int i0 = 0; i0 < rows.count; i0 += kStep) {
      load_features<kStep, kTile>(from, FeatureMap::kIdentity, i0, kTile, 0, kTile, KeepAll(), shared.left);
      if (load(head, i0)) atomicAdd(shared.not_finite, 1);
      __syncthreads();
      const bool not_finite = *shared.not_finite != 0;
      if (not_finite) find_first<kDecay, T>(p, log_decay, rows, shared.first);
      multiply<Lies::Down, kTile, Lies::Down, kTile>(acc, shared.left, 0, shared.right, depth_of(rows.count - i0), not_finite,
                                                     [&](int row, int k) { return i0 + k < rows.count && row <= i0 + k && shared.first[i0 + k] <= row; });
      __syncthreads();
    }
  }
}

template <class T, Decay kDecay>
__global__ void __launch_bounds__(Shape<Real<T>>::kThreads, kKeyGradBlocks<Real<T>, kDecay>)
    linear_key_grad_kernel(LinearAttentionBackwardParams params, Segment s, Kept<Real<T>> kept) {
  using R = Real<T>;
  constexpr int kThreads = Shape<R>::kThreads;
  const LinearAttentionParams& p = params.forward;
  SIMT_DYNAMIC_SHARED(memory);
  const KeyShared<R> shared(memory);
  R *const out = shared.vector(0), *const flow = shared.vector(1);

  const int64_t feature_blocks = blocks_of(p.head_dim);
  const BlockIndex at(feature_blocks + blocks_of(p.head_dim_v), s.chunks, p.num_heads_kv);
  const ChunkRows rows(s, at.chunk, p.seqlen_kv);
  if (rows.count == 0) return;
  const int64_t end = rows.begin + rows.count;
  const Rows<const T> key = rows_of<const T>(p, p.key, at.batch, at.head), value = rows_of<const T>(p, p.value, at.batch, at.head);
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, at.batch, at.head);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, at.batch, at.head);
  const R* const grad = kept.grads + state_of(p, s, at.batch_head, at.chunk, rows) * s.state_size;
  const R* const grad_sum = grad + p.head_dim * p.head_dim_v;
  const Rows<const R> grad_kv(grad, p.head_dim_v, 1);
  const R* const decay_out = kept.decays.out + (at.batch_head * s.tokens() + rows.local) * kept.decays.columns;
  const auto visible = [&](int row) { return is_visible(mask, rows.begin + row); };
  const int thread = int(threadIdx.x);

  if (thread == 0) *shared.not_finite = 0;
  if (kDecay == Decay::Token && thread < kTile) out[thread] = thread < rows.count ? decay_out[thread] : R(1);
  __syncthreads();
  Block<R> acc;
  clear<R>(acc);

  if (at.part < feature_blocks) {
    const int64_t first_feature = at.part * kTile;
    for (int64_t e = 0; e < p.head_dim_v; e += kStep) {
      load_features<kTile, kStep>(value, FeatureMap::kIdentity, rows.begin, end, e, p.head_dim_v, visible, shared.left);
      load_features<kTile, kStep>(grad_kv, FeatureMap::kIdentity, first_feature, p.head_dim, e, p.head_dim_v, KeepAll(), shared.right);
      __syncthreads();
      multiply<Lies::Along, kStep, Lies::Along, kStep>(acc, shared.left, 0, shared.right, depth_of(p.head_dim_v - e));
      __syncthreads();
    }
    for_block<R>([&](int r, int c) {
      const int row = row_of<R>(r);
      const int64_t d = first_feature + col_of<R>(c);
      const bool inside = row < rows.count && d < p.head_dim;
      R decay = 1;
      if (kDecay == Decay::Token) decay = out[row];
      if (kDecay == Decay::Feature) decay = inside ? decay_out[row * p.head_dim + d] : R(0);
      acc[r][c] = inside ? decayed(acc[r][c] + grad_sum[d], decay) : R(0);
    });
    if (kDecay == Decay::Feature) {
      store_block<R>(Rows<R>(kept.key_parts + (at.batch_head * s.tokens() + rows.local) * p.head_dim, p.head_dim, 1), 0, rows.count, first_feature, p.head_dim,
                     acc);
      return;
    }
    if (kDecay == Decay::Token && params.grad_log_decay.data) {
      load_features<kTile, kTile>(key, p.key_map, rows.begin, end, first_feature, p.head_dim, visible, shared.tile);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < Shape<R>::kRows; r++) {
        R sum = 0;
#pragma unroll
        for (int c = 0; c < Shape<R>::kCols; c++) sum = multiply_add(element<kTile>(shared.tile, row_of<R>(r), col_of<R>(c)), acc[r][c], sum);
        sum = sum_of_row<R>(sum);
        if (lane_x<R>() == 0) flow[row_of<R>(r)] = sum;
      }
      __syncthreads();
      if (thread < rows.count)
        kept.key_flows[(at.part * p.batch * p.num_heads_kv + at.batch_head) * s.tokens() + rows.local + thread] = visible(thread) ? flow[thread] : R(0);
    }
    if (!params.grad_key.data) return;
    if (p.causal)
      add_pairs<T, kDecay>(
          p, s, at, rows, kept.pairs + kTile * kTile, log_decay, shared,
          [&](int64_t head, int i0) {
            return load_features<kStep, kTile>(rows_of<const T>(p, p.query, at.batch, head), p.query_map, rows.begin + i0, end, first_feature, p.head_dim,
                                               KeepAll(), shared.right);
          },
          acc);
    put_block<R>(shared.stage, acc);
    __syncthreads();
    store_tile<kTile, kTile, kThreads>(rows_of<T>(p, params.grad_key, at.batch, at.head), rows.begin, end, first_feature, p.head_dim,
                                       [&](int row, int col, R(&x)[kVec<T>]) {
                                         R b[kVec<T>];
                                         const bool seen = visible(row);
                                         load_vec<T>(key, rows.begin + row, first_feature + col, p.head_dim, b);
                                         get<kTile, T>(shared.stage, row, col, x);
#pragma unroll
                                         for (int k = 0; k < kVec<T>; k++) x[k] = seen ? x[k] * feature_slope(p.key_map, feature(p.key_map, b[k])) : R(0);
                                       });
    return;
  }

  const int64_t first_col = (at.part - feature_blocks) * kTile;
  if (!params.grad_value.data) return;
  for (int64_t d = 0; d < p.head_dim; d += kStep) {
    load_tile<kTile, kStep, kThreads>(key, rows.begin, end, d, p.head_dim, visible, [&](int row, int col, R(&x)[kVec<T>]) {
      const bool seen = row < rows.count && visible(row);
#pragma unroll
      for (int k = 0; k < kVec<T>; k++) {
        const bool inside = seen && d + col + k < p.head_dim;
        x[k] = inside ? feature(p.key_map, x[k]) : R(0);
        if (kDecay == Decay::Feature && inside) x[k] = decayed(x[k], decay_out[row * p.head_dim + d + col + k]);
      }
      put<kStep, T>(shared.left, row, col, x);
    });
    const bool bad = load_features<kStep, kTile>(grad_kv, FeatureMap::kIdentity, d, p.head_dim, first_col, p.head_dim_v, KeepAll(), shared.right);
    if (kDecay == Decay::Feature && bad) atomicAdd(shared.not_finite, 1);
    __syncthreads();
    const int depth = depth_of(p.head_dim - d);
    if constexpr (kDecay == Decay::Feature)
      multiply<Lies::Along, kStep, Lies::Down, kTile>(acc, shared.left, 0, shared.right, depth, *shared.not_finite != 0, [&](int row, int k) {
        return row < rows.count && d + k < p.head_dim && decay_out[row * p.head_dim + d + k] != 0;
      });
    else multiply<Lies::Along, kStep, Lies::Down, kTile>(acc, shared.left, 0, shared.right, depth);
    __syncthreads();
  }
  if (kDecay == Decay::Token) for_block<R>([&](int r, int c) { acc[r][c] = decayed(acc[r][c], out[row_of<R>(r)]); });
  if (p.causal)
    add_pairs<T, kDecay>(
        p, s, at, rows, kept.pairs, log_decay, shared,
        [&](int64_t head, int i0) {
          return load_features<kStep, kTile>(rows_of<const T>(p, params.grad_out, at.batch, head), FeatureMap::kIdentity, rows.begin + i0, end, first_col,
                                             p.head_dim_v, KeepAll(), shared.right);
        },
        acc);
  put_block<R>(shared.stage, acc);
  __syncthreads();
  store_tile<kTile, kTile, kThreads>(rows_of<T>(p, params.grad_value, at.batch, at.head), rows.begin, end, first_col, p.head_dim_v,
                                     [&](int row, int col, R(&x)[kVec<T>]) {
                                       get<kTile, T>(shared.stage, row, col, x);
                                       if (visible(row)) return;
#pragma unroll
                                       for (int k = 0; k < kVec<T>; k++) x[k] = 0;
                                     });
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
