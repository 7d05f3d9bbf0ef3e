#pragma once
// What the CPU kernels need from the process: torch's own threads, and scratch memory.

#include "cpu/kernels.h"
#include "tensor.h"

namespace tiled_attention {

// In a forked child the threads of torch's pool are gone, and waiting for them would hang.
bool in_forked_child();

inline void run_workers(int num_workers, void (*body)(void* context, int worker), void* context) {
  if (num_workers == 1) return body(context, 0);
  struct Job {
    void (*body)(void*, int);
    void* context;
  } job{body, context};
  // Fails only where a body throws, and kernels do not.
  torch_parallel_for(
      0, num_workers, 1,
      [](int64_t begin, int64_t end, void* opaque) {
        const Job& job = *static_cast<Job*>(opaque);
        for (int64_t worker = begin; worker < end; ++worker) job.body(job.context, static_cast<int>(worker));
      },
      &job);
}

// As many workers as torch.set_num_threads says.
inline ThreadPool thread_pool() {
  uint32_t num_threads = 1;
  if (!in_forked_child()) torch_get_num_threads(&num_threads);
  return {num_threads < 1 ? 1 : static_cast<int>(num_threads), run_workers};
}

// Uninitialised memory, aligned to 64 bytes.
class Scratch {
 public:
  explicit Scratch(size_t bytes) {
    if (bytes == 0) return;
    const int64_t size = static_cast<int64_t>(bytes) + 64;
    memory_ = empty_contiguous("scratch memory", codes.uint8, 1, &size);
    data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory_.data) + 63) & ~uintptr_t(63));
  }
  void* data() const { return data_; }

 private:
  Tensor memory_;
  void* data_ = nullptr;
};

}  // namespace tiled_attention
