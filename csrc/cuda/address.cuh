#pragma once
// Addresses in shared memory as numbers: a permuted chunk of a row is one exclusive or away from another, and an offset that is known when
// compiling costs nothing.

#include "device.cuh"

namespace tiled_attention {
namespace cuda {

#if SIMT_EMULATED
#define __grid_constant__
using SharedAddress = uintptr_t;
SIMT_DEVICE unsigned block_index() { return blockIdx.x; }
SIMT_DEVICE int thread_index() { return int(threadIdx.x); }
SIMT_DEVICE SharedAddress shared_address(const void* p) { return SharedAddress(p); }
SIMT_DEVICE void ldmatrix(uint32_t (&r)[4], SharedAddress at) { simt::ldmatrix_x4(r, (const void*)at); }
SIMT_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], SharedAddress at) { simt::ldmatrix_x4_trans(r, (const void*)at); }
#else
using SharedAddress = uint32_t;
// Read anew at each call, so that what follows from it need not stay in registers.
SIMT_DEVICE unsigned block_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}
SIMT_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
SIMT_DEVICE SharedAddress shared_address(const void* p) { return simt::smem_u32(p); }
SIMT_DEVICE void ldmatrix(uint32_t (&r)[4], SharedAddress at) { simt::ldmatrix_x4(r, at); }
SIMT_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], SharedAddress at) { simt::ldmatrix_x4_trans(r, at); }
#endif

// The same value, of which the compiler knows nothing: what follows from it is worked out again where it is used instead of being kept in
// registers over the main loop.
template <class Integer>
SIMT_DEVICE Integer opaque(Integer x) {
#if !SIMT_EMULATED
  static_assert(sizeof(Integer) == 4, "one register");
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Division of numbers in [0, 2^31) by one that the host knows (Granlund and Montgomery, "Division by invariant integers using multiplication").
struct Divisor {
  int value;
  uint32_t multiplier;
  int shift;

  explicit Divisor(int64_t divisor) : value(int(divisor)), shift(31) {
    while ((int64_t(1) << (shift - 31)) < divisor) shift++;
    multiplier = uint32_t(((uint64_t(1) << shift) + divisor - 1) / divisor);
  }
  SIMT_DEVICE int divide(int x) const { return int(uint64_t(uint32_t(x)) * multiplier >> shift); }
  SIMT_DEVICE int rest(int x) const { return x - divide(x) * value; }
};

}  // namespace cuda
}  // namespace tiled_attention
