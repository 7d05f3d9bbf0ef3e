#pragma once
// Rows of linear attention on their way in and out: feature maps and their gradients, masks, decays.

#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Rows of a register block. Fewer than for exact attention on AVX-512: head_dim 64 and 128 divide by 8, and less is computed
// above the diagonal.
#ifndef LINEAR_ROWS
#define LINEAR_ROWS (kVectorBytes == 64 ? 8 : 6)
#endif
constexpr int kLinearRows = LINEAR_ROWS;

// e^x over the whole range of Real: subnormal results, inf above, NaN stays NaN. Relative error 1.5e-7 where the result is
// normal (degree 6 through Chebyshev nodes; Taylor in double). e^x = 2^n e^(x - n ln 2), with 2^n in two factors, since n itself may lie outside the exponents of Real.
template <int N>
ALWAYS_INLINE Vec<float, N> exp(Vec<float, N> x) {
  using V = Vec<float, N>;
  x = max(V(-104.0f), x);
  x = x.v > V(89.0f).v ? V(89.0f).v : x.v;
  const V magic(0x1.8p23f), shifted = multiply_add(x, V(1.44269504f), magic), n = shifted - magic;
  const V r = multiply_add(n, V(-1.42860682e-6f), multiply_add(n, V(-0.693145752f), x));
  V p(0.00139336521f);
  p = multiply_add(p, r, V(0.00836317986f));
  p = multiply_add(p, r, V(0.0416664667f));
  p = multiply_add(p, r, V(0.166665763f));
  p = multiply_add(p, r, V(0.5f));
  p = multiply_add(p, r, V(1.0f));
  p = multiply_add(p, r, V(1.0f));
  const auto exponent = bit_cast<int>(shifted).v - bit_cast<int>(magic).v, half = exponent >> 1;
  const V low = bit_cast<float>(Vec<int, N>((half + 127) << 23)), high = bit_cast<float>(Vec<int, N>((exponent - half + 127) << 23));
  return p * low * high;
}
template <int N>
ALWAYS_INLINE Vec<double, N> exp(Vec<double, N> x) {
  using V = Vec<double, N>;
  x = max(V(-746.0), x);
  x = x.v > V(710.0).v ? V(710.0).v : x.v;
  const V magic(0x1.8p52), shifted = multiply_add(x, V(1.4426950408889634), magic), n = shifted - magic;
  const V r = multiply_add(n, V(-1.90821492927058770002e-10), multiply_add(n, V(-6.93147180369123816490e-01), x));
  V p(1.0 / 6227020800.0);
  constexpr double c[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                          1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1.0,         1.0};
  for (double coefficient : c) p = multiply_add(p, r, V(coefficient));
  const auto exponent = bit_cast<int64_t>(shifted).v - bit_cast<int64_t>(magic).v, half = exponent >> 1;
  const V low = bit_cast<double>(Vec<int64_t, N>((half + 1023) << 52)), high = bit_cast<double>(Vec<int64_t, N>((exponent - half + 1023) << 52));
  return p * low * high;
}

template <FeatureMap kMap, class V>
ALWAYS_INLINE V feature(V x) {
  using Real = decltype(V::v[0] + 0);
  // Below 0 elu(x) + 1 is e^x: computed as such it does not round to zero.
  if constexpr (kMap == FeatureMap::kEluPlusOne) return x.v > Real(0) ? (x + V(Real(1))).v : exp(x).v;
  else if constexpr (kMap == FeatureMap::kRelu) return max(V(Real(0)), x);
  else if constexpr (kMap == FeatureMap::kExp) return exp(x);
  else return x;
}
// From the value of the map, not from its argument: no second exponential.
template <FeatureMap kMap, class V>
ALWAYS_INLINE V feature_slope(V y) {
  using Real = decltype(V::v[0] + 0);
  if constexpr (kMap == FeatureMap::kEluPlusOne) return y.v > Real(1) ? V(Real(1)).v : y.v;
  else if constexpr (kMap == FeatureMap::kRelu) return y.v > Real(0) ? V(Real(1)).v : V(Real(0)).v;
  else if constexpr (kMap == FeatureMap::kExp) return y;
  else return V(Real(1));
}
template <FeatureMap kValue> struct FeatureConstant {
  static constexpr FeatureMap value = kValue;
};
template <class F>
ALWAYS_INLINE auto with_feature(FeatureMap map, const F& f) {
  switch (map) {
    case FeatureMap::kEluPlusOne: return f(FeatureConstant<FeatureMap::kEluPlusOne>());
    case FeatureMap::kRelu: return f(FeatureConstant<FeatureMap::kRelu>());
    case FeatureMap::kExp: return f(FeatureConstant<FeatureMap::kExp>());
    default: return f(FeatureConstant<FeatureMap::kIdentity>());
  }
}

