#pragma once
// Conversions between number formats, bit for bit as the device's cvt instructions.

#include <cstring>

#include "platform.h"

namespace simt {

inline float bits_f32(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline uint32_t f32_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

inline float to_float(bf16 h) { return bits_f32(uint32_t(h.u) << 16); }
inline float to_float(f16 h) {
  const uint32_t sign = uint32_t(h.u & 0x8000) << 16, magnitude = h.u & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);  // the exponent's bias grows from 15 to 127
  const uint32_t subnormal = f32_bits(float(int(magnitude)) * 0x1p-24f);
  return bits_f32(sign | (magnitude < 0x400 ? subnormal : magnitude < 0x7c00 ? normal : normal + (112u << 23)));
}
inline float to_float(float x) { return x; }
inline double to_float(double x) { return x; }

// To nearest, ties to even; NaN becomes the one canonical NaN.
inline bf16 to_bf16(float f) {
  const uint32_t u = f32_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline f16 to_f16(float f) {
  const uint32_t u = f32_bits(f), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00)};
  if (magnitude < 0x38800000u) return {uint16_t(sign | uint32_t(std::nearbyint(double(bits_f32(magnitude)) * 0x1p24)))};
  return {uint16_t(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13))};
}
template <class T> inline T from_float(float f);
template <> inline float from_float<float>(float f) { return f; }
template <> inline bf16 from_float<bf16>(float f) { return to_bf16(f); }
template <> inline f16 from_float<f16>(float f) { return to_f16(f); }

// To nearest, ties away from zero; the low 13 bits are 0 but for NaN.
inline uint32_t to_tf32(float x) {
  const uint32_t u = f32_bits(x), magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffffffu;
  return magnitude == 0x7f800000u ? u : (u + 0x1000u) & 0xffffe000u;
}

template <class T> inline uint32_t pack2(float lo, float hi) { return from_float<T>(lo).u | uint32_t(from_float<T>(hi).u) << 16; }

// .ftz: what is smaller than any normal number is 0, before and after.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float ex2(float x) { return flush(std::exp2(flush(x))); }
inline float lg2(float x) { return std::log2(flush(x)); }
inline float rcp(float x) { return flush(1 / flush(x)); }

}  // namespace simt
