#pragma once
// The gradients of attention on one problem, beside their definition in double.

#include "simt_attention.h"

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

// grad_out, and the gradients that a kernel is to fill.
template <class T>
struct Gradients {
  Exact<T> grad_out, grad_query, grad_key, grad_value;
  AttentionBackwardParams params;

  explicit Gradients(Tensors<T>& x)
      : grad_out(x.p.num_heads * x.p.seqlen_q * x.p.head_dim_v),
        grad_query(x.p.num_heads * x.p.seqlen_q * x.p.head_dim),
        grad_key(x.p.num_heads_kv * x.p.seqlen_kv * x.p.head_dim),
        grad_value(x.p.num_heads_kv * x.p.seqlen_kv * x.p.head_dim_v) {
    const AttentionParams& p = params.forward = x.p;
    x.draw.fill(grad_out);
    params.grad_out = view(grad_out, p.dtype, p.seqlen_q, p.head_dim_v), params.grad_query = view(grad_query, p.dtype, p.seqlen_q, p.head_dim);
    params.grad_key = view(grad_key, p.dtype, p.seqlen_kv, p.head_dim), params.grad_value = view(grad_value, p.dtype, p.seqlen_kv, p.head_dim_v);
  }

  // A line, and whether all are right.
  bool check(Tensors<T>& x) {
    const AttentionParams& p = x.p;
    const int64_t nq = p.seqlen_q, nk = p.seqlen_kv, d = p.head_dim, dv = p.head_dim_v;
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
    print_problem(x.problem);
    printf(": error of query %.1e, key %.1e, value %.1e\n", of_query, of_key, of_value);
    return ok;
  }
};

}  // namespace
