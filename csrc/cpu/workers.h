#pragma once
// How the items of a call are handed to the threads.

#include "kernels.h"
#include "simd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Calls f(worker, item) for every item; workers take the next one as they become free.
template <class F>
inline void for_each_item(const ThreadPool& pool, int64_t items, const F& f) {
  struct Context {
    const F* f;
    int64_t items, next;
  } context = {&f, items, 0};
  const auto body = [](void* memory, int worker) {
    Context& c = *(Context*)memory;
    for (int64_t item; (item = __atomic_fetch_add(&c.next, 1, __ATOMIC_RELAXED)) < c.items;) (*c.f)(worker, item);
  };
  if (pool.num_workers <= 1 || items <= 1) return body(&context, 0);
  pool.run(int(items < pool.num_workers ? items : pool.num_workers), body, &context);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
