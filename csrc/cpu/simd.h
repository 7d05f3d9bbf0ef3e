#pragma once
// One SIMD vector type for every instruction set. Arithmetic, comparisons and shuffles are GCC/Clang vector extensions;
// only maximum, the 16-bit conversions and the bf16 dot product need intrinsics. No STL: the file is compiled once per
// instruction set, and nothing in it may be shared between the objects.

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include "../core/host_device.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace tiled_attention {
inline namespace KERNEL_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int N>
struct NativeVector {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

// A class, not a typedef: argument-dependent lookup must find exp2(Vec) and friends.
template <class T, int N>
struct Vec {
  using Native = typename NativeVector<T, N>::type;
  static constexpr int kLanes = N;
  Native v;

  Vec() = default;
  ALWAYS_INLINE Vec(Native native) : v(native) {}
  ALWAYS_INLINE Vec(T scalar) : v(scalar - Native{}) {}  // x - 0 is exactly x, so this compiles to a broadcast

  static ALWAYS_INLINE Vec load(const void* p) {
    Vec r;
    memcpy(&r.v, p, sizeof r.v);
    return r;
  }
  ALWAYS_INLINE void store(void* p) const { memcpy(p, &v, sizeof v); }
  static ALWAYS_INLINE Vec iota(T start) {
    Vec r;
    for (int i = 0; i < N; i++) r.v[i] = start + T(i);
    return r;
  }
  friend ALWAYS_INLINE Vec operator+(Vec a, Vec b) { return a.v + b.v; }
  friend ALWAYS_INLINE Vec operator-(Vec a, Vec b) { return a.v - b.v; }
  friend ALWAYS_INLINE Vec operator*(Vec a, Vec b) { return a.v * b.v; }
  friend ALWAYS_INLINE Vec operator/(Vec a, Vec b) { return a.v / b.v; }
};

template <class T>
using NativeVec = Vec<T, kVectorBytes / int(sizeof(T))>;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

// Two adjacent bf16 along the reduction dimension, one 32-bit lane. The operand of vdpbf16ps.
typedef uint32_t Bf16Pair;
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

template <class To, class From, int N>
ALWAYS_INLINE Vec<To, N> bit_cast(Vec<From, N> x) {
  return typename Vec<To, N>::Native(x.v);
}
template <class To, class From, int N>
ALWAYS_INLINE Vec<To, N> convert(Vec<From, N> x) {
  return __builtin_convertvector(x.v, typename Vec<To, N>::Native);
}

ALWAYS_INLINE Vec<int, kLanes<float>>::Native bit_cast_int(NativeVec<float> x) { return Vec<int, kLanes<float>>::Native(x.v); }
ALWAYS_INLINE Vec<int64_t, kLanes<double>>::Native bit_cast_int(NativeVec<double> x) { return Vec<int64_t, kLanes<double>>::Native(x.v); }

// ---- arithmetic ------------------------------------------------------------------------------------------------

// acc + a * b, one instruction where there is FMA (needs -ffp-contract=fast, the default of GCC).
template <class T, int N>
ALWAYS_INLINE Vec<T, N> multiply_add(Vec<T, N> a, Vec<T, N> b, Vec<T, N> acc) {
  return a.v * b.v + acc.v;
}

#if defined(__AVX512BF16__)
ALWAYS_INLINE Vec<float, 16> multiply_add(Vec<Bf16Pair, 16> a, Vec<Bf16Pair, 16> b, Vec<float, 16> acc) {
#ifdef __clang__  // 16 crashes where it sees a broadcast as bf16
  asm("" : "+v"(a.v));
#endif
  return (Vec<float, 16>::Native)_mm512_dpbf16_ps((__m512)acc.v, (__m512bh)a.v, (__m512bh)b.v);
}
#endif

template <int N>
ALWAYS_INLINE Vec<float, N> abs(Vec<float, N> x) {
  return (typename Vec<float, N>::Native)((typename Vec<int, N>::Native)x.v & 0x7fffffff);
}
template <int N>
ALWAYS_INLINE Vec<double, N> abs(Vec<double, N> x) {
  return (typename Vec<double, N>::Native)((typename Vec<int64_t, N>::Native)x.v & INT64_MAX);
}

// a > b ? a : b. When either is NaN the result is b, as in maxps.
template <class T, int N>
ALWAYS_INLINE Vec<T, N> max(Vec<T, N> a, Vec<T, N> b) {
  return a.v > b.v ? a.v : b.v;
}
#if defined(__SSE2__)
ALWAYS_INLINE Vec<float, 4> max(Vec<float, 4> a, Vec<float, 4> b) { return _mm_max_ps(a.v, b.v); }
#endif
#if defined(__AVX2__)
ALWAYS_INLINE Vec<float, 8> max(Vec<float, 8> a, Vec<float, 8> b) { return _mm256_max_ps(a.v, b.v); }
#endif
#if defined(__AVX512F__)
ALWAYS_INLINE Vec<float, 16> max(Vec<float, 16> a, Vec<float, 16> b) { return _mm512_max_ps(a.v, b.v); }
#endif

// The halves of x, for reductions: log2(N) steps, the same order for every width of the same N.
template <class T, int N>
ALWAYS_INLINE Vec<T, N / 2> low_half(Vec<T, N> x) {
  Vec<T, N / 2> r;
  memcpy(&r, &x, sizeof r);
  return r;
}
template <class T, int N>
ALWAYS_INLINE Vec<T, N / 2> high_half(Vec<T, N> x) {
  Vec<T, N / 2> r;
  memcpy(&r, (const char*)&x + sizeof r, sizeof r);
  return r;
}
template <class T, int N>
ALWAYS_INLINE T reduce_add(Vec<T, N> x) {
  if constexpr (N == 2) return x.v[0] + x.v[1];
  else return reduce_add(low_half(x) + high_half(x));
}
template <class T, int N>
ALWAYS_INLINE T reduce_max(Vec<T, N> x) {
  if constexpr (N == 2) return x.v[0] > x.v[1] ? x.v[0] : x.v[1];
  else return reduce_max(max(low_half(x), high_half(x)));
}

// Keeps x where begin <= lane < end, `other` elsewhere (a select: NaN and inf in x do not leak).
template <int N>
ALWAYS_INLINE Vec<float, N> keep_lanes(Vec<float, N> x, int begin, int end, Vec<float, N> other) {
  const auto lane = Vec<int, N>::iota(0);
  return ((lane.v >= begin) & (lane.v < end)) ? x.v : other.v;
}
template <int N>
ALWAYS_INLINE Vec<double, N> keep_lanes(Vec<double, N> x, int64_t begin, int64_t end, Vec<double, N> other) {
  const auto lane = Vec<int64_t, N>::iota(0);
  return ((lane.v >= begin) & (lane.v < end)) ? x.v : other.v;
}

// 2^x for x <= 127, relative error 1.5e-7; exactly 0 below -127, exactly 1 at 0, NaN stays NaN.
// Adding `magic` rounds x to an integer and leaves the biased exponent of 2^round(x) in the low bits.
template <int N>
ALWAYS_INLINE Vec<float, N> exp2(Vec<float, N> x) {
  using V = Vec<float, N>;
  x = max(V(-127.0f), x);
  const V magic(0x1.8p23f + 127.0f), shifted = x + magic, f = x - (shifted - magic);
  V p(1.3264727463e-3f);
  p = multiply_add(p, f, V(9.6715128185e-3f));
  p = multiply_add(p, f, V(5.5507337442e-2f));
  p = multiply_add(p, f, V(2.4022242083e-1f));
  p = multiply_add(p, f, V(6.9314697760e-1f));
  p = multiply_add(p, f, V(1.0f));
  return p * bit_cast<float>(Vec<int, N>(bit_cast<int>(shifted).v << 23));
}
template <int N>
ALWAYS_INLINE Vec<double, N> exp2(Vec<double, N> x) {
  using V = Vec<double, N>;
  x = max(V(-1023.0), x);
  const V magic(0x1.8p52 + 1023.0), shifted = x + magic, f = x - (shifted - magic);
  constexpr double c[] = {4.4572392754948483e-10, 7.0548148358357441e-09, 1.0178047531441557e-07, 1.3215487003408784e-06,
                          1.5252733864844454e-05, 1.5403530393171834e-04, 1.3333558146381739e-03, 9.6181291076285613e-03,
                          5.5504108664821734e-02, 2.4022650695910071e-01, 6.9314718055994531e-01, 1.0};
  V p(2.5855240363844972e-11);
  for (double coefficient : c) p = multiply_add(p, f, V(coefficient));
  return p * bit_cast<double>(Vec<int64_t, N>(bit_cast<int64_t>(shifted).v << 52));
}
// log2(x) for normal x > 0; NaN stays NaN. With m in [sqrt(1/2), sqrt(2)): log2(m) = 2 log2(e) artanh((m - 1) / (m + 1)).
template <class T, int N>
ALWAYS_INLINE Vec<T, N> log2(Vec<T, N> x) {
  using V = Vec<T, N>;
  constexpr bool kDouble = sizeof(T) == 8;
  constexpr int kMantissa = kDouble ? 52 : 23, kTerms = kDouble ? 11 : 5;
  const auto root = bit_cast_int(V(T(0.70710678118654752)));
  const auto exponent = (bit_cast_int(x) - root) >> kMantissa;  // arithmetic shift
  const V m = typename V::Native(bit_cast_int(x) - (exponent << kMantissa));
  const V s = (m - V(T(1))) / (m + V(T(1))), z = s * s;
  V p(T(1) / (2 * kTerms - 1));
  for (int k = kTerms - 2; k >= 0; k--) p = multiply_add(p, z, V(T(1) / (2 * k + 1)));
  const V e = __builtin_convertvector(exponent, typename V::Native);
  return multiply_add(p * s, V(T(2.8853900817779268)), e) + (x - x);
}
// tanh: below 0.625 without cancellation (an odd polynomial, in double x + x^3 P(x^2) / Q(x^2) with the coefficients of Cephes, Moshier 1989),
// 1 - 2 / (1 + e^2x) above.
template <int N>
ALWAYS_INLINE Vec<float, N> tanh_small(Vec<float, N> x) {
  using V = Vec<float, N>;
  const V z = x * x;
  V p(-5.70498872745e-3f);
  p = multiply_add(p, z, V(2.06390887954e-2f));
  p = multiply_add(p, z, V(-5.37397155531e-2f));
  p = multiply_add(p, z, V(1.33314422036e-1f));
  p = multiply_add(p, z, V(-3.33332819422e-1f));
  return multiply_add(p * z, x, x);
}
template <int N>
ALWAYS_INLINE Vec<double, N> tanh_small(Vec<double, N> x) {
  using V = Vec<double, N>;
  const V z = x * x;
  V p(-9.64399179425052238628e-1);
  p = multiply_add(p, z, V(-9.92877231001918586564e1));
  p = multiply_add(p, z, V(-1.61468768441708447952e3));
  V q = z + V(1.12811678491632931402e2);
  q = multiply_add(q, z, V(2.23548839060100448583e3));
  q = multiply_add(q, z, V(4.84406305325125486048e3));
  return multiply_add(x * z, p / q, x);
}
template <class T, int N>
ALWAYS_INLINE Vec<T, N> tanh(Vec<T, N> x) {
  using V = Vec<T, N>;
  const V magnitude = abs(x), limit(T(20));
  const V e = exp2(V(magnitude.v > limit.v ? limit.v : magnitude.v) * V(T(2.8853900817779268)));
  const V large = V(T(1)) - V(T(2)) / (V(T(1)) + e), small = tanh_small(x);
  const V signed_large = x.v < V(T(0)).v ? (V(T(0)) - large).v : large.v;
  return magnitude.v > V(T(0.625)).v ? signed_large.v : small.v;
}

// ---- memory and conversions ------------------------------------------------------------------------------------

#if defined(__AVX2__) && !defined(__AVX512F__)
// GCC 12 makes four shuffles of __builtin_convertvector here.
ALWAYS_INLINE Vec<float, 8> to_float(Vec<uint16_t, 8> x, bf16) { return (Vec<float, 8>::Native)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x.v), 16); }
#endif
template <int N>
ALWAYS_INLINE Vec<float, N> to_float(Vec<uint16_t, N> x, bf16) {
  return bit_cast<float>(Vec<uint32_t, N>(convert<uint32_t>(x).v << 16));
}

