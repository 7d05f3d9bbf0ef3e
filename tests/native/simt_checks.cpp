// What the emulator computes, against tables and definitions that are not its own. Prints each failure; exits with 1 if there is one.
// Argument: formats, layouts, collectives, launches, conflicts or speed.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/device.cuh"

namespace {

int failures = 0;
#define CHECK(condition, ...)                             \
  do {                                                    \
    if (!(condition) && ++failures < 20) {                \
      printf("FAIL line %d: %s: ", __LINE__, #condition); \
      printf(__VA_ARGS__);                                \
      puts("");                                           \
    }                                                     \
  } while (0)

// ---- Number formats: the value of every bit pattern by the definition of the format, and rounding at every midpoint.

double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, exponent = int(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  const double significand = mantissa + (exponent ? double(1u << mantissa_bits) : 0.0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}
bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); }

// `round` gives the bit pattern of a float; ties go to even, or away from zero.
template <class Round>
void check_rounding(int exponent_bits, int mantissa_bits, bool ties_to_even, Round round) {
  const uint32_t sign = 1u << (exponent_bits + mantissa_bits), infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const double here = value_of(bits, exponent_bits, mantissa_bits);
    // Behind the largest number comes infinity, where the next power of two would be.
    const double next =
        bits + 1 == infinity ? 2 * value_of(infinity - (1u << mantissa_bits), exponent_bits, mantissa_bits) : value_of(bits + 1, exponent_bits, mantissa_bits);
    const float middle = float((here + next) / 2);
    const bool exact = middle == (here + next) / 2;
    const uint32_t tie = !ties_to_even || bits % 2 ? bits + 1 : bits;
    CHECK(round(float(here)) == bits, "%08x", bits);
    CHECK(round(-float(here)) == (bits | sign), "-%08x", bits);
    if (!exact) continue;  // the middle of subnormals of bfloat16 and tf32 is a float too, so this is rare
    CHECK(round(middle) == tie, "middle above %08x", bits);
    CHECK(round(-middle) == (tie | sign), "middle below -%08x", bits);
    CHECK(round(std::nextafterf(middle, -INFINITY)) == bits, "below the middle above %08x", bits);
    if (!std::isinf(middle)) CHECK(round(std::nextafterf(middle, INFINITY)) == bits + 1, "above the middle above %08x", bits);
  }
  CHECK(round(INFINITY) == infinity && round(-INFINITY) == (infinity | sign), "infinity");
}
void check_formats() {
  for (uint32_t u = 0; u < 65536; ++u) {
    const float half = simt::to_float(f16{uint16_t(u)}), brain = simt::to_float(bf16{uint16_t(u)});
    CHECK(same(half, value_of(u, 5, 10)), "f16 %04x gives %g", u, half);
    CHECK(same(brain, value_of(u, 8, 7)), "bf16 %04x gives %g", u, brain);
    const bool is_nan = std::isnan(half), is_brain_nan = std::isnan(brain);
    CHECK(simt::from_float<f16>(half).u == (is_nan ? 0x7fff : u), "f16 %04x", u);
    CHECK(simt::from_float<bf16>(brain).u == (is_brain_nan ? 0x7fff : u), "bf16 %04x", u);
    CHECK(simt::pack2<f16>(half, 1.0f) == ((is_nan ? 0x7fff : u) | 0x3c000000u), "pack2 of f16 %04x", u);
    CHECK(simt::pack2<bf16>(1.0f, brain) == ((is_brain_nan ? 0x7fffu : u) << 16 | 0x3f80u), "pack2 of bf16 %04x", u);
  }
  check_rounding(5, 10, true, [](float x) { return uint32_t(simt::from_float<f16>(x).u); });
  check_rounding(8, 7, true, [](float x) { return uint32_t(simt::from_float<bf16>(x).u); });
  check_rounding(8, 10, false, [](float x) {
    const uint32_t u = simt::to_tf32(x);
    CHECK((u & 0x1fff) == 0, "tf32 %08x has low bits", u);
    return u >> 13;
  });
  for (uint32_t u : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu}) {
    CHECK(simt::to_tf32(simt::bits_f32(u)) == 0x7fffffff && simt::from_float<f16>(simt::bits_f32(u)).u == 0x7fff, "NaN %08x", u);
    CHECK(simt::from_float<bf16>(simt::bits_f32(u)).u == 0x7fff, "NaN %08x", u);
  }
  CHECK(simt::ex2(-127.0f) == 0 && simt::ex2(-126.0f) == 0x1p-126f && simt::ex2(-INFINITY) == 0, "ex2");
  CHECK(simt::lg2(0x1p-127f) == -INFINITY && simt::lg2(8.0f) == 3 && std::isnan(simt::lg2(-1.0f)), "lg2");
}

