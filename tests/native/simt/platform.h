#pragma once
// The host compiler and its sanitizers, and the words of CUDA C++ that no host compiler knows.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define SIMT_INSTRUMENTED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define SIMT_INSTRUMENTED 1
#endif
// -fsanitize=thread calls a function before every load and store. SIMT_TRACE_SHARED takes these calls for itself, to count bank conflicts.
#if defined(SIMT_INSTRUMENTED) && !defined(SIMT_TRACE_SHARED)
#define SIMT_TSAN 1
#endif

#ifdef SIMT_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SIMT_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

// The emulator's own functions are no part of the kernel that is checked.
#ifdef SIMT_INSTRUMENTED
#define SIMT_NOTSAN __attribute__((no_sanitize("thread"), noinline))
#else
#define SIMT_NOTSAN
#endif
// The same, and compiled once: kernels unroll into hundreds of calls.
#define SIMT_RUNTIME SIMT_NOTSAN __attribute__((noinline))
// Memory accesses that stand for the kernel's: seen by ThreadSanitizer, but counted by the emulator where they are collective.
#ifdef SIMT_TRACE_SHARED
#define SIMT_UNTRACED __attribute__((no_sanitize("thread"), noinline))
#else
#define SIMT_UNTRACED
#endif
// A cached address of a thread's variable is right as long as a fiber stays on its thread, and fibers do.
#define SIMT_THREAD_LOCAL thread_local __attribute__((tls_model("initial-exec")))

#define SIMT_EMULATED 1
#define SIMT_DEVICE inline

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static
#define __restrict__ __restrict

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;
