#pragma once
// Runs the blocks of a grid.

#include <deque>
#include <memory>
#include <new>
#include <thread>

#include "async_copy.h"

namespace simt {

constexpr size_t kMaxShared = 227 << 10;  // of a block, on the largest device

inline char launch_order;  // for release() and acquire(): what a grid did is seen by what follows it

constexpr Site kEnd = {"", 0};

// A lane's last act. Returns who runs next.
SIMT_RUNTIME inline Lane* end_lane() {
  Block& block = *current_block;
  Lane& lane = *current_lane;
  Warp& warp = block.warps[lane.warp];
  if (copies_in_flight(lane)) fail("a thread ends while its cp.async copies are in flight", kEnd);
  for (int i = 0; i < warp.num_pending; ++i)
    if (warp.pending[i].mask >> lane.lane & 1)
      fail(std::string("a thread ends while others wait for it at ") + name(warp.pending[i].op) + " at " + warp.pending[i].site.text(), kEnd);
  lane.state = State::kEnded;
  warp.alive &= ~(1u << lane.lane);
  --block.alive;
  if (!warp.alive) count_accesses(warp);
  if (block.arrived && block.arrived == block.alive) release_barrier();  // who has ended counts as arrived
  Lane* next = next_ready();
  if (!next && block.alive) report_deadlock();
  return next;
}
// After a fault: the next lane that has to unwind.
SIMT_NOTSAN inline Lane* next_unwinding() {
  for (Lane& lane : current_block->lanes)
    if (lane.state != State::kEnded) return &lane;
  return nullptr;
}
SIMT_NOTSAN inline void fiber_body() {
  Block& block = *current_block;
  enter_fiber(block.main);
  Lane* next = nullptr;
  try {
    if (!block.failed) block.entry(block.argument);
    Quiet quiet;
    if (!block.failed) next = end_lane();
  } catch (const Unwind&) {
  } catch (const std::exception& e) {
    Quiet quiet;
    record_fault(std::string("an exception in a kernel: ") + e.what());
  }
  release(&launch_order);
  if (block.failed) {
    Quiet quiet;
    current_lane->state = State::kEnded;
    next = next_unwinding();
  }
  Lane* from = current_lane;
  current_lane = next;
  ++block.switches;
  switch_fiber(from->fiber, next ? next->fiber : block.main, true);
}

SIMT_RUNTIME inline void start_lanes(Block& block) {
  const unsigned n = block.size.x * block.size.y * block.size.z;
  if (block.lanes.size() != n) {
    for (Lane& lane : block.lanes) free_stack(lane.fiber);
    block.lanes = std::vector<Lane>(n);
  }
  block.warps.assign((n + 31) / 32, Warp{});
  block.queue.clear();
  block.queue_begin = 0;
  block.alive = int(n);
  block.arrived = 0;
  block.phase = 0;
  for (unsigned i = 0; i < n; ++i) {
    Lane& lane = block.lanes[i];
    Warp& warp = block.warps[i / 32];
    lane.id = int(i);
    lane.warp = int(i / 32);
    lane.lane = int(i % 32);
    lane.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    lane.site = {"", 0};
    lane.carved = 0;
    lane.copies.clear();
    lane.group_ends.clear();
    lane.waited = lane.waited_groups = 0;
    lane.accesses.clear();
    warp.lanes[i % 32] = &lane;
    warp.alive |= 1u << (i % 32);
    start_fiber(lane.fiber, fiber_body);
    make_ready(&lane);
  }
}
SIMT_NOTSAN inline void end_fibers([[maybe_unused]] Block& block) {
#ifdef SIMT_TSAN
  // ThreadSanitizer gives the identity of a destroyed fiber to the next one and then takes two blocks for one thread.
  for (Lane& lane : block.lanes) block.old_fibers.push_back(lane.fiber.tsan);
  const size_t drop = block.old_fibers.size() > opt.tsan_keep ? block.old_fibers.size() - opt.tsan_keep : 0;
  for (size_t i = 0; i < drop; ++i) __tsan_destroy_fiber(block.old_fibers[i]);
  block.old_fibers.erase(block.old_fibers.begin(), block.old_fibers.begin() + ptrdiff_t(drop));
#endif
}
SIMT_RUNTIME inline void run_block(Block& block, uint3 index, size_t shared_bytes) {
  block.index = index;
  block.failed = false;
  block.fault.clear();
  block.switches = 0;
  block.random = opt.seed ? opt.seed * 0x9E3779B97F4A7C15ull ^ (index.x * 73856093ull + index.y * 19349663ull + index.z * 83492791ull + 1) : 0;
  block.main = Fiber{};
#ifdef SIMT_TSAN
  block.main.tsan = __tsan_get_current_fiber();
#endif
  allocate_shared(block, shared_bytes);
  start_lanes(block);
  current_lane = next_ready();
  ++block.switches;
  switch_fiber(block.main, current_lane->fiber, false);
  current_lane = nullptr;
  stats.switches.fetch_add(block.switches, std::memory_order_relaxed);
  end_fibers(block);
  check_redzones(block);
  free_shared(block);
}

// Blocks with their stacks, kept from launch to launch. Never destroyed: the process may end while a thread launches.
struct Pool {
  std::mutex mutex;
  std::vector<Block*> idle;
  SIMT_NOTSAN Block* take() {
    std::lock_guard<std::mutex> lock(mutex);
    if (idle.empty()) return new Block;
    Block* block = idle.back();
    idle.pop_back();
    return block;
  }
  SIMT_NOTSAN void give(Block* block) {
    std::lock_guard<std::mutex> lock(mutex);
    idle.push_back(block);
  }
};
inline Pool& pool() {
  static Pool* pool = new Pool;
  return *pool;
}

// Runs entry(argument) in every thread of every block. Throws Fault for the first block, in the grid's order, of those in which something went
// wrong before the others stopped.
inline void launch_grid(dim3 grid, dim3 size, size_t shared_bytes, void (*entry)(void*), void* argument) {
  read_environment();
  const uint64_t total = uint64_t(grid.x) * grid.y * grid.z, threads = uint64_t(size.x) * size.y * size.z;
  if (threads == 0 || threads > 1024) throw Fault("simt: a block of " + std::to_string(threads) + " threads");
  if (total == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    throw Fault("simt: a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks");
  if (shared_bytes > kMaxShared) throw Fault("simt: a block with " + std::to_string(shared_bytes) + " bytes of shared memory");
  std::atomic<uint64_t> next{0}, faulty{total};
  std::mutex mutex;
  std::string fault;
  auto worker = [&] {
    Quiet quiet;
    Block& block = *pool().take();
    Block* outer = current_block;
    current_block = &block;
    block.grid = grid;
    block.size = size;
    block.entry = entry;
    block.argument = argument;
    for (uint64_t i; faulty == total && (i = next.fetch_add(1)) < total;) {
      run_block(block, {unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / (uint64_t(grid.x) * grid.y))}, shared_bytes);
      if (!block.failed) continue;
      std::lock_guard<std::mutex> lock(mutex);
      if (i < faulty) {
        faulty = i;
        fault = block.fault;
      }
    }
    current_block = outer;
    pool().give(&block);
  };
  std::vector<std::thread> others;
  for (uint64_t t = 1; t < std::min<uint64_t>(opt.threads, total); ++t) others.emplace_back(worker);
  worker();
  for (std::thread& thread : others) thread.join();
  acquire(&launch_order);
  if (faulty != total) throw Fault(fault);
}
template <class Body>
inline void launch(dim3 grid, dim3 size, size_t shared_bytes, Body body) {
  launch_grid(grid, size, shared_bytes, [](void* f) { (*(Body*)f)(); }, &body);
}

template <class T>
inline T atomic_add(T* p, T value) {
  if constexpr (std::is_integral<T>::value) {
    return __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  } else {
    T old, sum;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do sum = old + value;
    while (!__atomic_compare_exchange(p, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
  }
}

}  // namespace simt
