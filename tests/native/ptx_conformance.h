#pragma once
// What the conformance tests compare with: device memory with a copy on the host, 16-bit floating point from its definition, and verdicts.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "cuda/device.cuh"

#if SIMT_EMULATED
static const char* take(void** data, size_t bytes) { return (*data = malloc(bytes)) ? nullptr : "out of memory"; }
static void give(void* data) { free(data); }
static void copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static const char* finish() { return nullptr; }
static bool has_device() { return true; }
#else
static const char* text(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }
static const char* take(void** data, size_t bytes) { return text(cudaMalloc(data, bytes)); }
static void give(void* data) { cudaFree(data); }
static void copy(void* to, const void* from, size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }
static const char* finish() {
  const cudaError_t launched = cudaGetLastError();
  return text(launched == cudaSuccess ? cudaDeviceSynchronize() : launched);
}
static bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}
#endif

namespace {

int failures = 0;

// Device memory with a copy on the host.
template <class T>
struct Buffer {
  std::vector<T> host;
  T* device = nullptr;
  explicit Buffer(size_t count) : host(count) {
    if (const char* error = take(reinterpret_cast<void**>(&device), count * sizeof(T))) printf("FAIL allocation: %s\n", error), exit(1);
  }
  ~Buffer() { give(device); }
  Buffer(const Buffer&) = delete;
  void send() { copy(device, host.data(), host.size() * sizeof(T)); }
  void fetch() { copy(host.data(), device, host.size() * sizeof(T)); }
};

struct Random {
  uint64_t state = 88172645463325252ull;
  uint32_t bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return uint32_t(state >> 16);
  }
  float unit() { return float(bits() >> 8) * 0x1p-23f - 1.0f; }  // [-1, 1)
};

float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// binary16 and bfloat16 from their definition: sign, `exponent` bits, `mantissa` bits.
double value_of(uint16_t half, int exponent, int mantissa) {
  const int field = half >> mantissa & ((1 << exponent) - 1), fraction = half & ((1 << mantissa) - 1), bias = (1 << (exponent - 1)) - 1;
  const double sign = half >> 15 ? -1 : 1;
  if (field == (1 << exponent) - 1) return fraction ? NAN : sign * INFINITY;
  return field ? sign * ldexp(fraction + (1 << mantissa), field - bias - mantissa) : sign * ldexp(fraction, 1 - bias - mantissa);
}
double value_of(bf16 half) { return value_of(half.u, 8, 7); }
double value_of(f16 half) { return value_of(half.u, 5, 10); }

// Nearest, ties to even, by searching the ordered positive patterns; NaN for NaN.
template <class T>
T nearest(float value) {
  const uint16_t sign = bits_of(value) >> 31 ? 0x8000 : 0, infinity = sizeof(T) == 2 && value_of(T{0x7c00}) == INFINITY ? 0x7c00 : 0x7f80;
  const double magnitude = fabs(double(value));
  if (isnan(value)) return T{uint16_t(infinity | 1)};
  uint16_t low = 0, high = infinity;  // value_of(low) <= magnitude < value_of(high), counting infinity as the next power of two
  const double beyond = 2 * value_of(T{uint16_t(infinity - 1)}) - value_of(T{uint16_t(infinity - 2)});
  const auto at = [&](uint16_t pattern) { return pattern == infinity ? beyond : value_of(T{pattern}); };
  if (magnitude >= beyond) return T{uint16_t(sign | infinity)};
  while (high - low > 1) {
    const uint16_t middle = uint16_t((low + high) / 2);
    (at(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - at(low), above = at(high) - magnitude;
  return T{uint16_t(sign | (below < above || (below == above && low % 2 == 0) ? low : high))};
}

bool same(float a, float b) { return isnan(a) ? isnan(b) : bits_of(a) == bits_of(b); }

void verdict(const char* name, const char* error, int wrong, double got = 0, double want = 0) {
  if (!error && wrong == 0) {
    printf("ok %s\n", name);
    return;
  }
  ++failures;
  if (error) {
    printf("FAIL %s: %s\n", name, error);
  } else {
    printf("FAIL %s: %d wrong, first got %.9g, expected %.9g\n", name, wrong, got, want);
  }
}

// Compares element by element with `want(i)` through `accept(got, want)`.
template <class T, class Want, class Accept>
void compare(const char* name, const char* error, const std::vector<T>& got, Want want, Accept accept) {
  int wrong = 0;
  double first_got = 0, first_want = 0;
  for (size_t i = 0; !error && i < got.size(); ++i) {
    if (accept(got[i], want(i))) continue;
    if (wrong++ == 0) first_got = double(got[i]), first_want = double(want(i));
  }
  verdict(name, error, wrong, first_got, first_want);
}

}  // namespace
