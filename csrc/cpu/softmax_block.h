#pragma once
// Online softmax of one block of scores, and how two parts of one row are added.

#include "dropout.h"
#include "score_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Running state of a tile of rows.
template <class Real>
struct RowState {
  Real *row_max, *row_sum;  // [tile_q] in log2 units, [tile_q][kLanes]: one partial sum per lane
  Real* out;                // [tile_q][out_stride], not yet divided by row_sum
  int out_stride;

  static size_t size(int rows, int out_stride) { return size_t(rows + kLanes<Real>) + size_t(rows) * (kLanes<Real> + out_stride); }
  void clear(int rows) const {
    for (int i = 0; i < rows; i++) row_max[i] = Real(-INFINITY);
    memset(row_sum, 0, rows * kLanes<Real> * sizeof(Real));
  }
  RowState from(int row) const { return {row_max + row, row_sum + row * kLanes<Real>, out + int64_t(row) * out_stride, out_stride}; }
};

// How the block is dropped out: not at all, with bits made in registers for rows in pairs, or with bits in memory.
template <class Real>
struct BlockDropout {
  const Dropout* dropout;
  bool in_registers;
  int query, group;         // of the first row; of the first column
  const uint32_t* const* bits;  // [rows]
};

// Adds the weights as they are stored: bf16 pairs round.
template <class Unit, class V>
ALWAYS_INLINE void add_weights(V p0, V p1, V& sum0, V& sum1) {
#if defined(__AVX512BF16__)
  if constexpr (kUnitSize<Unit> == 2) {
    const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh((__m512)p1.v, (__m512)p0.v);  // each lane: two weights, and all are summed in the end
    sum0 = sum0 + V((typename V::Native)_mm512_slli_epi32(packed, 16));
    sum1 = sum1 + V((typename V::Native)_mm512_and_si512(packed, _mm512_set1_epi32(int(0xffff0000u))));
    return;
  }
#endif
  sum0 = sum0 + p0;
  sum1 = sum1 + p1;
}

// Updates the running maxima and sums of `rows` rows, rescales what was accumulated so far, and replaces the scores by probabilities.
// Scores times `factor` are in log2 units. cols is a multiple of 2 * kLanes. All maxima come first:
// the horizontal reductions of the rows then overlap. Sums are of the probabilities before dropout.
template <class Unit, bool kDrop, class Real>
ALWAYS_INLINE void softmax_block(int rows, int cols, int stride, Real* scores, Unit* probs, Real factor, const RowState<Real>& state, int out_cols,
                                 const BlockDropout<Real>& drop) {
  using V = NativeVec<Real>;
  constexpr int kN = V::kLanes;
  Real shifts[kBlockRows + 1] = {};
  for (int i = 0; i < rows; i++) {
    const Real* row = scores + i * stride;
    V top0 = V::load(row), top1 = V::load(row + kN);
    for (int j = 2 * kN; j < cols; j += 2 * kN) {
      top0 = max(V::load(row + j), top0);
      top1 = max(V::load(row + j + kN), top1);
    }
    const Real old_max = state.row_max[i], tile_max = reduce_max(max(top0, top1)) * factor;
    const Real new_max = tile_max > old_max ? tile_max : old_max;
    state.row_max[i] = new_max;
    shifts[i] = new_max > Real(-INFINITY) ? new_max : Real(0);
    if (new_max > old_max && old_max > Real(-INFINITY)) {
      const V rescale = exp2(V(old_max - new_max));
      Real* sum = state.row_sum + i * kN;
      (V::load(sum) * rescale).store(sum);
      for (int d = 0; d < out_cols; d += kN) {
        Real* out = state.out + i * state.out_stride + d;
        (V::load(out) * rescale).store(out);
      }
    }
  }
  const V scale(factor);
  const auto weight = [&](const Real* score, V shift) __attribute__((always_inline)) {
    const V s = V::load(score);
    return exp2(s * scale - shift);
  };
  const auto store = [&](int row, int col, V a, V b) __attribute__((always_inline)) { store_pair(a, b, probs + row * stride / kUnitSize<Unit>, col); };
  if constexpr (kDrop && sizeof(Real) == 4) {
    if (drop.in_registers) {
      for (int i = 0; i < rows; i += 2) {  // row i + 1 may not exist; there is room for it
        const auto counters = drop.dropout->row(drop.query + i);
        const V shift[2] = {V(shifts[i]), V(shifts[i + 1])};
        V sum[2][2];
        for (int r = 0; r < 2; r++) sum[r][0] = V::load(state.row_sum + (i + r) * kN), sum[r][1] = V(Real(0));
        for (int j = 0; j < cols; j += 2 * kN) {
          Bits bits[2][2];
          drop.dropout->pair_bits(drop.group + j / (2 * kN), counters, bits);
#pragma GCC unroll 2
          for (int r = 0; r < 2; r++) {
            const Real* row = scores + (i + r) * stride + j;
            const V p0 = weight(row, shift[r]), p1 = weight(row + kN, shift[r]);
            add_weights<Unit>(p0, p1, sum[r][0], sum[r][1]);
            store(i + r, j, drop.dropout->keep(p0, bits[r][0]), drop.dropout->keep(p1, bits[r][1]));
          }
        }
        for (int r = 0; r < 2; r++) (sum[r][0] + sum[r][1]).store(state.row_sum + (i + r) * kN);
      }
      return;
    }
  }
  for (int i = 0; i < rows; i++) {
    const Real* row = scores + i * stride;
    const V shift(shifts[i]);
    V sum0 = V::load(state.row_sum + i * kN), sum1(Real(0));
    for (int j = 0; j < cols; j += 2 * kN) {
      V p0 = weight(row + j, shift), p1 = weight(row + j + kN, shift);
      add_weights<Unit>(p0, p1, sum0, sum1);
      if (kDrop) p0 = drop.dropout->keep(p0, drop.bits[i] + j), p1 = drop.dropout->keep(p1, drop.bits[i] + j + kN);
      store(i, j, p0, p1);
    }
    (sum0 + sum1).store(state.row_sum + i * kN);
  }
}

