#pragma once
// Bank conflicts: of every ldmatrix, and in builds with SIMT_TRACE_SHARED of every load and store of shared memory.
//
// Such a build compiles the kernels with -fsanitize=thread, which puts a call before each access, and links without it: the functions called are here.
// Add -fno-tree-sra -fno-tree-vectorize, so that accesses are as wide as the source writes them, and -fno-tree-sink, so that every lane makes those that
// stand before a branch.

#include <dlfcn.h>

#include <map>
#include <tuple>
#include <utility>

#include "block.h"

namespace simt {

constexpr unsigned kMaxBytes = 16;  // of one access; the copy of a structure is several

// Wavefronts beyond the unavoidable ones when the lanes of `mask` access `bytes` each at once. Lanes are served 32 at a time, 16 if they access
// 8 bytes, 8 if 16; a wavefront delivers one word of each of 32 banks of 4 bytes to whoever wants it.
SIMT_NOTSAN inline unsigned extra_wavefronts(const uintptr_t* address, uint32_t mask, unsigned bytes) {
  const int together = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  unsigned extra = 0;
  for (int first = 0; first < 32; first += together) {
    uintptr_t words[8 * kMaxBytes / 4];  // distinct
    int num_words = 0;
    unsigned load[32] = {}, most = 0;
    for (int lane = first; lane < first + together; ++lane) {
      if (!(mask >> lane & 1)) continue;
      for (unsigned byte = 0; byte < bytes; byte += 4) {
        const uintptr_t word = (address[lane] + byte) / 4;
        if (std::find(words, words + num_words, word) != words + num_words) continue;
        words[num_words++] = word;
        most = std::max(most, ++load[word % 32]);
      }
    }
    extra += most > 1 ? most - 1 : 0;
  }
  return extra;
}

// Where conflicts were seen: a site of ldmatrix, or the address of an instruction.
struct ConflictSite {
  const char* file;
  int line;
  const void* pc;
  bool operator<(const ConflictSite& o) const { return std::tie(file, line, pc) < std::tie(o.file, o.line, o.pc); }
};
struct ConflictCount {
  uint64_t accesses = 0, extra = 0;  // accesses with conflicts, and their extra wavefronts
};
struct Conflicts {
  std::mutex mutex;
  std::map<ConflictSite, ConflictCount> sites;
};
inline Conflicts conflicts;

SIMT_NOTSAN inline void add_conflict(const ConflictSite& site, unsigned extra) {
  std::lock_guard<std::mutex> lock(conflicts.mutex);
  ConflictCount& count = conflicts.sites[site];
  ++count.accesses;
  count.extra += extra;
}
// One line per site: accesses with conflicts, extra wavefronts, and file:line or program+offset (for addr2line).
inline void print_conflicts(FILE* out) {
  std::lock_guard<std::mutex> lock(conflicts.mutex);
  for (const auto& [site, count] : conflicts.sites) {
    fprintf(out, "bank conflicts: %llu accesses, %llu extra wavefronts at ", (unsigned long long)count.accesses, (unsigned long long)count.extra);
    Dl_info info;
    if (!site.pc) fprintf(out, "%s ldmatrix\n", Site{site.file, site.line}.text().c_str());
    else if (dladdr(site.pc, &info)) fprintf(out, "%s+0x%zx\n", info.dli_fname, size_t((const char*)site.pc - (const char*)info.dli_fbase));
    else fprintf(out, "%p\n", site.pc);
  }
}

#ifdef SIMT_TRACE_SHARED
// The n-th time that one lane comes to an instruction since the warp last met belongs with the n-th time of the others.
SIMT_NOTSAN inline void count_accesses(Warp& warp) {
  struct Together {
    uintptr_t address[32];
    uint32_t mask = 0;
    unsigned bytes = 0;
  };
  std::map<std::pair<const void*, int>, Together> groups;
  for (int i = 0; i < 32; ++i) {
    if (!warp.lanes[i]) continue;
    std::map<const void*, int> times;
    for (const Access& access : warp.lanes[i]->accesses) {
      Together& group = groups[{access.pc, times[access.pc]++}];
      group.address[i] = access.address;
      group.mask |= 1u << i;
      group.bytes = access.bytes;
    }
    warp.lanes[i]->accesses.clear();
  }
  for (const auto& [key, group] : groups) {
    const unsigned extra = extra_wavefronts(group.address, group.mask, group.bytes);
    stats.shared_accesses.fetch_add(1, std::memory_order_relaxed);
    stats.shared_extra_wavefronts.fetch_add(extra, std::memory_order_relaxed);
    if (extra) add_conflict({nullptr, 0, key.first}, extra);
  }
}
inline SIMT_THREAD_LOCAL bool tracing = false;  // what the trace itself reads is traced too
SIMT_NOTSAN inline void trace_access(const void* address, unsigned bytes, const void* pc) {
  if (!current_lane || tracing) return;
  tracing = true;
  const auto* p = (const unsigned char*)address;
  bool shared = p >= current_block->shared && p < current_block->shared + current_block->shared_allocated;
  for (const Piece& piece : current_block->statics) shared |= p >= piece.data && p < piece.data + piece.bytes;
  for (unsigned at = 0; shared && at < bytes; at += kMaxBytes) current_lane->accesses.push_back({pc, (uintptr_t)p + at, std::min(bytes - at, kMaxBytes)});
  tracing = false;
}
#else
inline void count_accesses(Warp&) {}
#endif

}  // namespace simt

