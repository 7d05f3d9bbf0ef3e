// The table of kernels of one instruction set. This file and instances/*.cpp are compiled once for each, with -DKERNEL_ISA=<name> and the
// matching -m flags.
#include <time.h>

#include "dispatch.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

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
                         attention_fwd_add,
                         attention_bwd_scratch,
                         attention_bwd,
                         attention_bwd_add,
                         attention_weights_scratch,
                         attention_weights,
                         attention_decode_scratch,
                         attention_decode,
                         cache_append,
                         additive_attention_fwd_scratch,
                         additive_attention_fwd,
                         additive_attention_bwd_scratch,
                         additive_attention_bwd,
                         additive_attention_weights_scratch,
                         additive_attention_weights,
                         linear_fwd_scratch,
                         linear_fwd,
                         linear_bwd_scratch,
                         linear_bwd,
                         linear_step,
                         rotate,
                         dropout_mask,
                         mask_dense,
                         peak};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