// ---- Fragment layouts, as the figures of the PTX ISA show them: the lane that holds each element of an 8 x 8 part.

// "Row" fragments: A and C of m16n8k16, ldmatrix. A lane holds two neighbours of a row.
constexpr int kRowLanes[8][8] = {{0, 0, 1, 1, 2, 2, 3, 3},         {4, 4, 5, 5, 6, 6, 7, 7},         {8, 8, 9, 9, 10, 10, 11, 11},
                                 {12, 12, 13, 13, 14, 14, 15, 15}, {16, 16, 17, 17, 18, 18, 19, 19}, {20, 20, 21, 21, 22, 22, 23, 23},
                                 {24, 24, 25, 25, 26, 26, 27, 27}, {28, 28, 29, 29, 30, 30, 31, 31}};
// "Column" fragments: B of m16n8k16, ldmatrix.trans. A lane holds two neighbours of a column.
constexpr int kColumnLanes[8][8] = {{0, 4, 8, 12, 16, 20, 24, 28},  {0, 4, 8, 12, 16, 20, 24, 28},  {1, 5, 9, 13, 17, 21, 25, 29},
                                    {1, 5, 9, 13, 17, 21, 25, 29},  {2, 6, 10, 14, 18, 22, 26, 30}, {2, 6, 10, 14, 18, 22, 26, 30},
                                    {3, 7, 11, 15, 19, 23, 27, 31}, {3, 7, 11, 15, 19, 23, 27, 31}};
// tf32: parts of 8 x 4 for A, of 4 x 8 for B.
constexpr int kRowLanesTf32[8][4] = {{0, 1, 2, 3},     {4, 5, 6, 7},     {8, 9, 10, 11},   {12, 13, 14, 15},
                                     {16, 17, 18, 19}, {20, 21, 22, 23}, {24, 25, 26, 27}, {28, 29, 30, 31}};
constexpr int kColumnLanesTf32[4][8] = {
    {0, 4, 8, 12, 16, 20, 24, 28}, {1, 5, 9, 13, 17, 21, 25, 29}, {2, 6, 10, 14, 18, 22, 26, 30}, {3, 7, 11, 15, 19, 23, 27, 31}};
// Registers of the parts: [lower half of the rows][right half of the columns].
constexpr int kRegistersA[2][2] = {{0, 2}, {1, 3}};

struct Operands {
  uint32_t a[32][4], b[32][2];
  float d[32][4];
};
template <class T>
__global__ void mma_kernel(Operands* o) {
  const unsigned lane = threadIdx.x;
  simt::mma_16816<T>(o->d[lane], o->a[lane], o->b[lane][0], o->b[lane][1]);
}
__global__ void mma_tf32_kernel(Operands* o) {
  const unsigned lane = threadIdx.x;
  simt::mma_1688_tf32(o->d[lane], o->a[lane], o->b[lane][0], o->b[lane][1]);
}

