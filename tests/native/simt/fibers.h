#pragma once
// One fiber per thread of a block: a stack of its own and a switch of six registers.

#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "report.h"

#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#define SIMT_USE_UCONTEXT 1
#include <ucontext.h>
#else
#define SIMT_USE_UCONTEXT 0
#endif

namespace simt {

// While one lives, ThreadSanitizer does not see the fiber's accesses.
struct Quiet {
#ifdef SIMT_TSAN
  SIMT_NOTSAN Quiet() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  SIMT_NOTSAN ~Quiet() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
};

// What one fiber did before is seen by another only through these, which stand for barriers; switching as such orders nothing.
SIMT_NOTSAN inline void release([[maybe_unused]] void* where) {
#ifdef SIMT_TSAN
  __tsan_release(where);
#endif
}
SIMT_NOTSAN inline void acquire([[maybe_unused]] void* where) {
#ifdef SIMT_TSAN
  __tsan_acquire(where);
#endif
}

struct Fiber {
  void* stack_pointer = nullptr;
#if SIMT_USE_UCONTEXT
  ucontext_t context;
#endif
  char* stack = nullptr;  // lowest byte; below it lies a page that cannot be touched
  size_t stack_size = 0;
  void *fake_stack = nullptr, *tsan = nullptr;
};

constexpr size_t kPage = 4096;
#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
constexpr size_t kStack = 512 << 10;
#else
constexpr size_t kStack = 128 << 10;
#endif

inline void free_stack(Fiber& fiber) {
  if (fiber.stack) munmap(fiber.stack - kPage, fiber.stack_size + kPage);
  fiber.stack = nullptr;
}

// Makes `fiber` start with body() when it is switched to. Stacks stay from block to block.
inline void start_fiber(Fiber& fiber, void (*body)()) {
  const size_t bytes = (opt.stack ? opt.stack + kPage - 1 : kStack) / kPage * kPage;
  constexpr int kProtection = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (fiber.stack_size != bytes) free_stack(fiber);
  if (!fiber.stack) {
    void* memory = mmap(nullptr, bytes + kPage, kProtection, kFlags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, kPage, PROT_NONE);
    fiber.stack = (char*)memory + kPage;
    fiber.stack_size = bytes;
  }
#ifdef SIMT_TSAN
  // To ThreadSanitizer the next block's fiber is another thread on the same stack: a fresh mapping forgets the last one's accesses.
  mmap(fiber.stack, bytes, kProtection, kFlags | MAP_FIXED, -1, 0);
  fiber.tsan = __tsan_create_fiber(0);
#endif
#if SIMT_USE_UCONTEXT
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, body, 0);
#else
  // As after the switch's six pushes, with body() to return to and the stack aligned as after a call.
  void** top = (void**)(fiber.stack + bytes - 64);
  *--top = nullptr;
  *--top = (void*)body;
  top -= 6;
  memset(top, 0, 6 * sizeof(void*));
  fiber.stack_pointer = top;
#endif
}

#if !SIMT_USE_UCONTEXT
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wunused-parameter"
#define SIMT_OPAQUE __attribute__((naked, noinline))
#else
#define SIMT_OPAQUE __attribute__((naked, noipa))  // -fipa-ra would trust that the body clobbers nothing
#endif
SIMT_OPAQUE inline void switch_stacks(void** /*rdi: where to save*/, void* /*rsi: what to load*/) {
  asm volatile("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
               "movq %rsp,(%rdi); movq %rsi,%rsp\n"
               "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
#endif

// Returns when something switches back to `from`, which `from_ends` excludes.
SIMT_NOTSAN inline void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool from_ends) {
#ifdef SIMT_ASAN
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.fake_stack, to.stack, to.stack_size);
#endif
#ifdef SIMT_TSAN
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if SIMT_USE_UCONTEXT
  swapcontext(&from.context, &to.context);
#else
  switch_stacks(&from.stack_pointer, to.stack_pointer);
#endif
#ifdef SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// First thing in a new fiber: `from` is the one that switched to it.
inline void enter_fiber([[maybe_unused]] Fiber& from) {
#ifdef SIMT_ASAN
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (!from.stack) {
    from.stack = (char*)bottom;
    from.stack_size = size;
  }
#endif
}

}  // namespace simt
