#pragma once
// Tensors as torch's stable ABI hands them over: owned handles whose metadata is read once, the argument stack of an
// operator, and dense allocation. What the arguments mean is checked in checks.h.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <ostream>
#include <utility>

#include "device.h"
#include "fail.h"

namespace tiled_attention {

constexpr int64_t kMaxRank = 64;

// The numbers that torch gives its dtypes.
struct Codes {
  int32_t float32 = aoti_torch_dtype_float32(), float64 = aoti_torch_dtype_float64();
  int32_t bfloat16 = aoti_torch_dtype_bfloat16(), float16 = aoti_torch_dtype_float16();
  int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64(), boolean = aoti_torch_dtype_bool(), uint8 = aoti_torch_dtype_uint8();
};
inline const Codes codes;

// When set, every buffer that is allocated here is filled with 0xff bytes, NaN in every float dtype.
inline bool poison_buffers = false;

// (2, 3) as Python writes it.
struct Shape {
  const int64_t* sizes;
  int64_t rank;
  friend std::ostream& operator<<(std::ostream& stream, const Shape& shape) {
    stream << '(';
    for (int64_t i = 0; i < shape.rank; ++i) stream << (i ? ", " : "") << shape.sizes[i];
    return stream << (shape.rank == 1 ? ",)" : ")");
  }
};

// Owns a reference; absent when default-constructed or None. The metadata is filled in by read().
class Tensor {
 public:
  Tensor() = default;
  Tensor(const char* name, AtenTensorHandle handle, int32_t device) : name(name), device(device), handle_(handle) {}
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    name = other.name, dtype = other.dtype, device = other.device, rank = other.rank;
    sizes = other.sizes, strides = other.strides, data = other.data;
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle get() const { return handle_; }
  // Hands the reference to the caller of the operator.
  StableIValue release() { return torch::stable::detail::from(std::exchange(handle_, nullptr)); }

  // From the end where i is negative.
  int64_t size(int64_t i) const { return sizes[i < 0 ? rank + i : i]; }
  int64_t stride(int64_t i) const { return strides[i < 0 ? rank + i : i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < rank; ++i) count *= sizes[i];
    return count;
  }
  size_t bytes() const { return static_cast<size_t>(numel()) * aoti_torch_dtype_element_size(dtype); }
  bool is_contiguous() const {
    bool contiguous = false;
    aoti_torch_is_contiguous(handle_, &contiguous);
    return contiguous;
  }
  Shape shape() const { return {sizes, rank}; }