// Elements [d, d + kLanes) of a row with strided columns; zeros from `count` on.
template <class T>
ALWAYS_INLINE NativeVec<ComputeType<T>> load_strided(const T* row, int64_t col_stride, int d, int count) {
  if (col_stride == 1) return load_converted(row + d, count - d);
  T buffer[kLanes<ComputeType<T>>] = {};
  for (int k = 0; k < kLanes<ComputeType<T>> && d + k < count; k++) buffer[k] = row[(d + k) * col_stride];
  return load_converted(buffer);
}
// The same the other way.
template <class T>
ALWAYS_INLINE void store_strided(NativeVec<ComputeType<T>> x, T* row, int64_t col_stride, int d, int count) {
  if (col_stride == 1) return store_converted(x, row + d, count - d);
  T buffer[kLanes<ComputeType<T>>];
  store_converted(x, buffer);
  for (int k = 0; k < kLanes<ComputeType<T>> && d + k < count; k++) row[(d + k) * col_stride] = buffer[k];
}

// x as it is rounded: the compiler must not fuse the product that made it with a sum.
template <class T, int N>
ALWAYS_INLINE Vec<T, N> rounded(Vec<T, N> x) {
#if defined(__x86_64__)
  asm("" : "+v"(x.v));
#elif defined(__aarch64__)
  asm("" : "+w"(x.v));
#endif
  return x;
}

template <class T, int N>
ALWAYS_INLINE bool is_zero(Vec<T, N> x) {
  for (int i = 0; i < N; i++)
    if (!(x.v[i] == 0)) return false;
  return true;
}

// dst[row] = map(src[row]), zeros behind `cols` up to a whole vector, whole rows of zeros where the mask is 0; the mask may
// be null. Returns whether all of dst is finite.
template <FeatureMap kMap, class T, class Real>
bool feature_rows(const Matrix<const T>& src, int rows, int cols, const uint8_t* mask, Real* dst, int dst_stride, const Ahead& ahead) {
  using V = NativeVec<Real>;
  V check(Real(0));
  const T* from = src.data;
  for (int row = 0; row < rows; row++, from += src.row_stride, dst += dst_stride) {
    ahead.fetch(row, row + 1);
    if (mask && !mask[row]) {
      for (int d = 0; d < cols; d += V::kLanes) V(Real(0)).store(dst + d);
      continue;
    }
    int d = 0;
#pragma GCC unroll 4
    for (; d + V::kLanes <= cols; d += V::kLanes) {
      const V y = feature<kMap>(load_converted(from + d));
      y.store(dst + d);
      check = check + (y - y);
    }
    if (d < cols) {
      const V y = keep_lanes(feature<kMap>(load_converted(from + d, cols - d)), 0, cols - d, V(Real(0)));
      y.store(dst + d);
      check = check + (y - y);
    }
  }
  return is_zero(check);
}
template <class T, class Real>
bool feature_rows(FeatureMap map, const Matrix<const T>& src, int rows, int cols, const uint8_t* mask, Real* dst, int dst_stride,
                  const Ahead& ahead = Ahead()) {
  return with_feature(map, [&](auto kind) { return feature_rows<decltype(kind)::value>(src, rows, cols, mask, dst, dst_stride, ahead); });
}

// to[row] = slope(y[row]) grad[row], zeros where the mask is 0; from row `begin` of `to` on.
template <class T, class Real>
void store_feature_grad(FeatureMap map, const Real* grad, int grad_stride, const Real* y, int y_stride, int rows, int cols, const uint8_t* mask,
                        const Matrix<T>& to, int64_t begin) {
  using V = NativeVec<Real>;
  with_feature(map, [&](auto kind) {
    for (int i = 0; i < rows; i++) {
      T* row = to.row(begin + i);
      for (int d = 0; d < cols; d += V::kLanes) {
        const V slope = feature_slope<decltype(kind)::value>(V::load(y + i * y_stride + d));
        const V x = mask && !mask[i] ? V(Real(0)) : V::load(grad + i * grad_stride + d) * slope;
        store_strided(x, row, to.col_stride, d, cols);
      }
    }
  });
}

// Rows of the next chunk, a few at each step of this one: all at once they wait for each other and nothing is gained. Rows that are
// only written are asked for as well: a store to memory reads the line first.
enum class Access { Read, Write };
template <Access kAccess, class T>
ALWAYS_INLINE void prefetch_rows(const Matrix<T>& m, int64_t begin, int rows, int cols) {
  if (!m.data || m.col_stride != 1) return;
  for (int i = 0; i < rows; i++)
    for (int d = 0; d < cols; d += 64 / int(sizeof(T))) __builtin_prefetch(m.row(begin + i) + d, kAccess == Access::Write, 2);
}

