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

// Numbers in [-2, 2), sums of two: more of them near 0.
struct Draw {
  uint32_t seed;
  float operator()() {
    seed = seed * 1664525u + 1013904223u;
    return (float(seed >> 24) + float(seed >> 16 & 255)) / 128 - 2;
  }
  template <class T>
  void fill(Exact<T>& tensor) {
    for (size_t i = 0; i < tensor.size; ++i) tensor[int64_t(i)] = simt::from_float<T>((*this)());
  }
};

template <class T>
constexpr DType dtype_of() {
  return std::is_same<T, f16>::value ? DType::kFloat16 : std::is_same<T, bf16>::value ? DType::kBFloat16 : DType::kFloat32;
}
// Half the distance from 1 to the next number that products multiply: for float, of tf32.
template <class T>
constexpr double unit_of() {
  return std::is_same<T, bf16>::value ? 0x1p-8 : 0x1p-11;
}

template <class T>
struct Tensors {
  Problem problem;
  Draw draw;
  Exact<T> query, key, value, out;
  Exact<float> lse, slopes;
  AttentionParams p;

  Tensors(const Problem& problem, uint32_t seed)
      : problem(problem),
        draw{seed},
        query(problem.heads * problem.seqlen_q * problem.head_dim),
        key(problem.heads_kv * problem.seqlen_kv * problem.head_dim),
        value(problem.heads_kv * problem.seqlen_kv * problem.head_dim_v),
        out(problem.heads * problem.seqlen_q * problem.head_dim_v),
        lse(problem.heads * problem.seqlen_q),
        slopes(problem.heads) {
    for (auto* tensor : {&query, &key, &value}) draw.fill(*tensor);
    for (int64_t h = 0; h < problem.heads; ++h) slopes[h] = std::exp2(-float(h + 1));
    p.dtype = dtype_of<T>();
    p.num_batch_dims = 1, p.batch_sizes[0] = 1;
    p.num_heads = problem.heads, p.num_heads_kv = problem.heads_kv, p.seqlen_q = problem.seqlen_q, p.seqlen_kv = problem.seqlen_kv;
    p.head_dim = problem.head_dim, p.head_dim_v = problem.head_dim_v;
    p.scale = 1 / std::sqrt(double(p.head_dim));
    p.softcap = problem.softcap;
    if (problem.causal) p.mask.limit_right = 0;
    p.mask.window_left = problem.window_left;
    p.query = view(query, p.dtype, p.seqlen_q, p.head_dim), p.key = view(key, p.dtype, p.seqlen_kv, p.head_dim);
    p.value = view(value, p.dtype, p.seqlen_kv, p.head_dim_v), p.out = view(out, p.dtype, p.seqlen_q, p.head_dim_v);
    if (problem.alibi) p.alibi_slopes = slopes.data.get();
    p.lse = lse.data.get();
  }

  // D: head_dim and head_dim_v, rounded up.
  template <int D, bool kFeatures>
  void forward() {
    Scratch count(nullptr);
    cuda::take_row_table(p, &count);
    Exact<uint4> memory(int64_t(count.used + 15) / 16);
    Scratch scratch(memory.data.get());
    const cuda::RowTable table = cuda::take_row_table(p, &scratch);
    cuda::fill_row_table(p, table, nullptr);
    cuda::flag_not_finite_tiles<T>(p, p.value, p.head_dim_v, table, nullptr);
    cuda::launch_attention_fwd<T, D, kFeatures>(p, table, nullptr);
  }
};

