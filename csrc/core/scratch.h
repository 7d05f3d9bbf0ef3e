#pragma once
// Cuts the scratch memory of a kernel into arrays.

#include "host_device.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Hands out pieces of the caller's scratch memory. With a null base it only counts: the size function and the kernel
// run the same code.
struct Scratch {
  char* base;
  size_t used = 0;
  HOST_DEVICE explicit Scratch(void* memory) : base((char*)memory) {}
  template <class T>
  HOST_DEVICE T* take(int64_t count) {
    T* p = base ? (T*)(base + used) : nullptr;
    used += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
