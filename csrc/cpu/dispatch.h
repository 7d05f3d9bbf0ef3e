#pragma once
// From the dtype of a call to the kernel that serves it.

#include "kernel_functions.h"
#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Calls f with a value of the element type and one of the unit its products are computed in.
template <class F>
auto dispatch(DType dtype, const F& f) {
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
auto with_kernel(const Params& params, const AttentionParams& p, const ThreadPool& pool, const F& f) {
  return dispatch(p.dtype, [&](auto element, auto unit) {
    using T = decltype(element);
    using Unit = decltype(unit);
    if (p.dropout.p > 0) return f(Kernel<T, Unit, true>(params, pool));
    return f(Kernel<T, Unit, false>(params, pool));
  });
}
constexpr auto scratch_bytes = [](const auto& kernel) { return kernel.scratch_bytes(); };

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
