#pragma once
// What the CPU kernels need from the process: torch's own threads.

#include <torch/csrc/stable/c/shim.h>

#include "cpu/kernels.h"

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

}  // namespace tiled_attention
