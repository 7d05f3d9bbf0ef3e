#pragma once
// The exact attention forward of csrc/cuda on one problem, beside its definition in double. SIMT_FAULT builds a fault into the kernel.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/attention_fwd.cuh"

namespace {

using namespace tiled_attention;

struct Problem {
  int64_t heads = 1, heads_kv = 1, seqlen_q = 0, seqlen_kv = 0, head_dim = 64, head_dim_v = 64;
  bool causal = false;
  int64_t window_left = kUnbounded;
  double softcap = 0;
  bool alibi = false;
};

// Memory of exactly the size that is asked for, so that AddressSanitizer sees the first byte behind it.
template <class T>
struct Exact {
  std::unique_ptr<T[]> data;
  size_t size;
  explicit Exact(int64_t n) : data(new T[size_t(n)]), size(size_t(n)) { memset((void*)data.get(), 0xff, size * sizeof(T)); }
  T& operator[](int64_t i) { return data[size_t(i)]; }
};
template <class T>
TensorView view(Exact<T>& tensor, DType dtype, int64_t rows, int64_t cols) {
  TensorView v;
  v.data = tensor.data.get(), v.dtype = dtype;
  v.head_stride = rows * cols, v.row_stride = cols, v.col_stride = 1;
  return v;
}

// The largest error of out and of lse. Where a row sees no key, out has to be 0 and lse -inf.
struct Errors {
  double out = 0, lse = 0;
  bool ok = true;
  void add(double& largest, double got, double want, double allowed) {
    const double error = got == want ? 0 : std::fabs(got - want);
    if (!(error <= allowed)) ok = false;
    if (!(error <= largest)) largest = error;
  }
};

template <class T, bool kFeatures>
Errors run(const Problem& problem, uint32_t seed) {
  const auto [heads, heads_kv, nq, nk, d, dv, causal, window_left, softcap, alibi] = problem;
  const DType dtype = std::is_same<T, f16>::value ? DType::kFloat16 : DType::kBFloat16;
  Exact<T> query(heads * nq * d), key(heads_kv * nk * d), value(heads_kv * nk * dv), out(heads * nq * dv);
  Exact<float> lse(heads * nq), slopes(heads);
  auto draw = [&seed] {  // sums of two: more numbers near 0
    seed = seed * 1664525u + 1013904223u;
    return (float(seed >> 24) + float(seed >> 16 & 255)) / 128 - 2;
  };
  for (auto* tensor : {&query, &key, &value})
    for (size_t i = 0; i < tensor->size; ++i) (*tensor)[int64_t(i)] = simt::from_float<T>(draw());
  for (int64_t h = 0; h < heads; ++h) slopes[h] = std::exp2(-float(h + 1));

  AttentionParams p;
  p.dtype = dtype;
  p.num_batch_dims = 1, p.batch_sizes[0] = 1;
  p.num_heads = heads, p.num_heads_kv = heads_kv, p.seqlen_q = nq, p.seqlen_kv = nk, p.head_dim = d, p.head_dim_v = dv;
  p.scale = 1 / std::sqrt(double(d));
  p.softcap = softcap;
  if (causal) p.mask.limit_right = 0;
  p.mask.window_left = window_left;
  p.query = view(query, dtype, nq, d), p.key = view(key, dtype, nk, d), p.value = view(value, dtype, nk, dv), p.out = view(out, dtype, nq, dv);
  if (alibi) p.alibi_slopes = slopes.data.get();
  p.lse = lse.data.get();
  Scratch count(nullptr);
  cuda::take_row_table(p, &count);
  Exact<uint4> memory(int64_t(count.used + 15) / 16);
  Scratch scratch(memory.data.get());
  const cuda::RowTable table = cuda::take_row_table(p, &scratch);
  cuda::fill_row_table<T>(p, p.value, dv, table, nullptr);
  cuda::launch_attention_fwd<T, 64, kFeatures>(p, table, nullptr);

  Errors errors;
  const double unit = std::is_same<T, f16>::value ? 0x1p-11 : 0x1p-8;
  std::vector<double> score(nk), sum(dv), weight(nk);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < nq; ++i) {
      const int64_t hk = h / (heads / heads_kv), position = i + nk - nq;
      double top = -INFINITY, total = 0;
      for (int64_t j = 0; j < nk; ++j) {
        double s = 0;
        for (int64_t c = 0; c < d; ++c) s += double(simt::to_float(query[(h * nq + i) * d + c])) * simt::to_float(key[(hk * nk + j) * d + c]);
        s *= p.scale;
        if (softcap) s = softcap * std::tanh(s / softcap);
        if (alibi) s -= double(slopes[h]) * std::fabs(double(position - j));
        const bool visible = !(causal && j > position) && !(j < position - window_left);
        score[size_t(j)] = visible ? s : -INFINITY;
        top = std::max(top, score[size_t(j)]);
      }
      std::fill(sum.begin(), sum.end(), 0.0);
      double largest = 0;
      for (int64_t j = 0; j < nk; ++j) {
        weight[size_t(j)] = top == -INFINITY ? 0 : std::exp(score[size_t(j)] - top);
        total += weight[size_t(j)];
        for (int64_t c = 0; c < dv; ++c) {
          const double v = simt::to_float(value[(hk * nk + j) * dv + c]);
          sum[size_t(c)] += weight[size_t(j)] * v;
          if (weight[size_t(j)] > 0) largest = std::max(largest, std::fabs(v));
        }
      }
      // Weights and output are each rounded once to T.
      for (int64_t c = 0; c < dv; ++c)
        errors.add(errors.out, simt::to_float(out[(h * nq + i) * dv + c]), total ? sum[size_t(c)] / total : 0, 2 * unit * largest);
      errors.add(errors.lse, lse[h * nq + i], total ? top + std::log(total) : -INFINITY, 4 * unit);
    }
  return errors;
}

// False, and a line, where the result is wrong.
template <class T, bool kFeatures>
bool check(const Problem& p, uint32_t seed, bool print) {
  const Errors errors = run<T, kFeatures>(p, seed);
  if (print || !errors.ok)
    printf("%s heads %lld/%lld, %lld queries, %lld keys, head_dim %lld/%lld, causal %d, window %lld, softcap %g, alibi %d: error %.1e, lse %.1e\n",
           errors.ok ? "right" : "wrong result:", (long long)p.heads, (long long)p.heads_kv, (long long)p.seqlen_q, (long long)p.seqlen_kv,
           (long long)p.head_dim, (long long)p.head_dim_v, p.causal, p.window_left == kUnbounded ? -1LL : (long long)p.window_left, p.softcap, p.alibi,
           errors.out, errors.lse);
  return errors.ok;
}

}  // namespace
