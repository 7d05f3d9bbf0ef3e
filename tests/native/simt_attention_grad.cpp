// Runs the attention forward and backward of csrc/cuda on a few problems, beside the definition in double. Exits like simt_attention.

#include "simt_attention_grad.h"

#include "cuda/attention_bwd.cuh"

namespace {

template <class T, int D>
bool check_gradients(const Problem& problem, uint32_t seed) {
  Tensors<T> x(problem, seed);
  if (problem.softcap || problem.alibi) x.template forward<D, true>();
  else x.template forward<D, false>();
  Gradients<T> gradients(x);
  Scratch count(nullptr);
  cuda::take_backward_work(gradients.params, &count);
  Exact<uint4> memory(int64_t(count.used + 15) / 16);
  Scratch scratch(memory.data.get());
  const cuda::BackwardWork work = cuda::take_backward_work(gradients.params, &scratch);
  cuda::launch_attention_bwd<T, D>(gradients.params, work, nullptr);
  return gradients.check(x);
}

}  // namespace

int main() {
  bool ok = true;
  try {
    ok &= check_gradients<bf16, 64>({2, 1, 70, 133, 64, 40, true, 90}, 1);
    ok &= check_gradients<f16, 64>({1, 1, 65, 50, 24, 64, false, kUnbounded, 2.0, true}, 2);
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  return ok ? 0 : 2;
}