template <class Real>
ALWAYS_INLINE bool saw_no_key(Real row_max, const Real* row_sum) {
  return row_max == Real(-INFINITY) && reduce_add(NativeVec<Real>::load(row_sum)) == Real(0);
}

// Adds part b to part a, one row each. A row that saw no key changes nothing.
template <class Real>
ALWAYS_INLINE void merge_row(const RowState<Real>& a, const RowState<Real>& b, int cols) {
  using V = NativeVec<Real>;
  if (saw_no_key(*b.row_max, b.row_sum)) return;
  if (saw_no_key(*a.row_max, a.row_sum)) {
    *a.row_max = *b.row_max;
    V::load(b.row_sum).store(a.row_sum);
    for (int d = 0; d < cols; d += V::kLanes) V::load(b.out + d).store(a.out + d);
    return;
  }
  const Real top = *a.row_max > *b.row_max ? *a.row_max : *b.row_max;
  const V scale_a = *a.row_max == top ? V(Real(1)) : exp2(V(*a.row_max - top)), scale_b = *b.row_max == top ? V(Real(1)) : exp2(V(*b.row_max - top));
  (V::load(a.row_sum) * scale_a + V::load(b.row_sum) * scale_b).store(a.row_sum);
  for (int d = 0; d < cols; d += V::kLanes) (V::load(a.out + d) * scale_a + V::load(b.out + d) * scale_b).store(a.out + d);
  *a.row_max = top;
}

// lse in log2 units; one that is finite stays finite.
template <class Real>
ALWAYS_INLINE Real in_log2_units(Real lse) {
  const Real x = Real(lse * kLog2e);
  return lse - lse == 0 && x - x != 0 ? (lse < 0 ? kLowestReal<Real> : -kLowestReal<Real>) : x;
}

// What the rounding in in_log2_units() took; 0 for double, infinities and NaN.
template <class Real>
ALWAYS_INLINE Real lost_in_log2_units(Real lse, Real rounded) {
  const Real lost = Real(double(lse) * kLog2e - double(rounded));
  return lost > -1 && lost < 1 ? lost : Real(0);
}

// exp2(score - lse) is as inexact as lse, whose last bit grows with its size. A row of large scores is normalised again from its own maximum
// and sum: where what lse has lost would show beside the rounding of a score, and for 16 bit beside that of a weight. T: the element.
template <class T, class Real>
ALWAYS_INLINE bool lse_is_coarse(Real lse_log2) {
  const Real limit = sizeof(T) == 2 ? Real(1024) : Real(64);
  return (lse_log2 > limit || lse_log2 < -limit) && lse_log2 - lse_log2 == 0;
}

// The sink, in log2 units: one more term of the sum, without a value.
template <class Real>
inline void add_sink(Real sink, Real& row_max, Real* row_sum, Real* out, int cols) {
  using V = NativeVec<Real>;
  if (sink == Real(-INFINITY)) return;
  const bool empty = saw_no_key(row_max, row_sum);
  const Real top = row_max > sink ? row_max : sink;
  const V scale = row_max == top ? V(Real(1)) : exp2(V(row_max - top)), sink_weight = exp2(V(sink - top));
  if (empty) memset(out, 0, cols * sizeof(Real));
  V sum = V::load(row_sum) * scale;
  sum.v[0] += sink_weight.v[0];
  sum.store(row_sum);
  for (int d = 0; d < cols; d += V::kLanes) (V::load(out + d) * scale).store(out + d);
  row_max = top;
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
