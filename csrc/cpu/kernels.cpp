// The kernels of one instruction set. Compiled once for each, with -DKERNEL_ISA=<name> and the matching -m flags.
#include <time.h>
#include "attention_bwd.h"
#include "attention_fwd.h"
#include "attention_weights.h"
#include "linear_bwd_chunk.h"
#include "linear_bwd_gated.h"
#include "linear_step.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Calls f with a value of the element type and one of the unit its products are computed in.
template <class F>
static auto dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat64: return f(double(), double());
    case DType::kFloat16: return f(fp16(), float());
#if defined(__AVX512BF16__)
    case DType::kBFloat16: return f(bf16(), Bf16Pair());
#else
    case DType::kBFloat16: return f(bf16(), float());
#endif
    default: return f(float(), float());
  }
}

// Calls f with the kernel for the dtype and for whether there is dropout.
template <template <class, class, bool> class Kernel, class Params, class F>
static auto with_kernel(const Params& params, const AttentionParams& p, const ThreadPool& pool, const F& f) {
  return dispatch(p.dtype, [&](auto element, auto unit) {
    using T = decltype(element);
    using Unit = decltype(unit);
    if (p.dropout.p > 0) return f(Kernel<T, Unit, true>(params, pool));
    return f(Kernel<T, Unit, false>(params, pool));
  });
}
static const auto scratch_bytes = [](const auto& kernel) { return kernel.scratch_bytes(); };

static size_t attention_fwd_scratch(const AttentionParams& p, const ThreadPool& pool) { return with_kernel<Forward>(p, p, pool, scratch_bytes); }
static void attention_fwd(const AttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Forward>(p, p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
static size_t attention_bwd_scratch(const AttentionBackwardParams& p, const ThreadPool& pool) {
  return with_kernel<Backward>(p, p.forward, pool, scratch_bytes);
}
static void attention_bwd(const AttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Backward>(p, p.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
static size_t attention_weights_scratch(const AttentionWeightsParams& p, const ThreadPool& pool) {
  return with_kernel<Weights>(p, p.forward, pool, scratch_bytes);
}
static void attention_weights(const AttentionWeightsParams& p, const ThreadPool& pool, void* scratch) {
  with_kernel<Weights>(p, p.forward, pool, [&](const auto& kernel) { kernel.run(scratch); });
}

// Calls f with the kernel for the dtype and the kind of decay.
template <class F>
static auto with_linear_forward(const LinearAttentionParams& p, const ThreadPool& pool, const F& f) {
  return dispatch(p.dtype, [&](auto element, auto) {
    using T = decltype(element);
    if (!p.log_decay.data) return f(LinearForward<T, false>(p, pool));
    if (!p.decay_per_feature) return f(LinearForward<T, true>(p, pool));
    return f(LinearGatedForward<T>(p, pool));
  });
}
template <class F>
static auto with_linear_backward(const LinearAttentionBackwardParams& params, const ThreadPool& pool, const F& f) {
  return dispatch(params.forward.dtype, [&](auto element, auto) {
    using T = decltype(element);
    if (!params.forward.log_decay.data) return f(LinearBackward<T, LinearChunk<T, false>>(params, pool));
    if (!params.forward.decay_per_feature) return f(LinearBackward<T, LinearChunk<T, true>>(params, pool));
    return f(LinearBackward<T, LinearTokens<T>>(params, pool));
  });
}
static size_t linear_fwd_scratch(const LinearAttentionParams& p, const ThreadPool& pool) { return with_linear_forward(p, pool, scratch_bytes); }
static void linear_fwd(const LinearAttentionParams& p, const ThreadPool& pool, void* scratch) {
  with_linear_forward(p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
static size_t linear_bwd_scratch(const LinearAttentionBackwardParams& p, const ThreadPool& pool) { return with_linear_backward(p, pool, scratch_bytes); }
static void linear_bwd(const LinearAttentionBackwardParams& p, const ThreadPool& pool, void* scratch) {
  with_linear_backward(p, pool, [&](const auto& kernel) { kernel.run(scratch); });
}
static void linear_step(const LinearAttentionParams& p, const ThreadPool& pool) {
  dispatch(p.dtype, [&](auto element, auto) { LinearStep<decltype(element)>{p}.run(linear_workers(pool, p)); });
}

static void dropout_mask(const DropoutParams& p, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, const ThreadPool& pool, bool* keep) {
  for_each_item(pool, batch * num_heads, [&](int, int64_t item) {
    constexpr int kCols = 256;
    uint32_t words[Dropout::row_bits_size(kCols)];
    const Dropout dropout(p, item / num_heads, item % num_heads, nullptr);
    const bool all = dropped_of_65536(p.p) >= 65536;
    for (int64_t i = 0; i < seqlen_q; i++)
      for (int64_t j = 0; j < seqlen_kv; j += kCols) {
        const int cols = int(min_of(int64_t(kCols), seqlen_kv - j));
        bool* to = keep + (item * seqlen_q + i) * seqlen_kv + j;
        if (p.p <= 0) {
          memset(to, 1, cols);
          continue;
        }
        const uint32_t* bits = dropout.row_bits(i, j, cols, words);
        for (int k = 0; k < cols; k++) to[k] = !all && bits[k] >= dropout.threshold;
      }
  });
}

static void mask_dense(const MaskParams& p, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible) {
  for (int64_t b = 0; b < batch; b++) {
    const RowMask mask(p, b, seqlen_q, seqlen_kv);
    for (int64_t i = 0; i < seqlen_q; i++) {
      const RowKeys row = mask.row(i);
      for (int64_t j = 0; j < seqlen_kv; j++) *visible++ = contains(row, int(j));
    }
  }
}

static double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Independent multiply-adds that never leave the registers: what this core can do at best. Several rounds, the best of them.
static double peak(DType dtype) {
  return dispatch(dtype, [&](auto, auto unit) {
    using Unit = decltype(unit);
    using Acc = NativeVec<Accumulator<Unit>>;
    constexpr int kChains = 12, kSteps = 100000;
    double best = 0;
    for (int round = 0; round < 12; round++) {
      NativeVec<Unit> a(unit), b(unit);
      asm volatile("" : "+x"(a.v), "+x"(b.v));
      Acc acc[kChains];
      for (int i = 0; i < kChains; i++) acc[i] = Acc(Accumulator<Unit>(i));
      const double start = seconds();
      for (int k = 0; k < kSteps; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < kChains; i++) acc[i] = multiply_add(a, b, acc[i]);
      }
      for (int i = 0; i < kChains; i++) asm volatile("" : "+x"(acc[i].v));
      const double rate = 2.0 * kSteps * kChains * Acc::kLanes * kUnitSize<Unit> / (seconds() - start) * 1e-9;
      best = rate > best ? rate : best;
    }
    return best;
  });
}

extern const Kernels kernels;
#define STRING_(x) #x
#define STRING(x) STRING_(x)
const Kernels kernels = {STRING(KERNEL_ISA),
                         attention_fwd_scratch,
                         attention_fwd,
                         attention_bwd_scratch,
                         attention_bwd,
                         attention_weights_scratch,
                         attention_weights,
                         linear_fwd_scratch,
                         linear_fwd,
                         linear_bwd_scratch,
                         linear_bwd,
                         linear_step,
                         dropout_mask,
                         mask_dense,
                         peak};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