// Integers small enough that every sum is exact.
template <class Pack, class Kernel>
void check_mma(const char* what, int depth, Pack pack, Kernel kernel) {
  std::mt19937 random(7);
  auto draw = [&] { return float(int(random() % 17) - 8); };
  for (int round = 0; round < 20; ++round) {
    float a[16][16], b[16][8], c[16][8];
    Operands o{};
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < depth; ++k) a[m][k] = draw();
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 8; ++n) b[k][n] = draw();
    for (auto& row : c)
      for (float& x : row) x = draw();
    pack(a, b, o);
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) o.d[kRowLanes[m % 8][n]][(m < 8 ? 0 : 2) + (n & 1)] = c[m][n];
    kernel(&o);
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        float want = c[m][n];
        for (int k = 0; k < depth; ++k) want += a[m][k] * b[k][n];
        const float got = o.d[kRowLanes[m % 8][n]][(m < 8 ? 0 : 2) + (n & 1)];
        CHECK(got == want, "%s row %d column %d: %g, not %g", what, m, n, got, want);
      }
  }
}
template <class T>
void check_mma16(const char* what) {
  check_mma(
      what, 16,
      [](auto& a, auto& b, Operands& o) {
        for (int m = 0; m < 16; ++m)
          for (int k = 0; k < 16; ++k) o.a[kRowLanes[m % 8][k % 8]][kRegistersA[m / 8][k / 8]] |= uint32_t(simt::from_float<T>(a[m][k]).u) << (k % 2 ? 16 : 0);
        for (int k = 0; k < 16; ++k)
          for (int n = 0; n < 8; ++n) o.b[kColumnLanes[k % 8][n]][k / 8] |= uint32_t(simt::from_float<T>(b[k][n]).u) << (k % 2 ? 16 : 0);
      },
      [](Operands* o) { SIMT_LAUNCH(mma_kernel<T>, 1, 32, 0, nullptr, o); });
}

__global__ void ldmatrix_kernel(const uint16_t* in, uint32_t* plain, uint32_t* transposed) {
  SIMT_DYNAMIC_SHARED(memory);
  auto* shared = (uint16_t*)memory;
  const int lane = int(threadIdx.x);
  for (int i = lane; i < 4 * 64; i += 32) shared[i] = in[i];
  __syncwarp();
  uint32_t r[4];
  simt::ldmatrix_x4(r, shared + lane * 8);  // lane i: row i % 8 of matrix i / 8
  for (int j = 0; j < 4; ++j) plain[lane * 4 + j] = r[j];
  simt::ldmatrix_x4_trans(r, shared + lane * 8);
  for (int j = 0; j < 4; ++j) transposed[lane * 4 + j] = r[j];
}
void check_layouts() {
  check_mma16<f16>("mma f16");
  check_mma16<bf16>("mma bf16");
  check_mma(
      "mma tf32", 8,
      [](auto& a, auto& b, Operands& o) {
        // The low 13 bits are rubbish that the device does not read.
        for (int m = 0; m < 16; ++m)
          for (int k = 0; k < 8; ++k) o.a[kRowLanesTf32[m % 8][k % 4]][kRegistersA[m / 8][k / 4]] = simt::to_tf32(a[m][k]) | 0x1abc;
        for (int k = 0; k < 8; ++k)
          for (int n = 0; n < 8; ++n) o.b[kColumnLanesTf32[k % 4][n]][k / 4] = simt::to_tf32(b[k][n]) | 0x1fff;
      },
      [](Operands* o) { SIMT_LAUNCH(mma_tf32_kernel, 1, 32, 0, nullptr, o); });

  std::vector<uint16_t> in(4 * 64);
  std::iota(in.begin(), in.end(), uint16_t(1000));
  std::vector<uint32_t> plain(128), transposed(128);
  SIMT_LAUNCH(ldmatrix_kernel, 1, 32, 512, nullptr, in.data(), plain.data(), transposed.data());
  for (int j = 0; j < 4; ++j)
    for (int row = 0; row < 8; ++row)
      for (int column = 0; column < 8; ++column) {
        const uint16_t want = in[size_t(j * 64 + row * 8 + column)];
        const auto got = uint16_t(plain[size_t(kRowLanes[row][column] * 4 + j)] >> (column % 2 ? 16 : 0));
        const auto got_trans = uint16_t(transposed[size_t(kColumnLanes[row][column] * 4 + j)] >> (row % 2 ? 16 : 0));
        CHECK(got == want, "ldmatrix %d row %d column %d", j, row, column);
        CHECK(got_trans == want, "ldmatrix.trans %d row %d column %d", j, row, column);
      }
}

