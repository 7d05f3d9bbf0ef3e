#pragma once
// A CUDA device on the host: every thread of a block is a fiber, warps do together what they do together on the device, and what a kernel may
// not rely on is made to go wrong. csrc/cuda/device.cuh includes this where the compiler is not nvcc; docs/kernels/emulator.md says how it works.

#include "launch.h"
#include "tensor_core.h"

// There is no __shared__: a static variable would outlive its block.
#define SIMT_DYNAMIC_SHARED(name) unsigned char* name = ::simt::dynamic_shared()
#define SIMT_SHARED(T, name, ...)    \
  static char name##_key;            \
  typedef T name##_type __VA_ARGS__; \
  name##_type& name = *(name##_type*)::simt::static_shared(&name##_key, sizeof(name##_type))
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) ((void)(stream), ::simt::launch(grid, block, shared_bytes, [&] { kernel(__VA_ARGS__); }))

#define threadIdx (::simt::thread_index())
#define blockIdx (::simt::block_index())
#define blockDim (::simt::block_size())
#define gridDim (::simt::grid_size())

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline void __syncthreads(simt::Site site = simt::Site::here()) { simt::syncthreads(site); }
inline void __syncwarp(unsigned mask = simt::kFullMask, simt::Site site = simt::Site::here()) { simt::syncwarp(mask, site); }
inline unsigned __ballot_sync(unsigned mask, int vote, simt::Site site = simt::Site::here()) { return simt::ballot(mask, vote != 0, site); }
inline int __any_sync(unsigned mask, int vote, simt::Site site = simt::Site::here()) { return simt::ballot(mask, vote != 0, site) != 0; }
inline int __all_sync(unsigned mask, int vote, simt::Site site = simt::Site::here()) { return simt::ballot(mask, vote != 0, site) == mask; }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, simt::Site site = simt::Site::here()) {
  return simt::shuffle(mask, value, unsigned(lane), width, simt::Op::kShfl, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, simt::Site site = simt::Site::here()) {
  return simt::shuffle(mask, value, unsigned(lanes), width, simt::Op::kShflXor, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Site site = simt::Site::here()) {
  return simt::shuffle(mask, value, by, width, simt::Op::kShflDown, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, simt::Site site = simt::Site::here()) {
  return simt::shuffle(mask, value, by, width, simt::Op::kShflUp, site);
}
template <class T>
inline T atomicAdd(T* p, T value) {
  return simt::atomic_add(p, value);
}
