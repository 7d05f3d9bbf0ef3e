// Runs the attention forward of csrc/cuda on a list of problems. Argument: all, or few (one problem with ragged tiles and a causal mask).
// Exits with 0 where all is right, 2 after a wrong result, 3 after a fault. Prints bank conflicts.

#include "simt_attention.h"

#include <string>

int main(int argc, char** argv) {
  const bool few = argc > 1 && std::string(argv[1]) == "few";
  // heads, heads_kv, queries, keys, head_dim, head_dim_v, causal, window_left, softcap, alibi
  const std::vector<Problem> plain =
      few ? std::vector<Problem>{{1, 1, 100, 200, 64, 64, true}}
          : std::vector<Problem>{{1, 1, 100, 200, 64, 64, true}, {2, 1, 128, 128, 64, 64, false}, {1, 1, 1, 77, 64, 64, false},
                                 {1, 1, 130, 333, 64, 64, true}, {1, 1, 200, 100, 64, 64, true},  // the first 100 queries see no key
                                 {4, 2, 65, 1, 64, 64, false},   {1, 1, 64, 64, 64, 64, true},    {1, 1, 70, 300, 64, 64, true, 20},
                                 {1, 1, 33, 129, 40, 24, true},  {1, 1, 33, 65, 13, 7, false}};
  bool ok = true;
  try {
    for (const Problem& p : plain) ok &= check<bf16, false>(p, 1, true);
#if SIMT_FAULT == 0
    const std::vector<Problem> featured = {{2, 1, 90, 150, 64, 64, true, kUnbounded, 2.0, true}, {1, 1, 20, 80, 24, 40, false, kUnbounded, 0, true}};
    for (const Problem& p : featured) ok &= check<f16, true>(p, 2, true);
    if (!few) {
      ok &= check<bf16, false, 128>({2, 1, 70, 133, 128, 96, true}, 3, true);
      ok &= check<f16, true, 128>({1, 1, 65, 97, 128, 128, true, 40, 3.0, true}, 4, true);
    }
#endif
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  print_counts();
  return ok ? 0 : 2;
}
