#pragma once
// cp.async: what is copied cannot be used before the thread that asked for it has waited.

#include "shared_memory.h"

namespace simt {

SIMT_UNTRACED inline void copy16(const Copy& copy) { *(uint4*)copy.target = copy.reads ? *(const uint4*)copy.source : uint4{0, 0, 0, 0}; }

SIMT_RUNTIME inline void begin_copy(const Copy& copy, Site site) {
  Quiet quiet;
  check_shared16(copy.target, site);
  if (copy.reads && (uintptr_t)copy.source % 16) fail("the source of cp.async is not aligned to 16 bytes", site);
  stats.cp.fetch_add(1, std::memory_order_relaxed);
  current_lane->copies.push_back(copy);
}
// The next copy that a wait for all but `keep` groups has to finish, if there is one.
SIMT_RUNTIME inline bool next_copy(size_t keep, Copy* copy) {
  Quiet quiet;
  Lane& lane = *current_lane;
  while (lane.waited_groups + keep < lane.group_ends.size()) {
    if (lane.waited < lane.group_ends[lane.waited_groups]) {
      *copy = lane.copies[lane.waited++];
      return true;
    }
    ++lane.waited_groups;
  }
  if (lane.waited_groups == lane.group_ends.size()) {
    lane.waited_groups = 0;
    lane.group_ends.clear();
    lane.copies.erase(lane.copies.begin(), lane.copies.begin() + ptrdiff_t(lane.waited));
    lane.waited = 0;
  }
  return false;
}
// Copies that no wait has finished.
SIMT_NOTSAN inline bool copies_in_flight(const Lane& lane) { return lane.waited < lane.copies.size(); }

SIMT_UNTRACED inline void cp_async16(void* dst, const void* src, bool pred, Site site = Site::here()) {
  const Copy copy{dst, src, pred};
  begin_copy(copy, site);
  if (opt.async_mode == 0) copy16(copy);
  if (opt.async_mode == 1) *(uint4*)dst = uint4{~0u, ~0u, ~0u, ~0u};
}
SIMT_NOTSAN inline void cp_async_commit() {
  Quiet quiet;
  current_lane->group_ends.push_back(current_lane->copies.size());
}
template <int N>
inline void cp_async_wait() {
  Copy copy;
  while (next_copy(N, &copy))
    if (opt.async_mode) copy16(copy);
}

}  // namespace simt
