// Small kernels, each with one fault (but for those named ok_*). Argument: the kernel. Exits with 0 after a right result, 2 after a wrong one, 3 where
// the emulator reports a fault; sanitizers end the process in their own way.

#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cuda/device.cuh"

namespace {

#define SHARED_INTS(name)      \
  SIMT_DYNAMIC_SHARED(memory); \
  int* const name = (int*)memory
const auto neighbour = [](unsigned t, unsigned n) { return (t + 32) % n; };

// ---- Order of memory accesses. Every one of these gives out[i] = the index of the thread that it reads from.

__global__ void ok_block(int* out) {
  SHARED_INTS(s);
  for (int i = 0; i < 4; ++i) {
    s[threadIdx.x] = int(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = s[neighbour(threadIdx.x, blockDim.x)];
    __syncthreads();
  }
}
__global__ void ok_warp(int* out) {
  SHARED_INTS(s);
  for (int i = 0; i < 4; ++i) {
    s[threadIdx.x] = int(threadIdx.x);
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x ^ 1];
    __syncwarp();
  }
}
__global__ void race_block(int* out) {
  SHARED_INTS(s);
  s[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = s[neighbour(threadIdx.x, blockDim.x)];
}
__global__ void race_warp(int* out) {
  SHARED_INTS(s);
  s[threadIdx.x] = int(threadIdx.x);
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void race_write_after_read(int* out) {
  SHARED_INTS(s);
  s[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[neighbour(threadIdx.x, blockDim.x)];
  s[threadIdx.x] = -1;  // others may not have read yet
}
__global__ void race_shuffle(int* out) {  // a shuffle orders no memory
  SHARED_INTS(s);
  s[threadIdx.x] = int(threadIdx.x);
  const int zero = __shfl_xor_sync(0xffffffffu, 0, 1);
  out[threadIdx.x] = s[threadIdx.x ^ 1] + zero;
}
__global__ void race_grid(int* out) {  // two blocks, one element
  if (blockIdx.x == 0 || threadIdx.x == 0) out[threadIdx.x] = int(threadIdx.x ^ 1);
}

// ---- Memory that is not there, and memory that nobody wrote.

__global__ void outside_dynamic(int* out) {
  SHARED_INTS(s);
  s[threadIdx.x + 1] = int(threadIdx.x ^ 1);
  __syncthreads();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void outside_static(int* out) {
  SIMT_SHARED(int, s, [32]);
  s[threadIdx.x + 1] = int(threadIdx.x ^ 1);
  __syncthreads();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void outside_carved(int* out) {  // into the next array
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carve(memory);
  int* const first = carve.take<int>(32);
  int* const second = carve.take<int>(32);
  first[threadIdx.x + 1] = 0;
  __syncthreads();
  second[threadIdx.x] = int(threadIdx.x ^ 1);
  out[threadIdx.x] = second[threadIdx.x];
}
__global__ void ok_carved(int* out) {  // twice: the second layout lies over the first
  SIMT_DYNAMIC_SHARED(memory);
  for (int count : {32, 16}) {
    simt::Carver carve(memory);
    int* const first = carve.take<int>(count);
    int* const second = carve.take<int>(32);
    if (int(threadIdx.x) < count) first[threadIdx.x] = 0;
    second[threadIdx.x] = int(threadIdx.x ^ 1);
    out[threadIdx.x] = second[threadIdx.x];
    __syncthreads();
  }
}
__global__ void outside_read(int* out) {
  SHARED_INTS(s);
  s[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[(threadIdx.x ^ 1) + (threadIdx.x == 31 ? 2u : 0u)];
}
__global__ void outside_global(int* out) { out[threadIdx.x + (threadIdx.x == 31 ? 1u : 0u)] = int(threadIdx.x ^ 1); }
__global__ void outside_local(int* out) {
  int a[4] = {0, 1, 2, 3};
  out[threadIdx.x] = int(threadIdx.x ^ 1) + (a[(threadIdx.x + 4) % 8] == 4);
}
__global__ void carved_too_much(int* out) {
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carve(memory);
  out[threadIdx.x] = carve.take<int>(33) ? int(threadIdx.x ^ 1) : 0;
}
__global__ void carved_apart(int* out) {
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carve(memory);
  out[threadIdx.x] = carve.take<int>(threadIdx.x ? 32 : 16) ? int(threadIdx.x ^ 1) : 0;
}
__global__ void never_written(int* out) {
  SHARED_INTS(s);
  if (threadIdx.x) s[threadIdx.x] = int(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x ^ 1];
}
__global__ void misaligned(int* out) {
  SIMT_DYNAMIC_SHARED(memory);
  auto* p = (uint2*)(memory + 4 + 8 * (threadIdx.x % 8));
  p->x = 1;
  __syncthreads();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void overflow(int* out, int large) { out[threadIdx.x] = int(threadIdx.x ^ 1) + (int(threadIdx.x) * large == 1); }

// ---- Threads that wait for each other in vain.

__global__ void barrier_divergent(int* out) {
  out[threadIdx.x] = int(threadIdx.x ^ 1);
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void deadlock(int* out) {
  out[threadIdx.x] = int(threadIdx.x ^ 1);
  if (threadIdx.x < 16) __syncwarp();
  else __syncthreads();
}
__global__ void shuffle_exited(int* out) {
  if (threadIdx.x == 0) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}
__global__ void shuffle_left(int* out) {  // others wait already when the lane leaves
  if (threadIdx.x == 31) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 1);
}
__global__ void shuffle_divergent(int* out) {
  int v = int(threadIdx.x);
  if (threadIdx.x & 1) v = __shfl_xor_sync(0xffffffffu, v, 1);
  else v = __shfl_xor_sync(0xffffffffu, v, 1) + 0;
  out[threadIdx.x] = v;
}
__global__ void shuffle_outside_mask(int* out) {
  out[threadIdx.x] = int(threadIdx.x ^ 1);
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffu, int(threadIdx.x ^ 1), 8);
}
__global__ void mask_without_caller(int* out) {
  out[threadIdx.x] = int(threadIdx.x ^ 1);
  __syncwarp(0xfffffffeu);
}

// ---- cp.async: a copy of 4 integers per thread, which become out[i] = i ^ 1.

const int* async_source() {
  alignas(16) static int source[128];
  for (int i = 0; i < 128; ++i) source[i] = i ^ 1;
  return source;
}
__global__ void ok_async(int* out, const int* source) {
  SHARED_INTS(s);
  if (threadIdx.x < 8) simt::cp_async16(s + 4 * threadIdx.x, source + 4 * threadIdx.x, true);
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void async_without_wait(int* out, const int* source) {
  SHARED_INTS(s);
  if (threadIdx.x < 8) simt::cp_async16(s + 4 * threadIdx.x, source + 4 * threadIdx.x, true);
  simt::cp_async_commit();
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
  simt::cp_async_wait<0>();
}
__global__ void async_wrong_group(int* out, const int* source) {
  SHARED_INTS(s);
  if (threadIdx.x < 8) simt::cp_async16(s + 4 * threadIdx.x, source + 4 * threadIdx.x, true);
  simt::cp_async_commit();
  simt::cp_async_wait<1>();
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x];
  simt::cp_async_wait<0>();
}
__global__ void async_without_commit(int* out, const int* source) {
  SHARED_INTS(s);
  if (threadIdx.x < 8) simt::cp_async16(s + 4 * threadIdx.x, source + 4 * threadIdx.x, true);
  simt::cp_async_wait<0>();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void async_left_behind(int* out, const int* source) {
  SHARED_INTS(s);
  if (threadIdx.x < 8) simt::cp_async16(s + 4 * threadIdx.x, source + 4 * threadIdx.x, true);
  simt::cp_async_commit();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void async_without_barrier(int* out, const int* source) {  // a wait is the own thread's alone
  SHARED_INTS(s);
  if (threadIdx.x >= 24) simt::cp_async16(s + 4 * (threadIdx.x - 24), source + 4 * (threadIdx.x - 24), true);
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  out[threadIdx.x] = s[threadIdx.x];
}
__global__ void async_misaligned(int* out, const int* source) {
  SHARED_INTS(s);
  simt::cp_async16(s, source + 1, true);
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void ldmatrix_misaligned(int* out) {
  SIMT_DYNAMIC_SHARED(memory);
  uint32_t r[4];
  simt::ldmatrix_x4(r, memory + 2 * threadIdx.x);
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}
__global__ void ldmatrix_outside(int* out) {
  SIMT_DYNAMIC_SHARED(memory);
  uint32_t r[4];
  simt::ldmatrix_x4(r, memory + 16 * threadIdx.x);
  out[threadIdx.x] = int(threadIdx.x ^ 1);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> out;
  unsigned threads = 32;
  const int* source = async_source();
  std::map<std::string, std::function<void()>> kernels;
#define KERNEL(name, blocks, count, bytes, ...)                                    \
  kernels[#name] = [&] {                                                           \
    threads = count;                                                               \
    out.assign(threads, -2);                                                       \
    SIMT_LAUNCH(name, blocks, threads, bytes, nullptr, out.data(), ##__VA_ARGS__); \
  }
  KERNEL(ok_block, 1, 128, 512), KERNEL(ok_warp, 1, 32, 128), KERNEL(race_block, 1, 128, 512), KERNEL(race_warp, 1, 32, 128);
  KERNEL(race_write_after_read, 1, 128, 512), KERNEL(race_shuffle, 1, 32, 128), KERNEL(race_grid, 2, 32, 0);
  KERNEL(outside_dynamic, 1, 32, 128), KERNEL(outside_static, 1, 32, 0), KERNEL(outside_carved, 1, 32, 256), KERNEL(ok_carved, 1, 32, 256),
      KERNEL(outside_read, 1, 32, 128);
  KERNEL(outside_global, 1, 32, 0), KERNEL(outside_local, 1, 32, 0), KERNEL(carved_too_much, 1, 32, 128), KERNEL(carved_apart, 1, 32, 128);
  KERNEL(never_written, 1, 32, 128), KERNEL(misaligned, 1, 32, 128), KERNEL(overflow, 1, 32, 0, 1 << 28);
  KERNEL(barrier_divergent, 1, 32, 0), KERNEL(deadlock, 1, 32, 0), KERNEL(shuffle_exited, 1, 32, 0), KERNEL(shuffle_left, 1, 32, 0);
  KERNEL(shuffle_divergent, 1, 32, 0), KERNEL(shuffle_outside_mask, 1, 32, 0), KERNEL(mask_without_caller, 1, 32, 0);
  KERNEL(ok_async, 1, 32, 128, source), KERNEL(async_without_wait, 1, 32, 128, source), KERNEL(async_wrong_group, 1, 32, 128, source);
  KERNEL(async_without_commit, 1, 32, 128, source), KERNEL(async_left_behind, 1, 32, 128, source), KERNEL(async_without_barrier, 1, 32, 128, source);
  KERNEL(async_misaligned, 1, 32, 128, source), KERNEL(ldmatrix_misaligned, 1, 32, 128), KERNEL(ldmatrix_outside, 1, 32, 128);
  if (argc < 2 || !kernels.count(argv[1])) {
    for (const auto& kernel : kernels) puts(kernel.first.c_str());
    return 1;
  }
  try {
    kernels[argv[1]]();
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  for (unsigned i = 0; i < threads; ++i) {
    const int want = threads == 128 ? int(neighbour(i, threads)) : int(i ^ 1);
    if (out[i] == want) continue;
    printf("wrong result: thread %u got %d, not %d\n", i, out[i], want);
    return 2;
  }
  puts("right result");
}