  const char* name = "";
  int32_t dtype = -1;
  int32_t device = 0;  // index of the device of the call, which read() checks
  int64_t rank = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  void* data = nullptr;

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Refuses None and what is not on the device of the call. Inputs are only read: data is mutable so that one view type serves all.
inline void read(Tensor* tensor) {
  bool defined = false;
  if (*tensor) aoti_torch_is_defined(tensor->get(), &defined);
  if (!defined) fail(tensor->name, " must be a tensor, got None");
  device::check(tensor->name, tensor->get(), tensor->device);
  int64_t *sizes = nullptr, *strides = nullptr, storage_bytes = 0, last = 0;
  const void* data = nullptr;
  if (aoti_torch_get_dim(tensor->get(), &tensor->rank) || aoti_torch_get_sizes(tensor->get(), &sizes) || aoti_torch_get_strides(tensor->get(), &strides) ||
      aoti_torch_get_dtype(tensor->get(), &tensor->dtype) || aoti_torch_get_storage_offset(tensor->get(), &last) ||
      aoti_torch_get_storage_size(tensor->get(), &storage_bytes) || torch_get_const_data_ptr(tensor->get(), &data)) {
    fail(tensor->name, " must be a strided tensor");
  }
  if (tensor->rank > kMaxRank) fail(tensor->name, " must have at most ", kMaxRank, " dimensions, got ", tensor->rank);
  tensor->sizes = sizes, tensor->strides = strides, tensor->data = const_cast<void*>(data);
  // A storage can be resized under its tensors.
  bool is_empty = false;
  for (int64_t i = 0; i < tensor->rank; ++i) {
    last += (sizes[i] - 1) * strides[i];
    is_empty |= sizes[i] == 0;
  }
  const auto storage_numel = static_cast<uint64_t>(storage_bytes) / aoti_torch_dtype_element_size(tensor->dtype);
  if (!is_empty && static_cast<uint64_t>(last) >= storage_numel) {
    fail(tensor->name, " of shape ", tensor->shape(), " reaches beyond its storage of ", storage_numel, " elements");
  }
}

// SymInt[] argument: `count` may exceed the values kept, which the checks refuse.
struct IntList {
  static constexpr int kCapacity = 10;
  int64_t values[kCapacity];
  int64_t count = 0;
};

// Takes the arguments of a boxed kernel off their stack, in the order of the schema, each exactly once.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  template <class T>
  T scalar() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor(const char* name) { return take(name, scalar<AtenTensorHandle>()); }
  Tensor optional_tensor(const char* name) { return take(name, scalar<std::optional<AtenTensorHandle>>().value_or(nullptr)); }
  IntList ints() {
    IntList list;
    StableListHandle handle = scalar<StableListHandle>();
    size_t count = 0;
    torch_list_size(handle, &count);
    list.count = static_cast<int64_t>(count);
    for (size_t i = 0; i < count && i < IntList::kCapacity; ++i) {
      StableIValue value = 0;
      torch_list_get_item(handle, i, &value);
      list.values[i] = torch::stable::detail::to<int64_t>(value);
    }
    torch_delete_list(handle);
    return list;
  }
  // Index of the device of the call: that of the first tensor on a device of this kind, -1 where none is.
  int32_t device() const { return device_; }

 private:
  Tensor take(const char* name, AtenTensorHandle handle) {
    if (device_ < 0) device_ = device::index_of(handle);
    return Tensor(name, handle, device_);
  }

  StableIValue* next_;
  int32_t device_ = -1;
};

// 0 and 0xff give elements that are 0 and NaN in every float dtype. The tensor must be dense.
inline void fill_bytes(const Tensor& tensor, int byte) { device::fill(tensor.data, byte, tensor.bytes(), tensor.device); }

// `from` holds as many bytes, on the same device.
inline void copy_bytes(const Tensor& to, const void* from) { device::copy(to.data, from, to.bytes(), to.device); }

// Uninitialised. `strides` must be dense.
inline Tensor empty(const char* name, int32_t dtype, int32_t device, int64_t rank, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, sizes, strides, dtype, device::type, device, &handle)) {
    fail("cannot allocate ", name, " of shape ", Shape{sizes, rank});
  }
  Tensor tensor(name, handle, device);
  read(&tensor);
  device::prepare(tensor.data, tensor.bytes());
  if (poison_buffers) fill_bytes(tensor, 0xff);
  return tensor;
}

// Gives the dimensions `order[rank - 1]`, ..., `order[0]`, from the innermost out, the strides of a dense tensor.
inline void dense_strides(const char* name, int64_t rank, const int64_t* sizes, const int64_t* order, int64_t* strides) {
  int64_t next = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[order[i]] = next;
    if (sizes[order[i]] > 1 && __builtin_mul_overflow(next, sizes[order[i]], &next)) {
      fail(name, " of shape ", Shape{sizes, rank}, " would have more than 2^63 elements");
    }
  }
}

inline Tensor empty_contiguous(const char* name, int32_t dtype, int32_t device, int64_t rank, const int64_t* sizes) {
  int64_t order[kMaxRank], strides[kMaxRank];
  for (int64_t i = 0; i < rank; ++i) order[i] = i;
  dense_strides(name, rank, sizes, order, strides);
  return empty(name, dtype, device, rank, sizes, strides);
}

// What stands for a result that was not asked for: shape (0,).
inline Tensor empty_nothing(int32_t dtype, int32_t device) {
  const int64_t size = 0;
  return empty_contiguous("nothing", dtype, device, 1, &size);
}