// ---- Warps and blocks.

// Every kind of shuffle, written as what the CUDA manual says of each.
int shuffled(int kind, int lane, int argument, int width) {
  const int first = lane / width * width, last = first + width - 1;
  if (kind == 0) return first + ((argument % width) + width) % width;
  if (kind == 1) return (lane ^ argument) <= last ? lane ^ argument : lane;
  if (kind == 2) return lane + argument <= last ? lane + argument : lane;
  return lane - argument >= first ? lane - argument : lane;
}
__global__ void shuffle_kernel(int kind, int argument, int width, int* words, double* doubles) {
  const int lane = int(threadIdx.x);
  const int value = 100 + lane;
  const double wide = 1e10 + lane;
  if (kind == 0) words[lane] = __shfl_sync(0xffffffffu, value, argument, width), doubles[lane] = __shfl_sync(0xffffffffu, wide, argument, width);
  if (kind == 1) words[lane] = __shfl_xor_sync(0xffffffffu, value, argument, width), doubles[lane] = __shfl_xor_sync(0xffffffffu, wide, argument, width);
  if (kind == 2)
    words[lane] = __shfl_down_sync(0xffffffffu, value, unsigned(argument), width),
    doubles[lane] = __shfl_down_sync(0xffffffffu, wide, unsigned(argument), width);
  if (kind == 3)
    words[lane] = __shfl_up_sync(0xffffffffu, value, unsigned(argument), width), doubles[lane] = __shfl_up_sync(0xffffffffu, wide, unsigned(argument), width);
}
// Halves of a warp go their own ways, meet among themselves, and meet again.
__global__ void halves_kernel(unsigned* out) {
  const unsigned lane = threadIdx.x, mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  unsigned own = 0;
  if (lane < 16) {
    own = __ballot_sync(mask, lane % 2);
    own += __shfl_xor_sync(mask, lane, 1) << 16;
  } else {
    own = __ballot_sync(mask, lane % 3 == 0);
    __syncwarp(mask);
  }
  out[lane] = own;
  out[32 + lane] = __ballot_sync(0xffffffffu, lane % 5 == 0);
}
__global__ void early_exit_kernel(int* out, int n) {  // who has left counts as arrived
  if (int(threadIdx.x) >= n) return;
  __syncthreads();
  out[threadIdx.x] += 1;
  __syncthreads();
  const bool arrived = out[(threadIdx.x + 1) % unsigned(n)] > 0;
  __syncthreads();
  out[threadIdx.x] += arrived;
}
__global__ void reduce_kernel(const float* x, float* out, int n) {
  SIMT_SHARED(float, sums, [5]);
  float sum = 0;
  for (int i = int(threadIdx.x + blockIdx.x * blockDim.x); i < n; i += int(blockDim.x * gridDim.x)) sum += x[i];
  for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, unsigned(lanes));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  sum = 0;
  for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += sums[i];
  atomicAdd(out, sum);
}
void check_collectives() {
  for (int width = 1; width <= 32; width *= 2)
    for (int kind = 0; kind < 4; ++kind)
      for (int argument = 0; argument < 32; ++argument) {
        int words[32];
        double doubles[32];
        SIMT_LAUNCH(shuffle_kernel, 1, 32, 0, nullptr, kind, argument, width, words, doubles);
        for (int lane = 0; lane < 32; ++lane) {
          const int source = shuffled(kind, lane, argument, width);
          CHECK(words[lane] == 100 + source && doubles[lane] == 1e10 + source, "kind %d lane %d argument %d width %d", kind, lane, argument, width);
        }
      }
  unsigned out[64];
  SIMT_LAUNCH(halves_kernel, 1, 32, 0, nullptr, out);
  for (unsigned lane = 0; lane < 32; ++lane) {
    CHECK(out[lane] == (lane < 16 ? 0xaaaau + ((lane ^ 1) << 16) : 0x49240000u), "lane %u: %08x", lane, out[lane]);
    CHECK(out[32 + lane] == 0x42108421u, "lane %u: %08x", lane, out[32 + lane]);
  }
  for (int n : {1, 31, 32, 33, 50, 95, 96}) {
    std::vector<int> counts(96);
    SIMT_LAUNCH(early_exit_kernel, 1, 96, 0, nullptr, counts.data(), n);
    for (int i = 0; i < 96; ++i) CHECK(counts[size_t(i)] == (i < n ? 2 : 0), "%d threads, thread %d: %d", n, i, counts[size_t(i)]);
  }
  std::vector<float> x(5000, 1.0f);
  float sum = 0;
  SIMT_LAUNCH(reduce_kernel, 7, 160, 0, nullptr, x.data(), &sum, 5000);
  CHECK(sum == 5000, "%g", sum);
}

