// Every primitive of csrc/cuda/device.cuh beside plain arithmetic on the host. One source: nvcc compiles it for a GPU, g++ for the
// emulator, and both must agree with the same expected values. Prints "ok NAME" or "FAIL NAME ..." a line; exits with 1 after a failure
// and with 77 where there is no device.

#include "ptx_conformance.h"

namespace {

// Conversions.

template <class T>
__global__ void to_float_kernel(const uint16_t* in, float* out, int count) {
  const int i = int(blockIdx.x) * 256 + int(threadIdx.x);
  if (i < count) out[i] = simt::to_float(T{in[i]});
}

template <class T>
__global__ void from_float_kernel(const float* in, uint16_t* out, uint32_t* pairs, int count) {
  const int i = int(blockIdx.x) * 256 + int(threadIdx.x);
  if (i >= count) return;
  out[i] = simt::from_float<T>(in[i]).u;
  pairs[i] = simt::pack2<T>(in[i], in[count - 1 - i]);
}

__global__ void float_kernel(const float* in, uint32_t* tf32, float* same, double* wide, float* ex2, float* lg2, int count) {
  const int i = int(blockIdx.x) * 256 + int(threadIdx.x);
  if (i >= count) return;
  tf32[i] = simt::to_tf32(in[i]);
  same[i] = simt::from_float<float>(simt::to_float(in[i]));
  wide[i] = simt::to_float(double(in[i]));
  ex2[i] = simt::ex2(in[i]);
  lg2[i] = simt::lg2(in[i]);
}

template <class T>
void test_to_float(const char* name) {
  Buffer<uint16_t> in(65536);
  Buffer<float> out(65536);
  for (int i = 0; i < 65536; ++i) in.host[i] = uint16_t(i);
  in.send();
  SIMT_LAUNCH(to_float_kernel<T>, 256, 256, 0, nullptr, in.device, out.device, 65536);
  const char* error = finish();
  out.fetch();
  compare(name, error, out.host, [&](size_t i) { return float(value_of(T{uint16_t(i)})); }, same);
}

// Every half, the points between neighbours and their neighbours, and random patterns.
std::vector<float> floats() {
  std::vector<float> values;
  for (int i = 0; i < 65536; ++i) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, 0x1000u, 0x0fffu, 0x1001u})
      values.push_back(float_of(uint32_t(i) << 16 | low));
  }
  for (int i = 0; i < 0x7c00; ++i) {
    const float middle = float((value_of(f16{uint16_t(i)}) + value_of(f16{uint16_t(i + 1)})) / 2);
    if (i + 1 == 0x7c00) continue;
    for (const float value : {middle, nextafterf(middle, 0), nextafterf(middle, INFINITY)}) values.push_back(value), values.push_back(-value);
  }
  for (const float value : {65504.0f, 65519.996f, 65520.0f, -65520.0f, 65536.0f}) values.push_back(value);
  Random random;
  for (int i = 0; i < 100000; ++i) values.push_back(float_of(random.bits()));
  return values;
}

template <class T>
void test_from_float(const char* name, const char* pair_name) {
  const std::vector<float> values = floats();
  const int count = int(values.size());
  Buffer<float> in(count);
  Buffer<uint16_t> out(count);
  Buffer<uint32_t> pairs(count);
  in.host = values;
  in.send();
  SIMT_LAUNCH(from_float_kernel<T>, (count + 255) / 256, 256, 0, nullptr, in.device, out.device, pairs.device, count);
  const char* error = finish();
  out.fetch(), pairs.fetch();
  std::vector<uint16_t> want(count);
  for (int i = 0; i < count; ++i) want[i] = nearest<T>(values[i]).u;
  const auto matches = [](uint16_t got, uint16_t wanted) { return isnan(value_of(T{wanted})) ? isnan(value_of(T{got})) : got == wanted; };
  compare(name, error, out.host, [&](size_t i) { return want[i]; }, matches);
  compare(
      pair_name, error, pairs.host, [&](size_t i) { return want[i] | uint32_t(want[count - 1 - i]) << 16; },
      [&](uint32_t got, uint32_t wanted) { return matches(uint16_t(got), uint16_t(wanted)) && matches(uint16_t(got >> 16), uint16_t(wanted >> 16)); });
}

