#pragma once
// Scores w . tanh(q + k) of additive attention without a hyperbolic function per pair:
//
//   tanh(x + y) = 1 - 1 / P,   P = 1/2 + e^2x (e^2y / 2)
//
// The exponentials belong to a row each. Four columns of a pair share one division, so a pair costs 3.5 multiply-adds and a quarter of a
// division per column; docs/kernels/additive_attention.md has the derivation and the bounds. What the formula cannot hold (|x| too large for
// an exponential, infinities, NaN) is marked per row and per key and goes the direct way, pair by pair: the score of a pair depends on its own
// row and key alone, never on what else stands in the tile.

#include "pack.h"
#include "score_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Columns that share one division.
constexpr int kQuad = 4;

template <class Real>
struct AdditiveRange {
  static constexpr bool kDouble = sizeof(Real) == 8;
  static constexpr Real kArgument = kDouble ? 350 : 40;                 // |x| up to here: e^2x is a normal number
  static constexpr Real kSum = kDouble ? 88 : 11;                       // x + y up to here: P <= kCap
  static constexpr Real kCap = kDouble ? Real(0x1p255) : Real(0x1p31);  // the product of four is finite, and 1 / kCap rounds to 0 beside 1
};

// e^2x, halved with kHalf, for |x| <= kArgument: relative error 2e-7 (4e-16 in double), also without FMA. With n = round(2x / ln 2) the
// rest x - n ln 2 / 2 is exact but for its own rounding.
template <bool kHalf, class Real, int N>
ALWAYS_INLINE Vec<Real, N> double_exponential(Vec<Real, N> x) {
  using V = Vec<Real, N>;
  constexpr bool kDouble = sizeof(Real) == 8;
  constexpr double kHigh = kDouble ? 381061692392.0 / 1099511627776.0 : 45426.0 / 131072.0;
  constexpr double kLow = kDouble ? 8.2329747914485406404922153775e-13 : 7.1430341015470861606072908828e-7;
  constexpr int kMantissa = kDouble ? 52 : 23;
  const V magic(kDouble ? Real(0x1.8p52) : Real(0x1.8p23)), to_log2(Real(2.8853900817779268));
  const V shifted = multiply_add(x, to_log2, magic), n = shifted - magic;
  const V rest = (x - n * V(Real(kHigh))) - n * V(Real(kLow));
  const auto exponent = (bit_cast_int(shifted) - (kHalf ? 1 : 0)) << kMantissa;
  return typename V::Native(bit_cast_int(exp2(rest * to_log2)) + exponent);
}

// What the exponentials of some rows have met.
template <class Real>
struct ExponentialRange {
  using V = NativeVec<Real>;
  V top = V(-AdditiveRange<Real>::kArgument);            // the largest argument
  V worst = V(Real(0));                                  // of a lane: 1 where an argument was out of range, since the last clear
  ALWAYS_INLINE void clear() { worst = V(Real(0)); }
  template <bool kHalf>
  ALWAYS_INLINE V add(V x) {
    const V limit(AdditiveRange<Real>::kArgument), magnitude = abs(x);
    const V inside = magnitude.v <= limit.v ? x.v : V(Real(0)).v;  // NaN is outside
    worst = magnitude.v <= limit.v ? worst.v : V(Real(1)).v;
    top = max(top, inside);
    return double_exponential<kHalf>(inside);
  }
};

// score_weight of one head, its columns in slots: quads, in each the largest weight first, zeros behind the last column.
template <class Real>
struct ScoreWeight {
  using V = NativeVec<Real>;
  struct Quad {
    Real largest, ratio[kQuad];  // weights over the largest, the first 1 or 0
    Real sum;                    // of the ratios
  };
  int head_dim, slots;
  const Real* weight;  // [head_dim]
  int* order;          // [slots] the column, -1: none
  Real* by_slot;       // [slots]
  Quad* quads;         // [slots / kQuad]
  bool finite;