// One row of the definition. Weights are 0, total 0 and lse -inf where it sees no key.
struct Row {
  std::vector<double> weight, derivative;  // derivative: of the score by scale * q . k
  double lse = -INFINITY;
  template <class T>
  Row(Tensors<T>& x, int64_t h, int64_t i) : weight(size_t(x.p.seqlen_kv)), derivative(weight) {
    const AttentionParams& p = x.p;
    const int64_t hk = h / (p.num_heads / p.num_heads_kv), position = i + p.seqlen_kv - p.seqlen_q, d = p.head_dim;
    double top = -INFINITY, total = 0;
    for (int64_t j = 0; j < p.seqlen_kv; ++j) {
      double s = 0;
      for (int64_t c = 0; c < d; ++c)
        s += double(simt::to_float(x.query[(h * p.seqlen_q + i) * d + c])) * simt::to_float(x.key[(hk * p.seqlen_kv + j) * d + c]);
      s *= p.scale;
      const double tanh = p.softcap ? std::tanh(s / p.softcap) : 0;
      if (p.softcap) s = p.softcap * tanh;
      if (x.problem.alibi) s -= double(x.slopes[h]) * std::fabs(double(position - j));
      const bool visible = !(x.problem.causal && j > position) && !(j < position - x.problem.window_left);
      weight[size_t(j)] = visible ? s : -INFINITY, derivative[size_t(j)] = 1 - tanh * tanh;
      top = std::max(top, weight[size_t(j)]);
    }
    for (double& w : weight) total += w = top == -INFINITY ? 0 : std::exp(w - top);
    for (double& w : weight)
      if (total) w /= total;
    if (total) lse = top + std::log(total);
  }
};

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

template <class T>
Errors errors_of(Tensors<T>& x) {
  const AttentionParams& p = x.p;
  const int64_t nq = p.seqlen_q, nk = p.seqlen_kv, dv = p.head_dim_v;
  Errors errors;
  for (int64_t h = 0; h < p.num_heads; ++h)
    for (int64_t i = 0; i < nq; ++i) {
      const Row row(x, h, i);
      const int64_t hk = h / (p.num_heads / p.num_heads_kv);
      std::vector<double> sum(size_t(dv), 0.0);
      double largest = 0;
      for (int64_t j = 0; j < nk; ++j)
        for (int64_t c = 0; c < dv; ++c) {
          const double v = simt::to_float(x.value[(hk * nk + j) * dv + c]);
          sum[size_t(c)] += row.weight[size_t(j)] * v;
          if (row.weight[size_t(j)] > 0) largest = std::max(largest, std::fabs(v));
        }
      // Weights and output are each rounded once to T.
      for (int64_t c = 0; c < dv; ++c) errors.add(errors.out, simt::to_float(x.out[(h * nq + i) * dv + c]), sum[size_t(c)], 2 * unit_of<T>() * largest);
      errors.add(errors.lse, x.lse[h * nq + i], row.lse, 4 * unit_of<T>());
    }
  return errors;
}

inline void print_problem(const Problem& p) {
  printf("heads %lld/%lld, %lld queries, %lld keys, head_dim %lld/%lld, causal %d, window %lld, softcap %g, alibi %d", (long long)p.heads,
         (long long)p.heads_kv, (long long)p.seqlen_q, (long long)p.seqlen_kv, (long long)p.head_dim, (long long)p.head_dim_v, p.causal,
         p.window_left == kUnbounded ? -1LL : (long long)p.window_left, p.softcap, p.alibi);
}

// False, and a line, where the result is wrong.
template <class T, bool kFeatures, int D = 64>
bool check(const Problem& p, uint32_t seed, bool print) {
  Tensors<T> tensors(p, seed);
  tensors.template forward<D, kFeatures>();
  const Errors errors = errors_of(tensors);
  if (print || !errors.ok) {
    printf("%s ", errors.ok ? "right" : "wrong result:");
    print_problem(p);
    printf(": error %.1e, lse %.1e\n", errors.out, errors.lse);
  }
  return errors.ok;
}

// What the emulator counted, and where banks were in conflict.
inline void print_counts() {
  simt::print_conflicts(stdout);
  const auto& s = simt::stats;
  printf("%llu switches, %llu mma, %llu ldmatrix with %llu extra wavefronts, %llu traced accesses with %llu extra wavefronts\n", (unsigned long long)s.switches,
         (unsigned long long)s.mma, (unsigned long long)s.ldsm, (unsigned long long)s.ldsm_extra_wavefronts, (unsigned long long)s.shared_accesses,
         (unsigned long long)s.shared_extra_wavefronts);
}

}  // namespace