void test_floats() {
  const std::vector<float> values = floats();
  const int count = int(values.size());
  Buffer<float> in(count), back(count), ex2(count), lg2(count);
  Buffer<uint32_t> tf32(count);
  Buffer<double> wide(count);
  in.host = values;
  in.send();
  SIMT_LAUNCH(float_kernel, (count + 255) / 256, 256, 0, nullptr, in.device, tf32.device, back.device, wide.device, ex2.device, lg2.device, count);
  const char* error = finish();
  tf32.fetch(), back.fetch(), wide.fetch(), ex2.fetch(), lg2.fetch();
  const auto value = [&](size_t i) { return values[i]; };
  // Nearest, ties away from zero, at 10 bits of fraction; beyond the largest it is infinite.
  compare(
      "to_tf32", error, tf32.host, [&](size_t i) { return isinf(values[i]) ? bits_of(values[i]) : (bits_of(values[i]) + 0x1000u) & ~0x1fffu; },
      [&](uint32_t got, uint32_t want) { return (want & 0x7fffffffu) > 0x7f800000u || isnan(float_of(got)) ? isnan(float_of(got)) : got == want; });
  compare("from_float<float>, to_float(float)", error, back.host, value, same);
  compare("to_float(double)", error, wide.host, value, [](double got, float want) { return isnan(want) ? isnan(got) : got == double(want); });
  // ex2.approx.ftz.f32: 2 ulp; results and arguments below 2^-126 may be flushed to 0.
  compare(
      "ex2", error, ex2.host, [&](size_t i) { return exp2(double(values[i])); },
      [](float got, double want) {
        if (isnan(want)) return bool(isnan(got));
        if (isinf(float(want))) return bool(isinf(got)) && got > 0;
        return fabs(got - want) <= want * 0x1p-22 + (want < 0x1p-126 ? 0x1p-126 : 0);
      });
  // lg2.approx.ftz.f32: absolute error 2^-22 in (0.5, 2), relative 2^-22 elsewhere; subnormal arguments count as 0.
  int wrong = 0, first = 0;
  for (int i = 0; i < count; ++i) {
    const double want = log2(double(values[i]));
    const float got = lg2.host[i];
    bool right;
    if (isnan(want)) {
      right = isnan(got) || (values[i] < 0 && values[i] > -0x1p-126f && got == -INFINITY);
    } else if (isinf(want)) {
      right = double(got) == want;
    } else {
      right = fabs(got - want) <= fmax(fabs(want), 1.0) * 0x1p-22 || (values[i] < 0x1p-126f && got == -INFINITY);
    }
    if (!right && wrong++ == 0) first = i;
  }
  verdict("lg2", error, wrong, lg2.host[first], log2(double(values[first])));
}

// Tensor cores. One warp, one product; c is added to.

template <class T>
__global__ void mma_16816_kernel(const uint32_t* a, const uint32_t* b, float* c) {
  const int lane = int(threadIdx.x);
  uint32_t ra[4];
  float rc[4];
  for (int i = 0; i < 4; ++i) ra[i] = a[lane * 4 + i], rc[i] = c[lane * 4 + i];
  simt::mma_16816<T>(rc, ra, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) c[lane * 4 + i] = rc[i];
}

__global__ void mma_1688_tf32_kernel(const uint32_t* a, const uint32_t* b, float* c) {
  const int lane = int(threadIdx.x);
  uint32_t ra[4];
  float rc[4];
  for (int i = 0; i < 4; ++i) ra[i] = a[lane * 4 + i], rc[i] = c[lane * 4 + i];
  simt::mma_1688_tf32(rc, ra, b[lane * 2], b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) c[lane * 4 + i] = rc[i];
}

// Row-major A (16 x depth), column-major B (8 x depth), C (16 x 8): where the PTX manual says that each lane's registers lie.
struct Product {
  int depth;
  std::vector<double> a, b, c;
  explicit Product(int k) : depth(k), a(16 * k), b(8 * k), c(16 * 8) {}
  double exact(int row, int col, double* size) const {
    double sum = c[row * 8 + col];
    *size = fabs(sum);
    for (int k = 0; k < depth; ++k) sum += a[row * depth + k] * b[col * depth + k], *size += fabs(a[row * depth + k] * b[col * depth + k]);
    return sum;
  }
};

int row_of(int lane, int i) { return lane / 4 + i / 2 * 8; }
int col_of(int lane, int i) { return lane % 4 * 2 + i % 2; }

// `tolerance` times the sum of magnitudes; 0 asks for the exact sum.
void check_product(const char* name, const char* error, const Product& product, const std::vector<float>& got, double tolerance) {
  int wrong = 0;
  double first_got = 0, first_want = 0;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      double size;
      const double want = product.exact(row_of(lane, i), col_of(lane, i), &size);
      const bool right = isnan(want)   ? bool(isnan(got[lane * 4 + i]))
                         : isinf(want) ? double(got[lane * 4 + i]) == want
                                       : fabs(got[lane * 4 + i] - want) <= tolerance * size;
      if (!right && wrong++ == 0) first_got = got[lane * 4 + i], first_want = want;
    }
  }
  verdict(name, error, wrong, first_got, first_want);
}