// No two elements share memory and there are no gaps.
inline bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  // Sort the dimensions with more than one element by stride, innermost last.
  int64_t order[kMaxRank], count = 0;
  for (int64_t i = 0; i < tensor.rank; ++i) {
    if (tensor.sizes[i] < 2) continue;
    int64_t at = count++;
    for (; at > 0 && tensor.strides[order[at - 1]] < tensor.strides[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t expected = 1;
  for (int64_t i = count - 1; i >= 0; --i) {
    if (tensor.strides[order[i]] != expected) return false;
    expected *= tensor.sizes[order[i]];
  }
  return true;
}

// Uninitialised, on the device and of the sizes of `tensor` but with `last_size` in the last dimension, dense in the order in which the
// dimensions of `tensor` lie in memory. The strides are those of torch.empty_like where `last_size` changes nothing:
//   - `tensor` dense and the last size the same: its own strides, whatever they are along dimensions of size 1;
//   - `tensor` contiguous: contiguous;
//   - otherwise start from the order rank - 1, ..., 0, innermost first, and insert one dimension after the other: it changes
//     places with a dimension further inside that has a larger stride, or an equal stride and a larger size; it stops at the
//     first one with a smaller stride; where either stride is 0, and where nothing decides, it looks further inside without
//     changing places. Sizes and strides compared are those of `tensor`. Then each dimension's stride is the product of the
//     (new) sizes inside it, sizes 0 counting as 1.
// Rank at least 1.
inline Tensor empty_in_order_of(const Tensor& tensor, const char* name, int32_t dtype, int64_t last_size) {
  const int64_t rank = tensor.rank;
  int64_t sizes[kMaxRank], strides[kMaxRank], inner[kMaxRank], order[kMaxRank];
  std::memcpy(sizes, tensor.sizes, static_cast<size_t>(rank) * sizeof(int64_t));
  if (sizes[rank - 1] == last_size && is_dense(tensor)) return empty(name, dtype, tensor.device, rank, sizes, tensor.strides);
  sizes[rank - 1] = last_size;
  if (tensor.is_contiguous()) return empty_contiguous(name, dtype, tensor.device, rank, sizes);
  for (int64_t i = 0; i < rank; ++i) inner[i] = rank - 1 - i;
  for (int64_t i = 1; i < rank; ++i) {
    int64_t at = i;
    for (int64_t j = i - 1; j >= 0; --j) {
      const int64_t stride = tensor.strides[inner[at]], other = tensor.strides[inner[j]];
      if (stride == 0 || other == 0) continue;
      if (other < stride) break;
      if (other > stride || tensor.sizes[inner[j]] > tensor.sizes[inner[at]]) {
        std::swap(inner[j], inner[at]);
        at = j;
      }
    }
  }
  for (int64_t i = 0; i < rank; ++i) order[i] = inner[rank - 1 - i];
  dense_strides(name, rank, sizes, order, strides);
  return empty(name, dtype, tensor.device, rank, sizes, strides);
}

// `tensor` itself where it is contiguous, otherwise a copy.
inline void make_contiguous(Tensor* tensor) {
  if (tensor->is_contiguous()) return;
  Tensor copy = empty_contiguous(tensor->name, tensor->dtype, tensor->device, tensor->rank, tensor->sizes);
  if (aoti_torch_copy_(copy.get(), tensor->get(), 0)) fail("cannot copy ", tensor->name);
  *tensor = std::move(copy);
}

// Uninitialised memory, aligned to `alignment` bytes.
class Scratch {
 public:
  Scratch(size_t bytes, size_t alignment, int32_t device) {
    if (bytes == 0) return;
    const int64_t size = static_cast<int64_t>(bytes + alignment);
    memory_ = empty_contiguous("scratch memory", codes.uint8, device, 1, &size);
    data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.data) + alignment - 1) / alignment * alignment);
  }
  void* data() const { return data_; }

 private:
  Tensor memory_;
  void* data_ = nullptr;
};

}  // namespace tiled_attention