  static int slots_of(int64_t head_dim) { return round_up(int(head_dim), kQuad); }
  static ScoreWeight take(int64_t head_dim, Scratch& scratch) {
    ScoreWeight w;
    w.head_dim = int(head_dim), w.slots = slots_of(head_dim), w.weight = nullptr, w.finite = true;
    w.order = scratch.take<int>(w.slots);
    w.by_slot = scratch.take<Real>(w.slots);
    w.quads = scratch.take<Quad>(w.slots / kQuad);
    return w;
  }
  void set(const Real* from) {
    weight = from, finite = true;
    for (int d = 0; d < head_dim; d++) finite = finite && from[d] - from[d] == 0;
    for (int s = 0; s < slots; s += kQuad) {
      int first = s;
      const auto size = [&](int d) { return d >= head_dim ? Real(-1) : from[d] < 0 ? -from[d] : from[d]; };
      for (int k = 0; k < kQuad; k++) {
        order[s + k] = s + k < head_dim ? s + k : -1;
        if (size(s + k) > size(first)) first = s + k;
      }
      order[s] = first < head_dim ? first : -1, order[first] = s < head_dim ? s : -1;
      Quad& quad = quads[s / kQuad];
      quad.sum = 0;
      for (int k = 0; k < kQuad; k++) {
        const Real w = by_slot[s + k] = order[s + k] < 0 ? Real(0) : from[order[s + k]];
        if (k == 0) quad.largest = w;
        quad.sum += quad.ratio[k] = quad.largest == 0 ? Real(0) : w / quad.largest;
      }
    }
  }

  // The score of one pair, however large its numbers are; q and k are rows with adjacent columns.
  template <class T>
  Real direct(const T* q, const T* k) const {
    V sum(Real(0));
    for (int d = 0; d < head_dim; d += V::kLanes) {
      const int count = min_of(V::kLanes, head_dim - d);
      sum = multiply_add(load_converted(weight + d, count), tanh(load_converted(q + d, count) + load_converted(k + d, count)), sum);
    }
    return reduce_add(sum);
  }
};

// Exponentials of rows as they are broadcast: to[row][slots]. Marks the rows that are out of range.
template <class T, class Real>
void pack_exponential_rows(const ScoreWeight<Real>& weight, const Matrix<const T>& m, int rows, Real* to, int stride, bool* marked, Real* temp, Real* top) {
  using V = NativeVec<Real>;
  ExponentialRange<Real> range;
  for (int i = 0; i < rows; i++) {
    range.clear();
    for (int s = 0; s < weight.slots; s++) {
      const T element[V::kLanes] = {weight.order[s] < 0 ? T() : m.row(i)[weight.order[s] * m.col_stride]};
      temp[s] = load_converted(element).v[0];
    }
    for (int s = weight.slots; s < round_up(weight.slots, V::kLanes); s++) temp[s] = 0;
    for (int s = 0; s < weight.slots; s += V::kLanes) range.template add<false>(V::load(temp + s)).store(to + int64_t(i) * stride + s);
    marked[i] = reduce_max(range.worst) > 0;
  }
  *top = reduce_max(range.top);
}

// Half exponentials of keys in panels, keys in the lanes: to[panel][slots][kPanel]. Marks the keys that are out of range; `raw` [head_dim][kPanel].
template <class T, class Real>
void pack_exponential_keys(const ScoreWeight<Real>& weight, const T* key, int64_t row_stride, int keys, Real* to, bool* marked, Real* raw, Real* top) {
  using V = NativeVec<Real>;
  constexpr int P = kPanel<Real>;
  ExponentialRange<Real> range;
  for (int j = 0; j < keys; j += P, to += weight.slots * P) {
    const int count = min_of(P, keys - j);
    pack_transposed(key + j * row_stride, row_stride, count, weight.head_dim, raw, int64_t(weight.head_dim) * P);
    for (int half = 0; half < P; half += V::kLanes) {
      range.clear();
      for (int s = 0; s < weight.slots; s++) {
        const V x = weight.order[s] < 0 ? V(Real(0)) : V::load(raw + weight.order[s] * P + half);
        range.template add<true>(x).store(to + s * P + half);
      }
      for (int k = 0; k < V::kLanes && half + k < count; k++) marked[j + half + k] = range.worst.v[k] > 0;
    }
  }
  *top = reduce_max(range.top);
}