// Distinct small integers (their sums are exact and name every element), random numbers, and an infinity and a NaN in one element each.
template <class T>
void test_mma_16816(const char* const (&names)[3]) {
  Random random;
  for (int kind = 0; kind < 3; ++kind) {
    Product product(16);
    Buffer<uint32_t> a(128), b(64);
    Buffer<float> c(128);
    const auto draw = [&](int i) { return nearest<T>(kind == 0 ? float(i * 7 % 31 - 15) : random.unit()); };
    std::vector<T> ha(256), hb(128);
    for (int i = 0; i < 256; ++i) ha[i] = draw(i);
    for (int i = 0; i < 128; ++i) hb[i] = draw(i + 11);
    if (kind == 2) ha[5 * 16 + 3] = nearest<T>(INFINITY), hb[2 * 16 + 9] = nearest<T>(NAN);
    for (int i = 0; i < 256; ++i) product.a[i] = value_of(ha[i]);
    for (int i = 0; i < 128; ++i) product.b[i] = value_of(hb[i]);
    for (int i = 0; i < 128; ++i) product.c[i] = kind == 0 ? i - 60 : random.unit();
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const T* pair = &ha[(g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8];
        a.host[lane * 4 + i] = pair[0].u | uint32_t(pair[1].u) << 16;
        c.host[lane * 4 + i] = float(product.c[row_of(lane, i) * 8 + col_of(lane, i)]);
        product.c[row_of(lane, i) * 8 + col_of(lane, i)] = c.host[lane * 4 + i];
      }
      for (int i = 0; i < 2; ++i) {
        const T* pair = &hb[g * 16 + 2 * t + i * 8];
        b.host[lane * 2 + i] = pair[0].u | uint32_t(pair[1].u) << 16;
      }
    }
    a.send(), b.send(), c.send();
    SIMT_LAUNCH(mma_16816_kernel<T>, 1, 32, 0, nullptr, a.device, b.device, c.device);
    const char* error = finish();
    c.fetch();
    check_product(names[kind], error, product, c.host, kind == 0 ? 0 : 0x1p-21);
  }
}

void test_mma_1688_tf32(const char* const (&names)[2]) {
  Random random;
  for (int kind = 0; kind < 2; ++kind) {
    Product product(8);
    Buffer<uint32_t> a(128), b(64);
    Buffer<float> c(128);
    const auto draw = [&](int i) { return float_of(bits_of(kind == 0 ? float(i * 7 % 31 - 15) : random.unit()) & ~0x1fffu); };
    for (int i = 0; i < 128; ++i) product.a[i] = draw(i);
    for (int i = 0; i < 64; ++i) product.b[i] = draw(i + 11);
    for (int i = 0; i < 128; ++i) product.c[i] = kind == 0 ? i - 60 : random.unit();
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        a.host[lane * 4 + i] = bits_of(float(product.a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]));
        c.host[lane * 4 + i] = float(product.c[row_of(lane, i) * 8 + col_of(lane, i)]);
      }
      for (int i = 0; i < 2; ++i) b.host[lane * 2 + i] = bits_of(float(product.b[g * 8 + t + i * 4]));
    }
    a.send(), b.send(), c.send();
    SIMT_LAUNCH(mma_1688_tf32_kernel, 1, 32, 0, nullptr, a.device, b.device, c.device);
    const char* error = finish();
    c.fetch();
    check_product(names[kind], error, product, c.host, kind == 0 ? 0 : 0x1p-21);
  }
}

// Shared memory: four 8 x 8 matrices whose rows lie scattered, as a swizzle scatters them.

__global__ void ldmatrix_kernel(const uint16_t* in, const int* row_at, uint32_t* plain, uint32_t* transposed) {
  SIMT_DYNAMIC_SHARED(bytes);
  simt::Carver carver(bytes);
  uint16_t* tile = carver.take<uint16_t>(256);
  const int lane = int(threadIdx.x);
  for (int i = lane; i < 256; i += 32) tile[i] = in[i];
  __syncthreads();
  uint32_t r[4];
  simt::ldmatrix_x4(r, tile + row_at[lane] * 8);
  for (int i = 0; i < 4; ++i) plain[lane * 4 + i] = r[i];
  simt::ldmatrix_x4_trans(r, tile + row_at[lane] * 8);
  for (int i = 0; i < 4; ++i) transposed[lane * 4 + i] = r[i];
}

