#pragma once
// Which thread of a block runs next, barriers, and what is said when nobody can.

#include "bank_conflicts.h"

namespace simt {

SIMT_NOTSAN inline void make_ready(Lane* lane) {
  lane->state = State::kReady;
  current_block->queue.push_back(lane);
}
// The next ready lane, or null.
SIMT_NOTSAN inline Lane* next_ready() {
  Block& block = *current_block;
  auto& queue = block.queue;
  if (block.queue_begin == queue.size()) return nullptr;
  if (block.random) {  // xorshift
    block.random ^= block.random << 13;
    block.random ^= block.random >> 7;
    block.random ^= block.random << 17;
    std::swap(queue[block.queue_begin], queue[block.queue_begin + block.random % (queue.size() - block.queue_begin)]);
  }
  Lane* lane = queue[block.queue_begin++];
  if (block.queue_begin == queue.size()) {
    queue.clear();
    block.queue_begin = 0;
  }
  return lane;
}
SIMT_NOTSAN inline void switch_to(Lane* to) {
  Lane* from = current_lane;
  current_lane = to;
  ++current_block->switches;
  switch_fiber(from->fiber, to->fiber, from->state == State::kEnded);
}

[[noreturn]] SIMT_RUNTIME inline void report_deadlock() {
  const Block& block = *current_block;
  std::string text = "deadlock: " + std::to_string(block.alive) + " of " + std::to_string(block.lanes.size()) + " threads are left, none can go on";
  char line[256];
  for (const Warp& warp : block.warps)
    for (int i = 0; i < warp.num_pending; ++i) {
      const Group& group = warp.pending[i];
      snprintf(line, sizeof line, "\n  warp %d: %s at %s waits for lanes %08x, lanes %08x are there, %08x have not ended", warp.lanes[0]->warp, name(group.op),
               group.site.text().c_str(), group.mask, group.arrived, warp.alive);
      text += line;
    }
  for (const Lane& lane : block.lanes)
    if (lane.state == State::kAtBarrier) {
      snprintf(line, sizeof line, "\n  %d threads wait in __syncthreads, thread %d at %s", block.arrived, lane.id, lane.site.text().c_str());
      text += line;
      break;
    }
  record_fault(text);
  throw Unwind{};
}

// Gives up the processor until another lane makes this one ready.
SIMT_RUNTIME inline void wait_as(State state) {
  current_lane->state = state;
  Lane* next = next_ready();
  if (!next) report_deadlock();
  if (next != current_lane) switch_to(next);
  if (current_block->failed) throw Unwind{};
}

SIMT_RUNTIME inline void release_barrier() {
  Block& block = *current_block;
  for (Warp& warp : block.warps) count_accesses(warp);
  for (Lane& lane : block.lanes)
    if (lane.state == State::kAtBarrier) make_ready(&lane);
  block.arrived = 0;
  ++block.phase;
}
SIMT_RUNTIME inline void syncthreads(Site site) {
  Quiet quiet;
  Block& block = *current_block;
  if (block.arrived == 0) block.barrier = site;
  if (!(block.barrier == site)) fail("divergent __syncthreads: other threads of the block wait at " + block.barrier.text(), site);
  current_lane->site = site;
  void* order = &block.order[block.phase & 1];
  release(order);
  if (++block.arrived == block.alive) {
    release_barrier();
    stats.barriers.fetch_add(1, std::memory_order_relaxed);
  } else {
    wait_as(State::kAtBarrier);
  }
  acquire(order);
}

}  // namespace simt
