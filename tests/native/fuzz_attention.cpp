// Fuzz target: any shape, mask and schedule through the attention forward of csrc/cuda, beside its definition. libFuzzer drives it where clang is;
// with SIMT_RANDOM_DRIVER the program draws inputs itself. Arguments then: seconds, seed.

#include "simt_attention.h"

#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 10) return 0;
  Problem p;
  p.heads_kv = 1 + data[0] % 2;
  p.heads = p.heads_kv * (1 + data[0] / 2 % 2);
  p.seqlen_q = 1 + data[1] % 150;
  p.seqlen_kv = 1 + data[2] % 200;
  p.head_dim = data[3] % 3 ? 64 : data[3] % 65;
  p.head_dim_v = data[4] % 3 ? 64 : 1 + data[4] % 64;
  p.causal = data[5] & 1;
  if (data[5] & 2) p.window_left = data[6];
  simt::opt.seed = data[7];
  simt::opt.async_mode = 1 + data[8] % 2;
  if (p.head_dim == 0) p.head_dim = 1;
  if (!check<bf16, false>(p, data[9], false)) abort();
  return 0;
}

#ifdef SIMT_RANDOM_DRIVER
#include <chrono>
#include <random>

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 60;
  std::mt19937 random(argc > 2 ? unsigned(atoi(argv[2])) : 1);
  const auto start = std::chrono::steady_clock::now();
  long inputs = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
    uint8_t data[10];
    for (uint8_t& byte : data) byte = uint8_t(random());
    LLVMFuzzerTestOneInput(data, sizeof data);
    ++inputs;
  }
  printf("%ld inputs\n", inputs);
}
#endif
