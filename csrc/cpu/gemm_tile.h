#pragma once
// c (+)= a b for tiles that live in cache. b is packed in panels of kPanel columns; a is read in place, one broadcast
// per element. `Unit` is what one lane of b holds along the reduction: a float, a double, or a pair of bf16.

#include "simd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

#ifndef GEMM_ROWS
#if defined(__AVX512F__)
#define GEMM_ROWS 12
#define GEMM_VECTORS 2
#else
#define GEMM_ROWS 6
#define GEMM_VECTORS 2
#endif
#endif
// The register block: kBlockRows x kBlockVectors accumulators, kBlockVectors vectors of b and one of a. Fewer rows
// are rounded up to a multiple of kRowStep.
constexpr int kBlockRows = GEMM_ROWS, kBlockVectors = GEMM_VECTORS, kRowStep = kVectorBytes == 64 ? 4 : 2;
static_assert(kBlockRows % kRowStep == 0 && kBlockVectors == 2, "");

template <class Unit> struct AccumulatorOf {
  typedef Unit type;
};
template <> struct AccumulatorOf<Bf16Pair> {
  typedef float type;
};
template <class Unit> using Accumulator = typename AccumulatorOf<Unit>::type;

template <class Unit>
constexpr int kPanel = kBlockVectors * kLanes<Unit>;

constexpr int whole_steps(int size, int step) { return (size + step - 1) / step * step; }
ALWAYS_INLINE int round_up(int x, int step) { return (x + step - 1) / step * step; }
ALWAYS_INLINE int round_down(int x, int step) { return x / step * step; }

// How element (i, k) of the left operand is found: RowMajor at a[i * stride + k], Transposed at a[k * stride + i].
enum class Left { RowMajor, Transposed };
// Accumulate adds the chain of this call to c, Continue goes on with the chain that c holds.
enum class Store { Overwrite, Accumulate, Continue };

template <Left kLeft, Store kStore, int kRows, int kVectors, class Unit>
ALWAYS_INLINE void gemm_block(int k_size, const Unit* a, long a_stride, const Unit* b, Accumulator<Unit>* c, long c_stride) {
  using V = NativeVec<Unit>;
  using Acc = NativeVec<Accumulator<Unit>>;
  Acc acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      acc[i][j] = kStore == Store::Continue ? Acc::load(c + i * c_stride + j * V::kLanes) : Acc(Accumulator<Unit>(0));
      // The accumulators of the backward pass lie in L3; the loop below is long enough to bring them in.
      if (kStore == Store::Accumulate) __builtin_prefetch(c + i * c_stride + j * V::kLanes, 1);
    }
#pragma GCC unroll 1
  for (int k = 0; k < k_size; k++) {
    V right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) right[j] = V::load(b + j * V::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; i++) {
      const V left(kLeft == Left::RowMajor ? a[i * a_stride] : a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; j++) acc[i][j] = multiply_add(left, right[j], acc[i][j]);
    }
    a += kLeft == Left::RowMajor ? 1 : a_stride;
    b += kPanel<Unit>;
  }
  // c is read here, not before the loop: there it would delay the first multiply-adds (5 % at k = 64).
#pragma GCC unroll 16
  for (int i = 0; i < kRows; i++)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; j++) {
      Accumulator<Unit>* target = c + i * c_stride + j * V::kLanes;
      (kStore == Store::Accumulate ? acc[i][j] + Acc::load(target) : acc[i][j]).store(target);
    }
}

// One panel: blocks of kRows, then one smaller block for the rest. Not inlined, so that each block size gets its own
// register allocation.
template <Left kLeft, Store kStore, int kRows, int kVectors, class Unit>
__attribute__((noinline)) void gemm_panel(int rows, int k_size, const Unit* a, long a_stride, const Unit* b, Accumulator<Unit>* c, long c_stride) {
  for (; rows > kRows - kRowStep; rows -= kRows, a += kRows * (kLeft == Left::RowMajor ? a_stride : 1), c += kRows * c_stride)
    gemm_block<kLeft, kStore, kRows, kVectors>(k_size, a, a_stride, b, c, c_stride);
  if constexpr (kRows > kRowStep)
    if (rows > 0) gemm_panel<kLeft, kStore, kRows - kRowStep, kVectors>(rows, k_size, a, a_stride, b, c, c_stride);
}

// c[rows][cols] (+)= a[rows][k] b[k][cols]; `b_panel_stride` units from one panel to the next. Rows are computed up to
// a multiple of kRowStep and columns up to whole vectors: a and c must have room for them. Each element is one chain of
// multiply-adds in the order of k, whatever the blocks; what is accumulated to is added last.
template <Left kLeft, Store kStore, int kRows = kBlockRows, class Unit>
inline void gemm(int rows, int cols, int k_size, const Unit* a, long a_stride, const Unit* b, long b_panel_stride, Accumulator<Unit>* c, long c_stride) {
  for (; cols > kLanes<Unit>; cols -= kPanel<Unit>, b += b_panel_stride, c += kPanel<Unit>)
    gemm_panel<kLeft, kStore, kRows, kBlockVectors>(rows, k_size, a, a_stride, b, c, c_stride);
  if (cols > 0) gemm_panel<kLeft, kStore, kRows, 1>(rows, k_size, a, a_stride, b, c, c_stride);
}

// c[rows][first .. cols) = a b, first less than a panel and rounded down to whole vectors.
template <class Unit>
inline void gemm_from(int first, int rows, int cols, int k_size, const Unit* a, long a_stride, const Unit* b, long b_panel_stride, Accumulator<Unit>* c,
                      long c_stride) {
  if (first >= kLanes<Unit>) {
    gemm_panel<Left::RowMajor, Store::Overwrite, kBlockRows, 1>(rows, k_size, a, a_stride, b + kLanes<Unit>, c + kLanes<Unit>, c_stride);
    cols -= kPanel<Unit>, b += b_panel_stride, c += kPanel<Unit>;
  }
  gemm<Left::RowMajor, Store::Overwrite>(rows, cols, k_size, a, a_stride, b, b_panel_stride, c, c_stride);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
