#pragma once
// What the lanes of a warp do together: shuffles, ballots, __syncwarp, and the frame of all others.

#include <type_traits>

#include "schedule.h"

namespace simt {

constexpr uint32_t kFullMask = 0xffffffffu;

// Each lane of `mask` has put its operands into `in`; the last to arrive calls finish(warp), which fills `out` of all, and wakes the others.
template <class Finish>
SIMT_RUNTIME inline void collective(uint32_t mask, Op op, Site site, Finish&& finish) {
  Lane& lane = *current_lane;
  Warp& warp = current_block->warps[lane.warp];
  if (!(mask >> lane.lane & 1)) fail(std::string(name(op)) + ": the calling lane is not in the mask", site);
  if (mask & ~warp.alive) fail(std::string(name(op)) + ": the mask names a lane that has exited or never was", site);
  Group* group = nullptr;
  for (int i = 0; i < warp.num_pending; ++i)
    if (warp.pending[i].mask == mask) group = &warp.pending[i];
  if (!group) {
    group = &warp.pending[warp.num_pending++];
    *group = {mask, 0, op, site};
  }
  if (group->op != op || !(group->site == site))
    fail(std::string("divergent warp collective: this lane is at ") + name(op) + ", others at " + name(group->op) + " at " + group->site.text(), site);
  group->arrived |= 1u << lane.lane;
  lane.site = site;
  if (group->arrived != mask) {
    wait_as(State::kAtCollective);
    return;
  }
  *group = warp.pending[--warp.num_pending];
  if (mask == warp.alive) count_accesses(warp);
  finish(warp);
  for (int i = 0; i < 32; ++i)
    if ((mask >> i & 1) && i != lane.lane) make_ready(warp.lanes[i]);
}

SIMT_RUNTIME inline void syncwarp(uint32_t mask, Site site) {
  Quiet quiet;
  Warp& warp = current_block->warps[current_lane->warp];
  void* order = &warp.order[warp.phase & 1];
  release(order);
  collective(mask, Op::kSyncwarp, site, [](Warp& w) { ++w.phase; });
  acquire(order);
}

// Which lane PTX's shfl reads: within segments of `width`, the own lane where the other one lies outside.
inline int shuffle_source(Op op, int lane, uint32_t argument, int width) {
  const int segment = lane & ~(width - 1), by = int(argument & 31);
  int source = lane;
  if (op == Op::kShfl) return segment + int(argument & uint32_t(width - 1));
  if (op == Op::kShflXor) source = lane ^ by;
  if (op == Op::kShflDown) source = lane + by;
  if (op == Op::kShflUp) return lane - by < segment ? lane : lane - by;
  return source >= segment + width ? lane : source;
}
SIMT_RUNTIME inline uint32_t shuffle_word(uint32_t mask, uint32_t value, uint32_t argument, int width, Op op, Site site) {
  Quiet quiet;
  Lane& lane = *current_lane;
  lane.in[0] = value;
  lane.in[1] = uint32_t(shuffle_source(op, lane.lane, argument, width));
  collective(mask, op, site, [=](Warp& warp) {
    for (int i = 0; i < 32; ++i) {
      if (!(mask >> i & 1)) continue;
      Lane* l = warp.lanes[i];
      if (!(mask >> l->in[1] & 1))
        fail(std::string(name(op)) + ": lane " + std::to_string(i) + " reads lane " + std::to_string(l->in[1]) + ", not in the mask", site);
      l->out[0] = warp.lanes[l->in[1]]->in[0];
    }
  });
  return lane.out[0];
}
template <class T>
inline T shuffle(uint32_t mask, T value, uint32_t argument, int width, Op op, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  if (width < 1 || width > 32 || (width & (width - 1))) fail("shuffle: width must be a power of two up to 32", site);
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  for (uint32_t& word : words) word = shuffle_word(mask, word, argument, width, op, site);
  memcpy(&value, words, sizeof(T));
  return value;
}

SIMT_RUNTIME inline uint32_t ballot(uint32_t mask, bool vote, Site site) {
  Quiet quiet;
  current_lane->in[0] = vote;
  collective(mask, Op::kBallot, site, [=](Warp& warp) {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) result |= warp.lanes[i]->in[0] << i;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) warp.lanes[i]->out[0] = result;
  });
  return current_lane->out[0];
}

}  // namespace simt