// ---- Grids of every dimension, blocks of changing size, faults that leave nothing behind.

__global__ void index_kernel(int* count, dim3 grid, dim3 block) {
  const unsigned b = blockIdx.x + grid.x * (blockIdx.y + grid.y * blockIdx.z);
  const unsigned t = threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
  if (gridDim.y == grid.y && blockDim.z == block.z) atomicAdd(&count[b * block.x * block.y * block.z + t], 1);
}
__global__ void fault_kernel(int* alive, bool fault) {
  struct Counted {
    int* count;
    explicit Counted(int* c) : count(c) { atomicAdd(count, 1); }
    ~Counted() { atomicAdd(count, -1); }
  } counted(alive);
  if (fault && threadIdx.x == 40) {
    __syncwarp(1u);  // the mask lacks the caller
  }
  __syncthreads();
}
void check_launches() {
  for (dim3 grid : {dim3(1), dim3(5), dim3(3, 2), dim3(2, 3, 4)})
    for (dim3 block : {dim3(1), dim3(33), dim3(8, 4, 2), dim3(1024)}) {
      std::vector<int> count(grid.x * grid.y * grid.z * block.x * block.y * block.z);
      SIMT_LAUNCH(index_kernel, grid, block, 0, nullptr, count.data(), grid, block);
      for (int c : count) CHECK(c == 1, "grid %u %u %u", grid.x, grid.y, grid.z);
    }
  for (int round = 0; round < 50; ++round) {
    int alive = 0;
    bool thrown = false;
    try {
      SIMT_LAUNCH(fault_kernel, 3, 64, 0, nullptr, &alive, round % 2);
    } catch (const simt::Fault& fault) {
      thrown = true;
      CHECK(strstr(fault.what(), "thread 40 (warp 1, lane 8)") && strstr(fault.what(), "simt_checks.cpp:"), "%s", fault.what());
    }
    CHECK(thrown == (round % 2), "round %d", round);
    CHECK(alive == 0, "round %d: %d destructors did not run", round, alive);
  }
  int alive = 0;
  for (dim3 bad : {dim3(0), dim3(1025), dim3(64, 64)}) {
    bool thrown = false;
    try {
      SIMT_LAUNCH(fault_kernel, 1, bad, 0, nullptr, &alive, false);
    } catch (const simt::Fault&) {
      thrown = true;
    }
    CHECK(thrown, "a block of %u x %u", bad.x, bad.y);
  }
}

// ---- Bank conflicts of ldmatrix with a pitch of `pitch` bytes between rows.

