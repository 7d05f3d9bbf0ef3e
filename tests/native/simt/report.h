#pragma once
// What a user sets and reads: options, counts, and the fault that a launch ends with.

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "platform.h"

namespace simt {

struct Options {
  uint64_t seed = 0;    // 0: threads run in order; otherwise the next one is drawn at random
  int async_mode = 1;   // cp.async writes 0: at once; 1: NaN at once and the data at the wait; 2: the data at the wait
  unsigned threads = 1; // of the host, each with one block at a time
  size_t stack = 0;     // bytes per thread of a block; 0: as the build needs
  size_t tsan_keep = 1024;  // fibers of finished blocks kept, for races between blocks
  bool smem_poison = true;  // shared memory starts as 0xFF: NaN in every float type
};
inline Options opt;

// SIMT_SEED, SIMT_ASYNC, SIMT_THREADS and SIMT_STACK replace what the program has set, once, at its first launch.
inline void read_environment() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (const char* v = getenv("SIMT_SEED")) opt.seed = strtoull(v, nullptr, 10);
    if (const char* v = getenv("SIMT_ASYNC")) opt.async_mode = atoi(v);
    if (const char* v = getenv("SIMT_THREADS")) opt.threads = std::max(1u, unsigned(atoi(v)));
    if (const char* v = getenv("SIMT_STACK")) opt.stack = strtoull(v, nullptr, 10);
  });
}

// Since the start of the process.
struct Stats {
  std::atomic<uint64_t> switches{0};                             // from one emulated thread to another
  std::atomic<uint64_t> mma{0}, ldsm{0}, cp{0}, barriers{0};     // warps' mma.sync and ldmatrix, threads' cp.async, blocks' barriers
  std::atomic<uint64_t> ldsm_extra_wavefronts{0};                // bank conflicts of ldmatrix
  std::atomic<uint64_t> shared_accesses{0}, shared_extra_wavefronts{0};  // of warps, counted in builds with SIMT_TRACE_SHARED
};
inline Stats stats;

// A launch whose kernel did something wrong throws this after all of its threads have ended.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Ends one thread of a block in which something went wrong; never leaves the fiber.
struct Unwind {};

// A call in a kernel.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  bool operator==(const Site& o) const { return line == o.line && file == o.file; }
  std::string text() const {
    if (!line) return "its end";
    std::string name = file;
    return name.substr(name.find_last_of('/') + 1) + ":" + std::to_string(line);
  }
};

}  // namespace simt