void test_ldmatrix() {
  Buffer<uint16_t> in(256);
  Buffer<int> row_at(32);
  Buffer<uint32_t> plain(128), transposed(128);
  for (int i = 0; i < 256; ++i) in.host[i] = uint16_t(i * 251 + 17);
  for (int i = 0; i < 32; ++i) row_at.host[i] = (i * 13 + 5) % 32;
  in.send(), row_at.send();
  SIMT_LAUNCH(ldmatrix_kernel, 1, 32, 512, nullptr, in.device, row_at.device, plain.device, transposed.device);
  const char* error = finish();
  plain.fetch(), transposed.fetch();
  const auto element = [&](int matrix, int row, int col) { return uint32_t(in.host[row_at.host[matrix * 8 + row] * 8 + col]); };
  const auto equal = [](uint32_t got, uint32_t want) { return got == want; };
  compare(
      "ldmatrix_x4", error, plain.host,
      [&](size_t i) {
        const int lane = int(i) / 4, m = int(i) % 4;
        return element(m, lane / 4, lane % 4 * 2) | element(m, lane / 4, lane % 4 * 2 + 1) << 16;
      },
      equal);
  compare(
      "ldmatrix_x4_trans", error, transposed.host,
      [&](size_t i) {
        const int lane = int(i) / 4, m = int(i) % 4;
        return element(m, lane % 4 * 2, lane / 4) | element(m, lane % 4 * 2 + 1, lane / 4) << 16;
      },
      equal);
}

// Asynchronous copies in two groups; what is not to be read comes from outside the buffer. More than 48 KB of shared memory.

constexpr int kCopyThreads = 128, kCopyStages = 2, kCopyBytes = 99 * 1024;

__global__ void __launch_bounds__(kCopyThreads) cp_async_kernel(const uint4* in, uint4* out, int count) {
  SIMT_DYNAMIC_SHARED(bytes);
  uint4* stage = reinterpret_cast<uint4*>(bytes + kCopyBytes) - kCopyStages * kCopyThreads;
  const int thread = int(threadIdx.x);
  for (int s = 0; s < kCopyStages; ++s) {
    const int at = s * kCopyThreads + thread;
    simt::cp_async16(stage + at, in + (at < count ? at : 0), at < count);
    simt::cp_async_commit();
  }
  // The first group is there while the second may be under way; a thread reads what its neighbour copied.
  simt::cp_async_wait<1>();
  __syncthreads();
  out[thread] = stage[thread ^ 1];
  simt::cp_async_wait<0>();
  __syncthreads();
  out[kCopyThreads + thread] = stage[kCopyThreads + (thread ^ 1)];
}

void test_cp_async() {
  constexpr int kCount = kCopyThreads + 37, kAll = kCopyStages * kCopyThreads;
  Buffer<uint4> in(kCount), out(kAll);
  for (int i = 0; i < kCount; ++i) in.host[i] = {unsigned(i), unsigned(~i), unsigned(i * 3), unsigned(i * i)};
  in.send();
  SIMT_LAUNCH(cp_async_kernel, 1, kCopyThreads, kCopyBytes, nullptr, in.device, out.device, kCount);
  const char* error = finish();
  out.fetch();
  int wrong = 0, first = 0;
  for (int i = 0; i < kAll; ++i) {
    const uint4 zero = {0, 0, 0, 0}, want = (i ^ 1) < kCount ? in.host[i ^ 1] : zero;
    if (memcmp(&out.host[i], &want, 16) && wrong++ == 0) first = i;
  }
  verdict("cp_async16, commit, wait", error, wrong, out.host[first].x, first ^ 1);
}

// Warps and blocks.

__global__ void warp_kernel(const int* in, int* out, unsigned* ballots, double* wide) {
  const int lane = int(threadIdx.x), value = in[lane];
  int r = 0;
  out[r++ * 32 + lane] = __shfl_sync(0xffffffffu, value, (lane * 5 + 3) % 32);
  out[r++ * 32 + lane] = __shfl_sync(0xffffffffu, value, 2, 8);
  out[r++ * 32 + lane] = __shfl_xor_sync(0xffffffffu, value, 21);
  out[r++ * 32 + lane] = __shfl_xor_sync(0xffffffffu, value, 3, 4);
  out[r++ * 32 + lane] = __shfl_up_sync(0xffffffffu, value, 5);
  out[r++ * 32 + lane] = __shfl_up_sync(0xffffffffu, value, 3, 16);
  out[r++ * 32 + lane] = __shfl_down_sync(0xffffffffu, value, 9);
  out[r++ * 32 + lane] = __shfl_down_sync(0xffffffffu, value, 1, 2);
  ballots[lane] = __ballot_sync(0xffffffffu, value % 3 == 0);
  wide[lane] = __shfl_xor_sync(0xffffffffu, double(value) + 0.25, 17);
  __syncwarp();
}

