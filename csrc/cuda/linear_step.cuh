#pragma once
// One token of linear attention: the state is read and written once. A thread block takes 32 value columns of one head of keys; each of its
// warps every eighth feature, a lane one column. The first query head of the group is computed while the state moves on, the others from what
// was written. Every lane also moves k_sum and sums its denominator: the same steps as a column of values of 1.

#include "../core/mask.h"
#include "linear_launch.h"
#include "linear_tile.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int kStepWarps = 8, kStepThreads = 32 * kStepWarps, kStepFeatures = 256;

// The state of one feature behind the token; b v is rounded before it is added, so that all value columns take the same steps.
template <class R> SIMT_DEVICE R moved(R state, R gate, R b, R v) {
  const R product = b * v;
  return gate == 0 ? product : multiply_add(state, gate, product);
}

// kMoveSum: k_sum is moved as well, which must not be the memory that other blocks read.
template <class T, bool kMoveSum> __global__ void __launch_bounds__(kStepThreads, 2) linear_step_kernel(LinearAttentionParams p) {
  using R = Real<T>;
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carver(memory);
  R *const a = carver.take<R>(kStepFeatures), *const b = carver.take<R>(kStepFeatures), *const gate = carver.take<R>(kStepFeatures);
  R *const sums = carver.take<R>(kStepThreads), *const weights = carver.take<R>(kStepWarps);

  const int64_t blocks = max_of(int64_t(1), (p.head_dim_v + 31) / 32), batch_head = blockIdx.x / blocks, batch = batch_head / p.num_heads_kv,
                head = batch_head % p.num_heads_kv, group = p.num_heads / p.num_heads_kv;
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t e = blockIdx.x % blocks * 32 + lane;
  const bool inside = e < p.head_dim_v;
  const Rows<const T> key = rows_of<const T>(p, p.key, batch, head), value = rows_of<const T>(p, p.value, batch, head);
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, batch, head);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, batch, head);
  const bool visible = !mask.data || *mask.at(0, 0);
  const int64_t kv_at = batch_head * p.head_dim * p.head_dim_v, sum_at = batch_head * p.head_dim;
  const R *const kv = p.initial_kv ? (const R*)p.initial_kv + kv_at : nullptr, *const k_sum = p.initial_k_sum ? (const R*)p.initial_k_sum + sum_at : nullptr;
  R *const new_kv = (R*)p.final_kv + kv_at, *const new_k_sum = (R*)p.final_k_sum + sum_at;
  const R v = visible && inside ? to_real(*value.at(0, e)) : R(0);

  for (int64_t h = 0; h < group; h++) {
    const Rows<const T> query = rows_of<const T>(p, p.query, batch, head * group + h);
    const Rows<T> out = rows_of<T>(p, p.out, batch, head * group + h);
    R sum = 0, weight = 0;
    for (int64_t d0 = 0; d0 < p.head_dim; d0 += kStepFeatures) {
      const int count = int(min_of(int64_t(kStepFeatures), p.head_dim - d0));
      for (int d = thread; d < count; d += kStepThreads) {
        a[d] = feature(p.query_map, to_real(*query.at(0, d0 + d)));
        b[d] = visible ? feature(p.key_map, to_real(*key.at(0, d0 + d))) : R(0);
        gate[d] = log_decay.data ? exp_of(*log_decay.at(0, p.decay_per_feature ? d0 + d : 0)) : R(1);
      }
      __syncthreads();
      for (int d = warp; d < count; d += kStepWarps) {
        const int64_t row = d0 + d, at = row * p.head_dim_v + e;
        const R z = moved(k_sum ? k_sum[row] : R(0), gate[d], b[d], R(1));
        weight = multiply_add(a[d], z, weight);
        if (kMoveSum && h == 0 && lane == 0 && blockIdx.x % blocks == 0) new_k_sum[row] = z;
        if (!inside) continue;
        R s;
        if (h == 0) new_kv[at] = s = moved(kv ? kv[at] : R(0), gate[d], b[d], v);
        else s = new_kv[at];
        sum = multiply_add(a[d], s, sum);
      }
      __syncthreads();
    }
    sums[thread] = sum;
    if (lane == 0) weights[warp] = weight;
    __syncthreads();
    if (warp == 0 && inside) {
      R numerator = 0, denominator = 0;
      for (int w = 0; w < kStepWarps; w++) numerator += sums[w * 32 + lane], denominator += weights[w];
      const R x = !p.normalize ? numerator * R(p.scale) : denominator == 0 ? R(0) : numerator / denominator;
      *out.at(0, e) = from_real<T>(x);
    }
    __syncthreads();
  }
}

// k_sum alone, after the other blocks have read it.
template <class T> __global__ void __launch_bounds__(kStepThreads) linear_step_sum_kernel(LinearAttentionParams p) {
  using R = Real<T>;
  const int64_t index = int64_t(blockIdx.x) * kStepThreads + threadIdx.x;
  if (index >= p.batch * p.num_heads_kv * p.head_dim) return;
  const int64_t d = index % p.head_dim, batch = index / p.head_dim / p.num_heads_kv, head = index / p.head_dim % p.num_heads_kv;
  const Rows<const uint8_t> mask = rows_of<const uint8_t>(p, p.key_mask, batch, head);
  const Rows<const R> log_decay = rows_of<const R>(p, p.log_decay, batch, head);
  const bool visible = !mask.data || *mask.at(0, 0);
  const R b = visible ? feature(p.key_map, to_real(*rows_of<const T>(p, p.key, batch, head).at(0, d))) : R(0);
  const R gate = log_decay.data ? exp_of(*log_decay.at(0, p.decay_per_feature ? d : 0)) : R(1);
  ((R*)p.final_k_sum)[index] = moved(p.initial_k_sum ? ((const R*)p.initial_k_sum)[index] : R(0), gate, b, R(1));
}

}  // namespace

template <class T> const char* linear_step_of(const LinearAttentionParams& p, Stream stream) {
  using R = Real<T>;
  const int64_t blocks = p.batch * p.num_heads_kv * max_of(int64_t(1), (p.head_dim_v + 31) / 32);
  if (blocks > 0x7fffffff) return "more than 2^31 blocks of 32 value columns over all heads";
  constexpr size_t bytes = (3 * kStepFeatures + kStepThreads + kStepWarps) * sizeof(R);
  if (p.initial_k_sum != p.final_k_sum) {
    constexpr auto kernel = &linear_step_kernel<T, true>;
    SIMT_LAUNCH(kernel, unsigned(blocks), kStepThreads, bytes, stream, p);
    return nullptr;
  }
  constexpr auto kernel = &linear_step_kernel<T, false>;
  SIMT_LAUNCH(kernel, unsigned(blocks), kStepThreads, bytes, stream, p);
  const int64_t sums = p.batch * p.num_heads_kv * p.head_dim;
  constexpr auto sum_kernel = &linear_step_sum_kernel<T>;
  if (sums > 0) SIMT_LAUNCH(sum_kernel, unsigned((sums + kStepThreads - 1) / kStepThreads), kStepThreads, 0, stream, p);
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