__global__ void pitch_kernel(int pitch) {
  SIMT_DYNAMIC_SHARED(shared);
  for (int i = int(threadIdx.x); i < 32 * pitch; i += 32) shared[i] = 0;
  __syncwarp();
  uint32_t r[4];
  simt::ldmatrix_x4(r, shared + int(threadIdx.x) * pitch);
}
// 32 lanes read 4, 8 or 16 bytes each, `stride` words apart; through volatile, so that the read stays.
template <class T>
__global__ void stride_kernel(int stride) {
  SIMT_DYNAMIC_SHARED(shared);
  for (int i = int(threadIdx.x); i < 32 * 32; i += 32) ((unsigned*)shared)[i] = 0;
  __syncwarp();
  T value = *(const T*)(shared + threadIdx.x * unsigned(stride) * 4);
  asm volatile("" ::"m"(value));
}
template <class T>
void check_stride(int stride, unsigned want) {
  const uint64_t before = simt::stats.shared_extra_wavefronts;
  SIMT_LAUNCH(stride_kernel<T>, 1, 32, 32 * 32 * 4, nullptr, stride);
  const auto got = unsigned(simt::stats.shared_extra_wavefronts - before);
  CHECK(got == want, "%zu bytes, stride %d words: %u extra wavefronts, not %u", sizeof(T), stride, got, want);
}
void check_conflicts() {
  // Per matrix: 8 rows in 8, 8, 4, 2 and 1 sets of banks.
  const std::pair<int, unsigned> pitches[] = {{16, 0}, {144, 0}, {32, 4 * 1}, {64, 4 * 3}, {128, 4 * 7}, {256, 4 * 7}};
  for (const auto& [pitch, want] : pitches) {
    const uint64_t before = simt::stats.ldsm_extra_wavefronts;
    SIMT_LAUNCH(pitch_kernel, 1, 32, size_t(32 * pitch), nullptr, pitch);
    const auto got = unsigned(simt::stats.ldsm_extra_wavefronts - before);
    CHECK(got == want, "pitch %d: %u extra wavefronts, not %u", pitch, got, want);
  }
#ifdef SIMT_TRACE_SHARED
  check_stride<unsigned>(0, 0), check_stride<unsigned>(1, 0), check_stride<unsigned>(2, 1), check_stride<unsigned>(3, 0), check_stride<unsigned>(32, 31);
  check_stride<uint2>(2, 0), check_stride<uint2>(4, 2), check_stride<uint2>(32, 30);
  check_stride<uint4>(4, 0), check_stride<uint4>(8, 4), check_stride<uint4>(32, 28), check_stride<uint4>(20, 0);
#endif
}

// ---- Speed.

__global__ void barrier_kernel(int n) {
  for (int i = 0; i < n; ++i) __syncthreads();
}
__global__ void mma_loop_kernel(int n, float* out) {
  float d[4] = {};
  const uint32_t a[4] = {0x3f803f80, 0, 0, 0};
  for (int i = 0; i < n; ++i) simt::mma_16816<bf16>(d, a, 0x3f80, 0);
  out[threadIdx.x] = d[0];
}
// Of the processor: others may run on the machine.
template <class Run>
double seconds(Run run) {
  const std::clock_t start = std::clock();
  run();
  return double(std::clock() - start) / CLOCKS_PER_SEC;
}
void measure_speed() {
  float out[128];
  const uint64_t before = simt::stats.switches;
  const double barriers = seconds([] { SIMT_LAUNCH(barrier_kernel, 1, 128, 0, nullptr, 50000); });
  printf("%.1f million switches per second\n", double(simt::stats.switches - before) / barriers * 1e-6);
  const double mma = seconds([&] { SIMT_LAUNCH(mma_loop_kernel, 1, 128, 0, nullptr, 20000, out); });
  printf("%.2f us per mma.m16n8k16\n", mma / (4 * 20000) * 1e6);
  const double launches = seconds([] {
    for (int i = 0; i < 10000; ++i) SIMT_LAUNCH(barrier_kernel, 1, 128, 1024, nullptr, 0);
  });
  printf("%.2f us per launch of one block of 128 threads\n", launches / 10000 * 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "formats") check_formats();
  else if (what == "layouts") check_layouts();
  else if (what == "collectives") check_collectives();
  else if (what == "launches") check_launches();
  else if (what == "conflicts") check_conflicts();
  else if (what == "speed") measure_speed();
  else failures = 1, puts("what to check: formats, layouts, collectives, launches, conflicts or speed");
  printf("%d failures\n", failures);
  return failures != 0;
}