void test_warp() {
  Buffer<int> in(32), out(8 * 32);
  Buffer<unsigned> ballots(32);
  Buffer<double> wide(32);
  for (int i = 0; i < 32; ++i) in.host[i] = i * i * 37 % 1009;
  in.send();
  SIMT_LAUNCH(warp_kernel, 1, 32, 0, nullptr, in.device, out.device, ballots.device, wide.device);
  const char* error = finish();
  out.fetch(), ballots.fetch(), wide.fetch();
  const auto from = [](int row, int lane) {
    switch (row) {
      case 0: return (lane * 5 + 3) % 32;
      case 1: return lane / 8 * 8 + 2;
      case 2: return lane ^ 21;
      case 3: return lane ^ 3;
      case 4: return lane >= 5 ? lane - 5 : lane;
      case 5: return lane % 16 >= 3 ? lane - 3 : lane;
      case 6: return lane + 9 < 32 ? lane + 9 : lane;
      default: return lane % 2 == 0 ? lane + 1 : lane;
    }
  };
  const auto equal = [](auto got, auto want) { return got == want; };
  compare("shuffles", error, out.host, [&](size_t i) { return in.host[from(int(i) / 32, int(i) % 32)]; }, equal);
  unsigned want = 0;
  for (int i = 0; i < 32; ++i) want |= unsigned(in.host[i] % 3 == 0) << i;
  compare("__ballot_sync", error, ballots.host, [&](size_t) { return want; }, equal);
  compare("shuffle of double", error, wide.host, [&](size_t i) { return in.host[i ^ 17] + 0.25; }, equal);
}

// A rotation through shared memory, round after round, and a counter of all threads of all blocks.
constexpr int kRounds = 50, kBlockThreads = 192;

__global__ void __launch_bounds__(kBlockThreads) block_kernel(int* out, int* counter) {
  SIMT_SHARED(int, ring, [kBlockThreads]);
  const int thread = int(threadIdx.x);
  int value = thread;
  for (int round = 0; round < kRounds; ++round) {
    ring[thread] = value;
    __syncthreads();
    value = ring[(thread + 1) % kBlockThreads] + 1;
    __syncthreads();
  }
  out[int(blockIdx.x) * kBlockThreads + thread] = value;
  atomicAdd(counter, 1 + int(blockIdx.x));
}

void test_block() {
  constexpr int kBlocks = 70;
  Buffer<int> out(kBlocks * kBlockThreads), counter(1);
  counter.host[0] = 5;
  counter.send();
  SIMT_LAUNCH(block_kernel, kBlocks, kBlockThreads, 0, nullptr, out.device, counter.device);
  const char* error = finish();
  out.fetch(), counter.fetch();
  const auto equal = [](int got, int want) { return got == want; };
  compare("__syncthreads, SIMT_SHARED", error, out.host, [](size_t i) { return (int(i) % kBlockThreads + kRounds) % kBlockThreads + kRounds; }, equal);
  compare("atomicAdd", error, counter.host, [](size_t) { return 5 + kBlockThreads * kBlocks * (kBlocks + 1) / 2; }, equal);
}

}  // namespace

int main() {
  if (!has_device()) {
    printf("no CUDA device\n");
    return 77;
  }
  test_to_float<bf16>("to_float(bf16)");
  test_to_float<f16>("to_float(f16)");
  test_from_float<bf16>("from_float<bf16>", "pack2<bf16>");
  test_from_float<f16>("from_float<f16>", "pack2<f16>");
  test_floats();
  test_mma_16816<bf16>({"mma_16816<bf16> of integers", "mma_16816<bf16>", "mma_16816<bf16> of inf and nan"});
  test_mma_16816<f16>({"mma_16816<f16> of integers", "mma_16816<f16>", "mma_16816<f16> of inf and nan"});
  test_mma_1688_tf32({"mma_1688_tf32 of integers", "mma_1688_tf32"});
  test_ldmatrix();
  test_cp_async();
  test_warp();
  test_block();
  printf("%d failed\n", failures);
  return failures ? 1 : 0;
}
