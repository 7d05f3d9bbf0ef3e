// Runs float32 attention with products in tf32, forward and backward, on a few problems, beside the definition in double. Exits and prints like
// simt_attention.

#include "simt_attention_grad.h"

#include "cuda/attention_fma_bwd.cuh"
#include "cuda/attention_fma_fwd.cuh"

namespace {

bool check_tf32(const Problem& problem, uint32_t seed) {
  Tensors<float> x(problem, seed);
  x.p.allow_tf32 = true;
  Scratch count(nullptr);
  cuda::take_row_table(x.p, &count, false);
  Exact<uint4> memory(int64_t(count.used + 15) / 16);
  cuda::launch_attention_fma_fwd<float, cuda::Products::kTf32>(x.p, memory.data.get(), nullptr);
  const Errors errors = errors_of(x);
  printf("%s ", errors.ok ? "right" : "wrong result:");
  print_problem(problem);
  printf(": error %.1e, lse %.1e\n", errors.out, errors.lse);

  Gradients<float> gradients(x);
  Scratch count_backward(nullptr);
  cuda::FmaBackwardScratch(gradients.params, &count_backward);
  Exact<uint4> backward_memory(int64_t(count_backward.used + 15) / 16);
  cuda::launch_attention_fma_bwd<float, cuda::Products::kTf32>(gradients.params, backward_memory.data.get(), nullptr);
  return gradients.check(x) && errors.ok;
}

}  // namespace

int main() {
  bool ok = true;
  try {
    ok &= check_tf32({2, 1, 70, 133, 64, 40, true, 90}, 1);
    ok &= check_tf32({1, 1, 65, 50, 20, 128, false, kUnbounded, 2.0, true}, 2);
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  print_counts();
  return ok ? 0 : 2;
}
