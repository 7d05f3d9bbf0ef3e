#pragma once
// Tensors in CUDA memory. Everything goes to the current stream of their device; nothing waits for it, so that calls can be captured.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <ostream>

#include "cuda/runtime.h"
#include "fail.h"

#define DISPATCH_KEY CUDA
#define DISPATCH_KEY_WITHOUT_TENSORS CUDA

namespace tiled_attention {
namespace device {

// Reading a value would wait for the device: kernels are safe for any value instead. Lengths and offsets act as if limited to their range.
constexpr bool kReadsValues = false;

inline const int32_t type = aoti_torch_device_type_cuda();

// -1 where there is no tensor, or it is elsewhere.
inline int32_t index_of(AtenTensorHandle tensor) {
  bool defined = false;
  int32_t found = 0, index = -1;
  if (tensor) aoti_torch_is_defined(tensor, &defined);
  if (!defined) return -1;
  aoti_torch_get_device_type(tensor, &found);
  if (found == type) aoti_torch_get_device_index(tensor, &index);
  return index;
}

// cuda:1 as Python writes it.
struct Name {
  int32_t type, index;
  friend std::ostream& operator<<(std::ostream& stream, const Name& name) {
    if (name.type == aoti_torch_device_type_cpu()) return stream << "cpu";
    if (name.type != device::type) return stream << "a device of torch's type " << name.type;
    stream << "cuda";
    return name.index < 0 ? stream : stream << ':' << name.index;
  }
};

// `expected`: where the arguments before `tensor` are.
inline void check(const char* name, AtenTensorHandle tensor, int32_t expected) {
  int32_t found = 0, index = -1;
  aoti_torch_get_device_type(tensor, &found);
  aoti_torch_get_device_index(tensor, &index);
  if (found != type || index != expected) {
    fail(name, " must be on ", Name{type, expected}, " as the other arguments are, got ", Name{found, index});
  }
}

class Guard {
 public:
  explicit Guard(int32_t index) {
    if (aoti_torch_create_cuda_guard(index, &guard_)) fail("cannot make ", Name{type, index}, " the current device");
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() { aoti_torch_delete_cuda_guard(guard_); }

 private:
  CUDAGuardHandle guard_ = nullptr;
};

inline void* current_stream(int32_t index) {
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(index, &stream)) fail("cannot get the current stream of ", Name{type, index});
  return stream;
}

inline void fill(void* data, int byte, size_t bytes, int32_t index) {
  if (bytes == 0) return;
  if (const char* problem = cuda::fill_bytes(data, byte, bytes, current_stream(index))) fail("cannot fill memory of ", Name{type, index}, ": ", problem);
}

inline void copy(void* to, const void* from, size_t bytes, int32_t index) {
  if (bytes == 0) return;
  if (const char* problem = cuda::copy_bytes(to, from, bytes, current_stream(index))) fail("cannot copy memory of ", Name{type, index}, ": ", problem);
}

inline void prepare(void*, size_t) {}

}  // namespace device
}  // namespace tiled_attention
