// Runs the attention forward and backward of csrc/cuda on a few problems, beside the definition in double. Exits like simt_attention.

#include "simt_attention.h"

#include "cuda/attention_bwd.cuh"

namespace {

// |got - want| / |want|, of all elements together.
template <class T>
double distance(const Exact<T>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = simt::to_float(got.data[i]) - want[i];
    error += difference * difference, size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

template <class T, int D>
bool check_gradients(const Problem& problem, uint32_t seed) {
  Tensors<T> x(problem, seed);
  const AttentionParams& p = x.p;
  const int64_t nq = p.seqlen_q, nk = p.seqlen_kv, d = p.head_dim, dv = p.head_dim_v;
  if (problem.softcap || problem.alibi) x.template forward<D, true>();
  else x.template forward<D, false>();

  Exact<T> grad_out(p.num_heads * nq * dv), grad_query(p.num_heads * nq * d), grad_key(p.num_heads_kv * nk * d), grad_value(p.num_heads_kv * nk * dv);
  x.draw.fill(grad_out);
  AttentionBackwardParams params;
  params.forward = p;
  params.grad_out = view(grad_out, p.dtype, nq, dv), params.grad_query = view(grad_query, p.dtype, nq, d);
  params.grad_key = view(grad_key, p.dtype, nk, d), params.grad_value = view(grad_value, p.dtype, nk, dv);
  Scratch count(nullptr);
  cuda::take_backward_work(params, &count);
  Exact<uint4> memory(int64_t(count.used + 15) / 16);
  Scratch scratch(memory.data.get());
  const cuda::BackwardWork work = cuda::take_backward_work(params, &scratch);
  cuda::launch_attention_bwd<T, D>(params, work, nullptr);

  std::vector<double> want_query(grad_query.size), want_key(grad_key.size), want_value(grad_value.size), grad(size_t(nk), 0.0);
  for (int64_t h = 0; h < p.num_heads; ++h)
    for (int64_t i = 0; i < nq; ++i) {
      const Row row(x, h, i);
      const int64_t hk = h / (p.num_heads / p.num_heads_kv), query = (h * nq + i) * d, out = (h * nq + i) * dv;
      double mean = 0;  // of the gradients of the weights
      for (int64_t j = 0; j < nk; ++j) {
        const int64_t value = (hk * nk + j) * dv;
        grad[size_t(j)] = 0;
        for (int64_t c = 0; c < dv; ++c) {
          grad[size_t(j)] += double(simt::to_float(grad_out[out + c])) * simt::to_float(x.value[value + c]);
          want_value[size_t(value + c)] += row.weight[size_t(j)] * simt::to_float(grad_out[out + c]);
        }
        mean += row.weight[size_t(j)] * grad[size_t(j)];
      }
      for (int64_t j = 0; j < nk; ++j) {
        const double factor = row.weight[size_t(j)] * (grad[size_t(j)] - mean) * row.derivative[size_t(j)] * p.scale;
        const int64_t key = (hk * nk + j) * d;
        for (int64_t c = 0; c < d; ++c) {
          want_query[size_t(query + c)] += factor * simt::to_float(x.key[key + c]);
          want_key[size_t(key + c)] += factor * simt::to_float(x.query[query + c]);
        }
      }
    }
  const double of_query = distance(grad_query, want_query), of_key = distance(grad_key, want_key), of_value = distance(grad_value, want_value);
  // Weights, their gradients, the output and the result are each rounded once to T.
  const double allowed = 2 * unit_of<T>();
  const bool ok = of_query <= allowed && of_key <= allowed && of_value <= allowed;
  printf("%s ", ok ? "right" : "wrong result:");
  print_problem(problem);
  printf(": error of query %.1e, key %.1e, value %.1e\n", of_query, of_key, of_value);
  return ok;
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