// Round to nearest even. NaN keeps its sign and becomes quiet.
template <int N>
ALWAYS_INLINE Vec<uint16_t, N> from_float(Vec<float, N> x, bf16) {
  const auto u = bit_cast<uint32_t>(x).v;
  const auto rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
  return convert<uint16_t>(Vec<uint32_t, N>((x.v != x.v) ? quiet : rounded));
}

#if defined(__F16C__) && defined(__AVX512F__)
ALWAYS_INLINE Vec<float, 16> to_float(Vec<uint16_t, 16> x, fp16) { return (Vec<float, 16>::Native)_mm512_cvtph_ps((__m256i)x.v); }
ALWAYS_INLINE Vec<uint16_t, 16> from_float(Vec<float, 16> x, fp16) {
  return (Vec<uint16_t, 16>::Native)_mm512_cvtps_ph((__m512)x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
ALWAYS_INLINE Vec<float, 8> to_float(Vec<uint16_t, 8> x, fp16) { return (Vec<float, 8>::Native)_mm256_cvtph_ps((__m128i)x.v); }
ALWAYS_INLINE Vec<uint16_t, 8> from_float(Vec<float, 8> x, fp16) {
  return (Vec<uint16_t, 8>::Native)_mm256_cvtps_ph((__m256)x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
template <int N>
ALWAYS_INLINE Vec<float, N> to_float(Vec<uint16_t, N> x, fp16) {
  const auto h = convert<uint32_t>(x).v;
  const auto magnitude = bit_cast<float>(Vec<uint32_t, N>((h & 0x7fffu) << 13)) * Vec<float, N>(0x1p112f);  // subnormals too
  const auto special = (h & 0x7c00u) == 0x7c00u ? (h - h) + 0x7f800000u : (h - h);
  return bit_cast<float>(Vec<uint32_t, N>(bit_cast<uint32_t>(magnitude).v | special | ((h & 0x8000u) << 16)));
}
template <int N>
ALWAYS_INLINE Vec<uint16_t, N> from_float(Vec<float, N> x, fp16) {
  const auto u = bit_cast<uint32_t>(x).v, magnitude = u & 0x7fffffffu;
  const auto subnormal = bit_cast<uint32_t>(bit_cast<float>(Vec<uint32_t, N>(magnitude)) + Vec<float, N>(0.5f)).v - 0x3f000000u;
  const auto normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const auto special = magnitude > 0x7f800000u ? (u - u) + 0x7e00u : (u - u) + 0x7c00u;
  const auto h = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
  return convert<uint16_t>(Vec<uint32_t, N>(h | ((u >> 16) & 0x8000u)));
}
#endif

template <class T> struct ComputeTypeOf {
  typedef float type;
};
template <> struct ComputeTypeOf<double> {
  typedef double type;
};
template <class T> using ComputeType = typename ComputeTypeOf<T>::type;

// A full vector of T, converted to the compute type.
template <class T>
ALWAYS_INLINE NativeVec<ComputeType<T>> load_converted(const T* p) {
  if constexpr (sizeof(T) == sizeof(ComputeType<T>)) return NativeVec<T>::load(p);
  else return to_float(Vec<uint16_t, kLanes<float>>::load(p), T());
}
template <class T>
ALWAYS_INLINE void store_converted(NativeVec<ComputeType<T>> x, T* p) {
  if constexpr (sizeof(T) == sizeof(ComputeType<T>)) x.store(p);
  else from_float(x, T()).store(p);
}
// The first `count` elements; the rest of the vector is zero and the memory behind them is not touched.
template <class T>
ALWAYS_INLINE NativeVec<ComputeType<T>> load_converted(const T* p, int count) {
  if (count >= kLanes<ComputeType<T>>) return load_converted(p);
  T buffer[kLanes<ComputeType<T>>] = {};
  if (count > 0) memcpy(buffer, p, count * sizeof(T));
  return load_converted(buffer);
}
template <class T>
ALWAYS_INLINE void store_converted(NativeVec<ComputeType<T>> x, T* p, int count) {
  if (count >= kLanes<ComputeType<T>>) return store_converted(x, p);
  T buffer[kLanes<ComputeType<T>>];
  store_converted(x, buffer);
  if (count > 0) memcpy(p, buffer, count * sizeof(T));
}

// Lane i: lane order[i] of a and b beside each other. `order` is known when this is compiled.
template <class Native, class Order>
ALWAYS_INLINE Native shuffle(Native a, Native b, Order order) {
#ifdef __clang__  // has no __builtin_shuffle, and makes one shuffle of this
  constexpr int kLanes = sizeof(Order) / sizeof(order[0]);
  Native both;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) both[i] = order[i] < kLanes ? a[order[i]] : b[order[i] - kLanes];
  return both;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

// rows[i][j] <-> rows[j][i], in registers. Every shuffle below is one instruction on AVX2: interleaving inside 128 bits,
// then exchanging 128-bit blocks.
template <int kStep, class T, int N>
ALWAYS_INLINE void exchange_blocks(Vec<T, N> (&rows)[N]) {
  // As 64-bit lanes: GCC finds vperm2i128 for those, but not for floats.
  constexpr int kWide = N * sizeof(T) / 8, kWideStep = kStep * sizeof(T) / 8;
  typedef typename Vec<int64_t, kWide>::Native Wide;
  typedef typename Vec<T, N>::Native Native;
  Wide low, high;
  for (int i = 0; i < kWide; i++) {
    low[i] = i & kWideStep ? kWide + i - kWideStep : i;
    high[i] = i & kWideStep ? kWide + i : i + kWideStep;
  }
#pragma GCC unroll 8
  for (int base = 0; base < N; base += 2 * kStep)
#pragma GCC unroll 8
    for (int i = base; i < base + kStep; i++) {
      const Wide a = Wide(rows[i].v), b = Wide(rows[i + kStep].v);
      rows[i] = Native(shuffle(a, b, low));
      rows[i + kStep] = Native(shuffle(a, b, high));
    }
  if constexpr (2 * kStep < N) exchange_blocks<2 * kStep>(rows);
}
template <class T, int N>
ALWAYS_INLINE void transpose(Vec<T, N> (&rows)[N]) {
  if constexpr (sizeof(T) == 4) {
    typedef typename Vec<T, N>::Native Native;
    decltype(Native{} < Native{}) low, high, low_pair, high_pair;
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      const int block = i / 4 * 4, source = i & 1 ? N : 0, pair_source = i & 2 ? N : 0;
      low[i] = source + block + i % 4 / 2;
      high[i] = low[i] + 2;
      low_pair[i] = pair_source + block + i % 2;
      high_pair[i] = low_pair[i] + 2;
    }
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 4) {
      const Native a = shuffle(rows[i].v, rows[i + 1].v, low), b = shuffle(rows[i].v, rows[i + 1].v, high);
      const Native c = shuffle(rows[i + 2].v, rows[i + 3].v, low), d = shuffle(rows[i + 2].v, rows[i + 3].v, high);
      rows[i].v = shuffle(a, c, low_pair);
      rows[i + 1].v = shuffle(a, c, high_pair);
      rows[i + 2].v = shuffle(b, d, low_pair);
      rows[i + 3].v = shuffle(b, d, high_pair);
    }
    if constexpr (N > 4) exchange_blocks<4>(rows);
  } else {
    exchange_blocks<1>(rows);
  }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
