#pragma once
// Tensors in host memory.

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>

#include "fail.h"

#define DISPATCH_KEY CPU
// Of operators that need no tensor among their arguments.
#define DISPATCH_KEY_WITHOUT_TENSORS CompositeExplicitAutograd

namespace tiled_attention {
namespace device {

// Whether checks may read the values of tensors.
constexpr bool kReadsValues = true;

// torch's number for the kind of device.
inline const int32_t type = aoti_torch_device_type_cpu();

// Which device of that kind a tensor is on.
inline int32_t index_of(AtenTensorHandle) { return 0; }

inline void check(const char* name, AtenTensorHandle tensor, int32_t) {
  int32_t found = 0;
  aoti_torch_get_device_type(tensor, &found);
  if (found != type) fail(name, " must be on the CPU");
}

// Makes the device of a call the current one.
struct Guard {
  explicit Guard(int32_t) {}
};

inline void* current_stream(int32_t) { return nullptr; }

inline void fill(void* data, int byte, size_t bytes, int32_t) {
  if (bytes) std::memset(data, byte, bytes);
}

inline void copy(void* to, const void* from, size_t bytes, int32_t) {
  if (bytes) std::memcpy(to, from, bytes);
}

// Fresh memory costs a page fault for every 4 KiB, each about as long as 10^3 multiply-adds, and large blocks are fresh in every call:
// asks for huge pages.
inline void prepare(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = uintptr_t(2) << 20;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + bytes) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace device
}  // namespace tiled_attention
