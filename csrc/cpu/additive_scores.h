#pragma once
// Scores w . tanh(q + k) of additive attention without a hyperbolic function per pair. With u = e^2x and v = e^2y
//
//   tanh(x + y) = N / (N + 1),   N = (uv - 1) / 2
//
// The exponentials belong to a row each. uv - 1 by itself is exact beside 1 only; from u - 1 and v - 1, made without cancellation, it is exact
// beside its own size where x and y are small:
//
//   uv - 1 = (u - 1) v + (v - 1)   for v <= 1,   = (u - 1) + u (v - 1)   for v > 1
//
// Neither multiplies the rounding of u - 1 or v - 1 by more than 1, and both are (u - 1) P + (u Q + R) with P = min(v, 1), Q = max(v - 1, 0),
// R = min(v - 1, 0). Four columns of a pair share one division, so a pair costs 5 multiply-adds and a quarter of a division per column;
// docs/kernels/additive_attention.md has the derivation and the bounds. What the formula cannot hold (|x| too large for an exponential,
// infinities, NaN) is marked per row and per key and goes the direct way, pair by pair: the score of a pair depends on its own row and key
// alone, never on what else stands in the tile.

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
  static constexpr Real kSum = kDouble ? 88 : Real(10.5);               // x + y up to here: N <= kCap
  static constexpr Real kCap = kDouble ? Real(0x1p254) : Real(0x1p30);  // the product of four is finite, and N / (N + 1) rounds to 1
};

// e^2x and e^2x - 1, each within a unit of its own last place.
template <class Real>
struct Exponential {
  NativeVec<Real> value, less_one;
};

constexpr double inverse_factorial(int k) { return k < 2 ? 1.0 : inverse_factorial(k - 1) / k; }

// For |x| <= kArgument. With n = round(2x / ln 2) the rest f = 2x - n ln 2 is exact but for its own rounding, and is 2x where that is small;
// e^f - 1 = f + f^2 (1/2! + f/3! + ...).
template <class Real>
ALWAYS_INLINE Exponential<Real> double_exponential(NativeVec<Real> x) {
  using V = NativeVec<Real>;
  constexpr bool kDouble = sizeof(Real) == 8;
  constexpr double kHigh = kDouble ? 381061692392.0 / 1099511627776.0 : 45426.0 / 131072.0;
  constexpr double kLow = kDouble ? 8.2329747914485406404922153775e-13 : 7.1430341015470861607072908828e-7;
  constexpr int kMantissa = kDouble ? 52 : 23, kTerms = kDouble ? 12 : 7;
  const V magic(kDouble ? Real(0x1.8p52) : Real(0x1.8p23)), one(Real(1));
  const V shifted = multiply_add(x, V(Real(2.8853900817779268)), magic), n = shifted - magic;
  const V half = (x - n * V(Real(kHigh))) - n * V(Real(kLow)), f = half + half;
  V series(Real(inverse_factorial(kTerms + 1)));
#pragma GCC unroll 12
  for (int k = kTerms; k >= 2; k--) series = multiply_add(series, f, V(Real(inverse_factorial(k))));
  const V e = multiply_add(f * f, series, f), power = typename V::Native(bit_cast_int(one) + (bit_cast_int(shifted) << kMantissa));
  return {multiply_add(e, power, power), multiply_add(e, power, power - one)};
}

// What the exponentials of some rows have met.
template <class Real>
struct ExponentialRange {
  using V = NativeVec<Real>;
  V top = V(-AdditiveRange<Real>::kArgument);            // the largest argument
  V worst = V(Real(0));                                  // of a lane: 1 where an argument was out of range, since the last clear
  ALWAYS_INLINE void clear() { worst = V(Real(0)); }
  ALWAYS_INLINE Exponential<Real> add(V x) {
    const V limit(AdditiveRange<Real>::kArgument), magnitude = abs(x);
    const V inside = magnitude.v <= limit.v ? x.v : V(Real(0)).v;  // NaN is outside
    worst = magnitude.v <= limit.v ? worst.v : V(Real(1)).v;
    top = max(top, inside);
    return double_exponential<Real>(inside);
  }
};

// score_weight of one head.
template <class Real>
struct ScoreWeight {
  using V = NativeVec<Real>;
  int head_dim, slots;  // slots: whole quads
  const Real* weight;   // [head_dim]
  Real* scaled;         // [slots] weight / scale, between -2 and 2; 0 behind the last column
  Real scale;           // a power of two
  bool finite, large;   // large: scores may be so large that log2(e) times a score, rounded, is off by more than 1

