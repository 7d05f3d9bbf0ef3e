#pragma once
// Shared memory: NaN where nothing was written, and a zone behind every piece that nobody may touch.
//
// AddressSanitizer reports an access of such a zone where it happens; without it, a write there is found when the block ends.

#include "collectives.h"

namespace simt {

constexpr size_t kAlign = 128, kRedzone = 256;  // both multiples of 128 bytes, so that banks are those of the device
constexpr size_t kMaxPieces = 32;
constexpr unsigned char kFill = 0xff;

inline size_t round_up(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

inline void hide([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef SIMT_ASAN
  ASAN_POISON_MEMORY_REGION(p, bytes);
#endif
}
inline void show([[maybe_unused]] const void* p, [[maybe_unused]] size_t bytes) {
#ifdef SIMT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(p, bytes);
#endif
}

// Memory of a block as it starts: hidden, or not, and full of NaN.
SIMT_NOTSAN inline unsigned char* new_shared(size_t bytes) {
  auto* p = (unsigned char*)aligned_alloc(kAlign, bytes);
  if (!p) throw std::bad_alloc();
  memset(p, opt.smem_poison ? kFill : 0, bytes);
  return p;
}
SIMT_RUNTIME inline void check_redzone(const Piece& piece) {
  show(piece.data, piece.bytes + kRedzone);
  for (size_t i = 0; i < kRedzone; ++i)
    if (piece.data[piece.bytes + i] != kFill)
      record_fault("a thread wrote " + std::to_string(i) + " bytes behind the end of " + (piece.key ? "a static" : "a dynamic") + " shared array of " +
                   std::to_string(piece.bytes) + " bytes");
}
SIMT_NOTSAN inline void check_redzones(Block& block) {
  for (const Piece& piece : block.carved) check_redzone(piece);
  for (const Piece& piece : block.statics) check_redzone(piece);
}

SIMT_NOTSAN inline void allocate_shared(Block& block, size_t bytes) {
  block.shared_bytes = bytes;
  block.shared_allocated = bytes ? round_up(bytes) + kMaxPieces * kRedzone : 0;
  block.shared = bytes ? new_shared(block.shared_allocated) : nullptr;
  block.layouts = 0;
  block.carved.clear();
  block.statics.reserve(kMaxPieces);  // a trace looks at them whenever memory is written
  if (!bytes) return;
  memset(block.shared + bytes, kFill, block.shared_allocated - bytes);
  hide(block.shared + bytes, block.shared_allocated - bytes);
  block.carved.push_back({nullptr, block.shared, bytes});  // until it is carved
}
SIMT_NOTSAN inline void free_shared(Block& block) {
  if (block.shared) show(block.shared, block.shared_allocated);
  free(block.shared);
  block.shared = nullptr;
  for (const Piece& piece : block.statics) free(piece.data);
  block.statics.clear();
  block.carved.clear();
}

SIMT_NOTSAN inline unsigned char* dynamic_shared() { return current_block->shared; }
// `key` tells one static array from another.
SIMT_RUNTIME inline void* static_shared(const void* key, size_t bytes) {
  Quiet quiet;
  for (const Piece& piece : current_block->statics)
    if (piece.key == key) return piece.data;
  const size_t allocated = round_up(bytes) + kRedzone;
  unsigned char* p = new_shared(allocated);
  memset(p + bytes, kFill, allocated - bytes);
  hide(p + bytes, allocated - bytes);
  current_block->statics.push_back({key, p, bytes});
  return p;
}

// Cuts the dynamic shared memory into arrays: on the device one behind the other, here with a zone behind each. All threads must cut alike;
// a second Carver begins a new layout of the same memory.
struct Carver {
  unsigned char* p;
  size_t taken = 0, pieces = 0;
  unsigned layout;
  Site site;
  SIMT_NOTSAN explicit Carver(unsigned char* base, Site at = Site::here()) : p(base), layout(++current_lane->carved), site(at) {
    Quiet quiet;
    Block& block = *current_block;
    if (layout <= block.layouts) return;
    for (const Piece& piece : block.carved) check_redzone(piece);
    if (block.failed) throw Unwind{};
    block.layouts = layout;
    block.carved.clear();
    hide(block.shared, block.shared_allocated);
  }
  template <class T>
  SIMT_NOTSAN T* take(size_t count) {
    Quiet quiet;
    Block& block = *current_block;
    unsigned char* data = p;
    const size_t bytes = count * sizeof(T);
    taken += bytes;
    if (taken > block.shared_bytes) fail("the carved arrays need more shared memory than the launch gave", site);
    if ((uintptr_t)data % alignof(T)) fail("a carved array is not aligned to its elements", site);
    if (pieces == kMaxPieces) fail("too many carved arrays", site);
    if (layout == block.layouts) {
      if (pieces == block.carved.size()) {
        block.carved.push_back({nullptr, data, bytes});
        show(data, bytes + kRedzone);
        memset(data + bytes, kFill, kRedzone);
        hide(data + bytes, kRedzone);
      } else if (block.carved[pieces].data != data || block.carved[pieces].bytes != bytes) {
        fail("the threads of a block carve its shared memory in different ways", site);
      }
    }
    ++pieces;
    p += bytes + kRedzone;
    return (T*)data;
  }
};

// Operands of ldmatrix, and targets of cp.async.
SIMT_RUNTIME inline void check_shared16(const void* pointer, Site site) {
  const auto* p = (const unsigned char*)pointer;
  const Block& block = *current_block;
  if ((uintptr_t)p % 16) fail("an operand in shared memory is not aligned to 16 bytes", site);
  for (const auto* pieces : {&block.carved, &block.statics})
    for (const Piece& piece : *pieces)
      if (p >= piece.data && p + 16 <= piece.data + piece.bytes) return;
  fail("an operand lies outside the block's shared memory", site);
}

}  // namespace simt
