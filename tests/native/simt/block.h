#pragma once
// A block: its threads, warps, shared memory, and the queue of threads that can go on.

#include <cstdio>

#include "fibers.h"

namespace simt {

struct Copy {  // of 16 bytes, by cp.async
  void* target;
  const void* source;
  bool reads;  // otherwise zeros
};

enum class Op : int { kMmaF16, kMmaBf16, kMmaTf32, kLdmatrix, kLdmatrixTrans, kShfl, kShflXor, kShflDown, kShflUp, kSyncwarp, kBallot };
inline const char* name(Op op) {
  constexpr const char* kNames[] = {"mma.m16n8k16.f16", "mma.m16n8k16.bf16", "mma.m16n8k8.tf32", "ldmatrix", "ldmatrix.trans", "shfl.idx",
                                    "shfl.bfly",        "shfl.down",         "shfl.up",          "bar.warp", "vote.ballot"};
  return kNames[int(op)];
}

// One access of shared memory, kept until those of the other lanes are known.
struct Access {
  const void* pc;
  uintptr_t address;
  unsigned bytes;
};

enum class State { kReady, kAtCollective, kAtBarrier, kEnded };

// A thread. Operands of warp collectives go through `in` and `out`, so that the last lane to arrive can compute for all.
struct Lane {
  alignas(16) uint32_t in[12];
  alignas(16) uint32_t out[4];
  uint3 index{};
  int id = 0, warp = 0, lane = 0;
  State state = State::kEnded;
  Site site{"", 0};  // where it waits
  unsigned carved = 0;  // layouts of shared memory that it has begun
  // cp.async: copies[waited..] are in flight; a committed group ends before copies[group_ends[g]].
  std::vector<Copy> copies;
  std::vector<size_t> group_ends;
  size_t waited = 0, waited_groups = 0;
  std::vector<Access> accesses;
  Fiber fiber;
};

// Lanes that wait for each other: those that named the same mask.
struct Group {
  uint32_t mask, arrived;
  Op op;
  Site site;
};
struct Warp {
  Lane* lanes[32] = {};
  uint32_t alive = 0;
  Group pending[32];
  int num_pending = 0;
  unsigned phase = 0;
  char order[2];  // for release() and acquire() by __syncwarp
};

// A piece of shared memory, followed by kRedzone bytes that nobody may touch.
struct Piece {
  const void* key;  // of a static array; null: carved out of the dynamic memory
  unsigned char* data;
  size_t bytes;
};

struct Block {
  dim3 grid, size;
  uint3 index{};
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::vector<Lane*> queue;  // ready lanes from queue_begin on
  size_t queue_begin = 0;
  int alive = 0, arrived = 0;
  unsigned phase = 0;
  Site barrier{"", 0};
  char order[2];  // for release() and acquire() by __syncthreads
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0, shared_allocated = 0;
  unsigned layouts = 0;  // of the dynamic memory so far
  std::vector<Piece> carved, statics;
  uint64_t random = 0, switches = 0;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  bool failed = false;
  std::string fault;
  Fiber main;  // the thread of the host that runs the block
  std::vector<void*> old_fibers;
};

inline SIMT_THREAD_LOCAL Block* current_block = nullptr;
inline SIMT_THREAD_LOCAL Lane* current_lane = nullptr;

SIMT_NOTSAN inline uint3 thread_index() { return current_lane->index; }
SIMT_NOTSAN inline uint3 block_index() { return current_block->index; }
SIMT_NOTSAN inline uint3 block_size() { return {current_block->size.x, current_block->size.y, current_block->size.z}; }
SIMT_NOTSAN inline uint3 grid_size() { return {current_block->grid.x, current_block->grid.y, current_block->grid.z}; }

// Records the first fault of a block. All of its threads then unwind.
SIMT_RUNTIME inline void record_fault(const std::string& what) {
  Block& block = *current_block;
  if (block.failed) return;
  block.failed = true;
  const uint3 b = block.index;
  block.fault = "simt: block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + "): " + what;
}
[[noreturn]] SIMT_RUNTIME inline void fail(const std::string& what, Site site) {
  Quiet quiet;
  const Lane& lane = *current_lane;
  record_fault("thread " + std::to_string(lane.id) + " (warp " + std::to_string(lane.warp) + ", lane " + std::to_string(lane.lane) + ") at " + site.text() +
               ": " + what);
  throw Unwind{};
}

}  // namespace simt
