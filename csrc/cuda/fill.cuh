#pragma once
// Results of queries without any key: no score is computed, lse is the sink alone.

#include <math.h>

#include "../core/params.h"
#include "device.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int kFillThreads = 256;

// lse [count], count = batch * num_heads * seqlen_q; sinks [num_heads] or null.
template <class Real>
__global__ void __launch_bounds__(kFillThreads) lse_without_keys_kernel(Real* lse, const Real* sinks, int64_t num_heads, int64_t seqlen_q, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kFillThreads + threadIdx.x;
  if (i < count) lse[i] = sinks ? sinks[i / seqlen_q % num_heads] : Real(-INFINITY);
}

// A block per head: threads add up rows in strides, then pairwise. grad_lse [batch][num_heads][seqlen_q].
template <class Real>
__global__ void __launch_bounds__(kFillThreads)
    grad_sinks_without_keys_kernel(Real* grad_sinks, const Real* sinks, const Real* grad_lse, int64_t batch, int64_t num_heads, int64_t seqlen_q) {
  SIMT_SHARED(Real, partial, [kFillThreads]);
  const int64_t h = blockIdx.x;
  const int thread = int(threadIdx.x);
  Real sum = 0;
  for (int64_t row = thread; row < batch * seqlen_q; row += kFillThreads) sum += grad_lse[(row / seqlen_q * num_heads + h) * seqlen_q + row % seqlen_q];
  partial[thread] = sum;
  for (int half = kFillThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) partial[thread] += partial[thread + half];
  }
  if (thread == 0) grad_sinks[h] = sinks[h] == Real(-INFINITY) ? Real(0) : partial[0];
}

template <class Real>
void launch_lse_without_keys(const AttentionParams& p, Stream stream) {
  const int64_t count = p.batch * p.num_heads * p.seqlen_q;
  SIMT_LAUNCH(lse_without_keys_kernel<Real>, unsigned((count + kFillThreads - 1) / kFillThreads), kFillThreads, 0, stream, static_cast<Real*>(p.lse),
              static_cast<const Real*>(p.sinks), p.num_heads, p.seqlen_q, count);
}

template <class Real>
void launch_grad_sinks_without_keys(const AttentionBackwardParams& p, Stream stream) {
  const AttentionParams& f = p.forward;
  SIMT_LAUNCH(grad_sinks_without_keys_kernel<Real>, unsigned(f.num_heads), kFillThreads, 0, stream, static_cast<Real*>(p.grad_sinks),
              static_cast<const Real*>(f.sinks), static_cast<const Real*>(p.grad_lse), f.batch, f.num_heads, f.seqlen_q);
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