  static int slots_of(int64_t head_dim) { return round_up(int(head_dim), kQuad); }
  // u - 1 of a row, then u.
  static int row_stride_of(int64_t head_dim) { return 2 * round_up(slots_of(head_dim), V::kLanes); }
  static ScoreWeight take(int64_t head_dim, Scratch& scratch) {
    ScoreWeight w;
    w.head_dim = int(head_dim), w.slots = slots_of(head_dim), w.weight = nullptr, w.scale = 1, w.finite = true, w.large = false;
    w.scaled = scratch.take<Real>(w.slots);
    return w;
  }
  void set(const Real* from) {
    weight = from, finite = true;
    V largest(sizeof(Real) == 8 ? Real(0x1p-1022) : Real(0x1p-126));
    for (int d = 0; d < head_dim; d++) {
      finite = finite && from[d] - from[d] == 0;
      largest = max(largest, abs(V(from[d])));
    }
    const V exponent = typename V::Native(bit_cast_int(largest) & bit_cast_int(V(Real(INFINITY))));
    scale = finite ? exponent.v[0] : Real(1);
    large = !finite || scale > Real(sizeof(Real) == 8 ? 0x1p52 : 0x1p23) / head_dim;
    for (int s = 0; s < slots; s++) scaled[s] = s < head_dim && finite ? from[s] / scale : Real(0);
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

// Exponentials of rows as they are broadcast: to[row][row_stride]. Marks the rows that are out of range.
template <class T, class Real>
void pack_exponential_rows(const ScoreWeight<Real>& weight, const Matrix<const T>& m, int rows, Real* to, bool* marked, Real* top) {
  using V = NativeVec<Real>;
  const int stride = ScoreWeight<Real>::row_stride_of(weight.head_dim);
  ExponentialRange<Real> range;
  for (int i = 0; i < rows; i++, to += stride) {
    range.clear();
    for (int d = 0; d < weight.slots; d += V::kLanes) {
      T temp[V::kLanes];
      const int count = min_of(V::kLanes, weight.head_dim - d);
      const auto e = range.add(load_converted(adjacent_elements(m.row(i), m.col_stride, d, d + count, temp), count));
      e.less_one.store(to + d), e.value.store(to + stride / 2 + d);
    }
    marked[i] = reduce_max(range.worst) > 0;
  }
  *top = reduce_max(range.top);
}

// P / 2, Q / 2 and R / 2 of keys in panels, keys in the lanes: to[panel][slots][kKeyParts][kPanel]. Marks the keys that are out of range; `raw`
// [head_dim][kPanel].
constexpr int kKeyParts = 3;
template <class T, class Real>
void pack_exponential_keys(const ScoreWeight<Real>& weight, const T* key, int64_t row_stride, int keys, Real* to, bool* marked, Real* raw, Real* top) {
  using V = NativeVec<Real>;
  constexpr int P = kPanel<Real>;
  const V zero(Real(0)), one(Real(1)), half(Real(0.5));
  ExponentialRange<Real> range;
  for (int j = 0; j < keys; j += P, to += weight.slots * kKeyParts * P) {
    const int count = min_of(P, keys - j);
    pack_transposed(key + j * row_stride, row_stride, count, weight.head_dim, raw, int64_t(weight.head_dim) * P);
    for (int lane = 0; lane < P; lane += V::kLanes) {
      range.clear();
      for (int s = 0; s < weight.slots; s++) {
        const auto e = range.add(s < weight.head_dim ? V::load(raw + s * P + lane) : zero);
        Real* const parts = to + s * kKeyParts * P + lane;
        (half * V(e.value.v < one.v ? e.value.v : one.v)).store(parts);
        (half * max(e.less_one, zero)).store(parts + P);
        (half * V(e.less_one.v < zero.v ? e.less_one.v : zero.v)).store(parts + 2 * P);
      }
      for (int k = 0; k < V::kLanes && lane + k < count; k++) marked[j + lane + k] = range.worst.v[k] > 0;
    }
  }
  *top = reduce_max(range.top);
}

// N of one column of a row and a vector of keys.
template <bool kCap, class Real>
ALWAYS_INLINE NativeVec<Real> half_excess(Real less_one, Real value, const Real* key) {
  using V = NativeVec<Real>;
  constexpr int P = kPanel<Real>;
  const V n = multiply_add(V(less_one), V::load(key), multiply_add(V(value), V::load(key + P), V::load(key + 2 * P))), cap(AdditiveRange<Real>::kCap);
  return kCap ? V(n.v < cap.v ? n.v : cap.v) : n;
}

// scores[i][0 .. kLanes) of kRows rows and one vector of keys. Divides once per quad; with D = N + 1 and n = w N,
//   sum_k n_k / D_k = ((n_0 D_1 + n_1 D_0) D_2 D_3 + (n_2 D_3 + n_3 D_2) D_0 D_1) / (D_0 D_1 D_2 D_3)
template <int kRows, bool kCap, class Real>
__attribute__((noinline)) void additive_score_vector(int rows, const ScoreWeight<Real>& weight, const Real* query, int query_stride, const Real* key,
                                                     Real* scores, int stride) {
  using V = NativeVec<Real>;
  if constexpr (kRows > 1)
    if (rows < kRows) return additive_score_vector<kRows - 1, kCap>(rows, weight, query, query_stride, key, scores, stride);
  const V one(Real(1));
  V sum[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) sum[i] = V(Real(0));
#pragma GCC unroll 1
  for (int s = 0; s < weight.slots; s += kQuad, key += kQuad * kKeyParts * kPanel<Real>, query += kQuad) {
    const Real* const w = weight.scaled + s;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; i++) {
      V n[kQuad], d[kQuad];
#pragma GCC unroll 4
      for (int c = 0; c < kQuad; c++) {
        const Real* const q = query + i * query_stride + c;
        n[c] = half_excess<kCap>(q[0], q[query_stride / 2], key + c * kKeyParts * kPanel<Real>), d[c] = n[c] + one, n[c] = n[c] * V(w[c]);
      }
      const V low = d[0] * d[1], high = d[2] * d[3];
      const V numerator_low = multiply_add(n[0], d[1], n[1] * d[0]), numerator_high = multiply_add(n[2], d[3], n[3] * d[2]);
      sum[i] = sum[i] + multiply_add(numerator_low, high, numerator_high * low) / (low * high);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; i++) (sum[i] * V(weight.scale)).store(scores + i * stride);
}

// scores[rows][cols] of packed rows and panels of keys; cols in whole vectors. `cap`: some N may exceed AdditiveRange::kCap.
template <class Real>
void additive_scores(int rows, int cols, bool cap, const ScoreWeight<Real>& weight, const Real* query, const Real* key, Real* scores, int stride) {
  constexpr int kRows = 4, kN = kLanes<Real>, P = kPanel<Real>;
  const int query_stride = ScoreWeight<Real>::row_stride_of(weight.head_dim);
  for (int j = 0; j < cols; j += kN) {
    const Real* panel = key + int64_t(j / P) * weight.slots * kKeyParts * P + j % P;
    for (int i = 0; i < rows; i += kRows) {
      const Real* q = query + int64_t(i) * query_stride;
      Real* to = scores + int64_t(i) * stride + j;
      if (cap) additive_score_vector<kRows, true>(rows - i, weight, q, query_stride, panel, to, stride);
      else additive_score_vector<kRows, false>(rows - i, weight, q, query_stride, panel, to, stride);
    }
  }
}

// The softmax multiplies scores by `factor` and subtracts the largest product in one multiply-add. Of large scores that would leave the rounding
// of the largest product, which may be larger than any exponent: those are multiplied here, rounded, and what is finite stays finite. Returns
// what the scores are still to be multiplied by.
template <class Real>
Real scale_large(const ScoreWeight<Real>& weight, int rows, int cols, Real factor, Real* scores, int stride) {
  using V = NativeVec<Real>;
  if (!weight.large) return factor;
  const V largest(-kLowestReal<Real>), lowest(kLowestReal<Real>);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j += V::kLanes) {
      const V score = V::load(scores + i * stride + j), x = score * V(factor), above = x.v > largest.v ? largest.v : x.v;
      const V bounded = above.v < lowest.v ? lowest.v : above.v, magnitude = abs(score);
      V(magnitude.v <= largest.v ? bounded.v : x.v).store(scores + i * stride + j);
    }
  return Real(1);
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