template <bool kCap, class Real, int N>
ALWAYS_INLINE Vec<Real, N> half_denominator(Vec<Real, N> query, Vec<Real, N> key) {
  using V = Vec<Real, N>;
  const V p = multiply_add(query, key, V(Real(0.5))), cap(AdditiveRange<Real>::kCap);
  return kCap ? V(p.v < cap.v ? p.v : cap.v) : p;
}

// scores[i][0 .. kLanes) of kRows rows and one vector of keys. Divides once per quad:
//   sum_k ratio_k / P_k = ((P_2 + ratio_2 P_1) P_3 P_4 + (ratio_3 P_4 + ratio_4 P_3) P_1 P_2) / (P_1 P_2 P_3 P_4)
template <int kRows, bool kCap, class Real>
__attribute__((noinline)) void additive_score_vector(int rows, const ScoreWeight<Real>& weight, const Real* query, int query_stride, const Real* key,
                                                     Real* scores, int stride) {
  using V = NativeVec<Real>;
  if constexpr (kRows > 1)
    if (rows < kRows) return additive_score_vector<kRows - 1, kCap>(rows, weight, query, query_stride, key, scores, stride);
  V sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) sum[i] = V(Real(0));
#pragma GCC unroll 1
  for (int s = 0; s < weight.slots; s += kQuad, key += kQuad * kPanel<Real>, query += kQuad) {
    const auto& quad = weight.quads[s / kQuad];
    V k[kQuad];
#pragma GCC unroll 4
    for (int c = 0; c < kQuad; c++) k[c] = V::load(key + c * kPanel<Real>);
    const V ratio1(quad.ratio[1]), ratio2(quad.ratio[2]), ratio3(quad.ratio[3]), total(quad.sum), largest(quad.largest);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) {
      V p[kQuad];
#pragma GCC unroll 4
      for (int c = 0; c < kQuad; c++) p[c] = half_denominator<kCap>(V(query[i * query_stride + c]), k[c]);
      const V low = p[0] * p[1], high = p[2] * p[3];
      const V numerator_low = multiply_add(ratio1, p[0], p[1]), numerator_high = multiply_add(ratio2, p[3], ratio3 * p[2]);
      const V numerator = multiply_add(numerator_low, high, numerator_high * low);
      sum[i] = multiply_add(largest, total - numerator / (low * high), sum[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) sum[i].store(scores + i * stride);
}

// scores[rows][cols] of packed rows and panels of keys; cols in whole vectors. `cap`: some P may exceed AdditiveRange::kCap.
template <class Real>
void additive_scores(int rows, int cols, bool cap, const ScoreWeight<Real>& weight, const Real* query, int query_stride, const Real* key, Real* scores,
                     int stride) {
  constexpr int kRows = 4, kN = kLanes<Real>, P = kPanel<Real>;
  for (int j = 0; j < cols; j += kN) {
    const Real* panel = key + int64_t(j / P) * weight.slots * P + j % P;
    for (int i = 0; i < rows; i += kRows) {
      const Real* q = query + int64_t(i) * query_stride;
      Real* to = scores + int64_t(i) * stride + j;
      if (cap) additive_score_vector<kRows, true>(rows - i, weight, q, query_stride, panel, to, stride);
      else additive_score_vector<kRows, false>(rows - i, weight, q, query_stride, panel, to, stride);
    }
  }
}

// Elements of row `row` one after the other, as they are.
template <class T>
ALWAYS_INLINE const T* whole_row(const Matrix<const T>& m, int64_t row, int cols, T* temp) {
  return adjacent_elements(m.row(row), m.col_stride, 0, cols, temp);
}

// Calls f(row, key) for the visible pairs of a block that are out of range: those of marked rows and of marked keys. Keys count from `begin`,
// in `marked_keys` and in the ranges alike.
template <class Real, class F>
void for_each_marked_pair(const ScoreMods<Real>& mods, const TileRow* rows, const bool* marked_rows, int count, int begin, int end, const bool* marked_keys,
                          bool all, const F& f) {
  bool some = all;
  for (int i = 0; i < count; i++) some = some || marked_rows[i];
  if (!some && !memchr(marked_keys, 1, size_t(end - begin))) return;
  for (int i = 0; i < count; i++)
    for (int j = begin; j < end; j++)
      if ((all || marked_rows[i] || marked_keys[j - begin]) && mods.visible(rows[i], j)) f(i, j);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