// A factor of exactly zero forgets even what is not finite.
template <class Real>
ALWAYS_INLINE void scale_row(const Real* src, Real factor, int64_t cols, Real* dst) {
  using V = NativeVec<Real>;
  for (int64_t d = 0; d < cols; d += V::kLanes) (factor == 0 ? V(Real(0)) : V::load(src + d) * V(factor)).store(dst + d);
}
template <class Real>
ALWAYS_INLINE Real dot(const Real* a, const Real* b, int64_t cols) {
  using V = NativeVec<Real>;
  V sum(Real(0));
  for (int64_t d = 0; d < cols; d += V::kLanes) sum = multiply_add(V::load(a + d), V::load(b + d), sum);
  return reduce_add(sum);
}
template <class Real>
ALWAYS_INLINE void add_row(const Real* a, Real factor, int cols, Real* to) {
  using V = NativeVec<Real>;
  for (int d = 0; d < cols; d += V::kLanes) multiply_add(V::load(a + d), V(factor), V::load(to + d)).store(to + d);
}

// to += sum over rows of factors[row] row; null factors are 1. The rows are summed before they are added, as products are.
template <class Real>
inline void add_rows(const Real* from, int stride, const Real* factors, int rows, int cols, Real* to) {
  using V = NativeVec<Real>;
  for (int d = 0; d < cols; d += V::kLanes) {
    V sum(Real(0));
    for (int i = 0; i < rows; i++) {
      const V x = V::load(from + i * stride + d);
      sum = factors ? multiply_add(x, V(factors[i]), sum) : sum + x;
    }
    (sum + V::load(to + d)).store(to + d);
  }
}

// out = numerator / denominator: exactly 1 where they are equal, 0 where the denominator is 0. Not normalized: scale * numerator.
template <class Real>
struct Quotient {
  using V = NativeVec<Real>;
#if defined(__FMA__)
  static constexpr bool kFma = true;
#else
  static constexpr bool kFma = false;
#endif
  enum { kMultiply, kCorrect, kDivide, kZero } mode;
  V factor, denominator;
  Quotient(bool normalize, Real denominator, Real scale) : factor(normalize ? 1 / denominator : scale), denominator(denominator) {
    const Real inverse = factor.v[0];
    // Where the inverse is not finite, x times it is not the quotient.
    mode = !normalize ? kMultiply : denominator == 0 ? kZero : kFma && inverse - inverse == 0 ? kCorrect : kDivide;
  }
  ALWAYS_INLINE V of(V x) const {
    if (mode == kZero) return V(Real(0));
    if (mode == kDivide) return x / denominator;
    const V y = x * factor;
    if (mode == kMultiply) return y;
    // One step of Newton: the remainder is exact, so that the quotient is right but for rare last bits.
    const V corrected = multiply_add(x - y * denominator, factor, y);
    return corrected.v == corrected.v ? corrected.v : y.v;
  }
};

// One kv head of one batch item: where its tokens lie.
template <class T>
struct LinearHead {
  using Real = ComputeType<T>;
  const LinearAttentionParams* p;
  int64_t batch, head_kv;
  Matrix<const T> key, value;
  Matrix<const uint8_t> mask;
  Matrix<const Real> log_decay;

  LinearHead(const LinearAttentionParams& params, int64_t item) : p(&params), batch(item / params.num_heads_kv), head_kv(item % params.num_heads_kv) {
    key = rows<const T>(params.key);
    value = rows<const T>(params.value);
    mask = rows<const uint8_t>(params.key_mask);
    log_decay = rows<const Real>(params.log_decay);
  }
  int64_t group() const { return p->num_heads / p->num_heads_kv; }
  // Rows [begin, begin + rows) of a matrix of `seqlen` rows, to be read next.
  template <class Element>
  static Ahead ahead(const Matrix<const Element>& m, int64_t begin, int rows, int64_t seqlen, int cols) {
    return Ahead::of(m, begin, int(min_of(int64_t(rows), seqlen - begin)), cols);
  }
  // Of the kv head, and of query head `i` of its group; null where the tensor is absent.
  template <class Element>
  Matrix<Element> rows(const TensorView& view) const {
    return view.data ? matrix<Element>(*p, view, batch, head_kv) : Matrix<Element>{};
  }
  template <class Element>
  Matrix<Element> query_rows(const TensorView& view, int64_t i) const {
    return view.data ? matrix<Element>(*p, view, batch, head_kv * group() + i) : Matrix<Element>{};
  }
  const Real* state_at(const void* states, int64_t size) const { return states ? (const Real*)states + (batch * p->num_heads_kv + head_kv) * size : nullptr; }
  Real* state_at(void* states, int64_t size) const { return (Real*)state_at((const void*)states, size); }

  // Mask of tokens [begin, begin + rows), one after the other; null where there is none.
  const uint8_t* mask_rows(int64_t begin, int rows, uint8_t* temp) const {
    if (!mask.data) return nullptr;
    for (int i = 0; i < rows; i++) temp[i] = mask.data[(begin + i) * mask.col_stride];
    return temp;
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