#ifdef SIMT_TRACE_SHARED
extern "C" {
#define SIMT_HOOK __attribute__((weak, noinline, no_sanitize("thread"))) void
SIMT_HOOK __tsan_init() {}
SIMT_HOOK __tsan_func_entry(void*) {}
SIMT_HOOK __tsan_func_exit(void*) {}
SIMT_HOOK __tsan_vptr_update(void**, void*) {}
SIMT_HOOK __tsan_vptr_read(void**) {}
#define SIMT_HOOKS(n)                                                                                               \
  SIMT_HOOK __tsan_read##n(void* address) { simt::trace_access(address, n, __builtin_return_address(0)); }          \
  SIMT_HOOK __tsan_write##n(void* address) { simt::trace_access(address, n, __builtin_return_address(0)); }         \
  SIMT_HOOK __tsan_volatile_read##n(void* address) { simt::trace_access(address, n, __builtin_return_address(0)); } \
  SIMT_HOOK __tsan_volatile_write##n(void* address) { simt::trace_access(address, n, __builtin_return_address(0)); }
SIMT_HOOKS(1)
SIMT_HOOKS(2)
SIMT_HOOKS(4)
SIMT_HOOKS(8)
SIMT_HOOKS(16)
SIMT_HOOK __tsan_read_range(void* address, unsigned long size) { simt::trace_access(address, unsigned(size), __builtin_return_address(0)); }
SIMT_HOOK __tsan_write_range(void* address, unsigned long size) { simt::trace_access(address, unsigned(size), __builtin_return_address(0)); }
// Atomic operations of the standard library and of atomicAdd; they conflict in no bank that this counts.
#define SIMT_PLAIN_HOOK __attribute__((weak, noinline, no_sanitize("thread")))
#define SIMT_ATOMIC_HOOKS(bits, T)                                                                                                                  \
  SIMT_PLAIN_HOOK T __tsan_atomic##bits##_load(const volatile void* p, int) { return __atomic_load_n((const volatile T*)p, __ATOMIC_SEQ_CST); }     \
  SIMT_PLAIN_HOOK void __tsan_atomic##bits##_store(volatile void* p, T v, int) { __atomic_store_n((volatile T*)p, v, __ATOMIC_SEQ_CST); }           \
  SIMT_PLAIN_HOOK T __tsan_atomic##bits##_exchange(volatile void* p, T v, int) { return __atomic_exchange_n((volatile T*)p, v, __ATOMIC_SEQ_CST); } \
  SIMT_PLAIN_HOOK T __tsan_atomic##bits##_fetch_add(volatile void* p, T v, int) { return __atomic_fetch_add((volatile T*)p, v, __ATOMIC_SEQ_CST); } \
  SIMT_PLAIN_HOOK T __tsan_atomic##bits##_fetch_sub(volatile void* p, T v, int) { return __atomic_fetch_sub((volatile T*)p, v, __ATOMIC_SEQ_CST); } \
  SIMT_PLAIN_HOOK bool __tsan_atomic##bits##_compare_exchange_strong(volatile void* p, void* old, T v, int, int) {                                  \
    return __atomic_compare_exchange_n((volatile T*)p, (T*)old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                                      \
  }                                                                                                                                                 \
  SIMT_PLAIN_HOOK bool __tsan_atomic##bits##_compare_exchange_weak(volatile void* p, void* old, T v, int, int) {                                    \
    return __atomic_compare_exchange_n((volatile T*)p, (T*)old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                                      \
  }
SIMT_ATOMIC_HOOKS(8, uint8_t)
SIMT_ATOMIC_HOOKS(32, uint32_t)
SIMT_ATOMIC_HOOKS(64, uint64_t)
SIMT_PLAIN_HOOK void __tsan_atomic_thread_fence(int) {}
}
#endif
