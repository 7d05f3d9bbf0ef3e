// Runs causal linear attention of csrc/cuda with decays, forward and backward, beside the definition in double: three chunks, the last one ragged.
// Exits like simt_attention.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/linear_bwd.cuh"
#include "cuda/linear_fwd.cuh"

namespace {

using namespace tiled_attention;

// Memory of exactly the size that is asked for, NaN at first.
struct Tensor {
  std::unique_ptr<float[]> data;
  int64_t size, rows, cols;
  Tensor(int64_t heads, int64_t rows, int64_t cols) : data(new float[size_t(heads * rows * cols)]), size(heads * rows * cols), rows(rows), cols(cols) {
    memset(data.get(), 0xff, size_t(size) * sizeof(float));
  }
  void draw(uint32_t seed, float low, float high) {
    for (int64_t i = 0; i < size; ++i) {
      seed = seed * 1664525u + 1013904223u;
      data[size_t(i)] = low + (high - low) * float(seed >> 8) / float(1 << 24);
    }
  }
  const float* row(int64_t head, int64_t i) const { return data.get() + (head * rows + i) * cols; }
  TensorView view() {
    TensorView v;
    v.data = data.get(), v.head_stride = rows * cols, v.row_stride = cols, v.col_stride = 1;
    return v;
  }
};
// Sums in double, compared all together: |got - want| / |want|.
struct Sums {
  std::vector<double> data;
  int64_t rows, cols;
  explicit Sums(const Tensor& like) : data(size_t(like.size), 0.0), rows(like.rows), cols(like.cols) {}
  double* row(int64_t head, int64_t i) { return data.data() + (head * rows + i) * cols; }
  double distance(const Tensor& got) const {
    double error = 0, size = 0;
    for (size_t i = 0; i < data.size(); ++i) error += (got.data[i] - data[i]) * (got.data[i] - data[i]), size += data[i] * data[i];
    return std::sqrt(error / size);
  }
};

double feature(double x) { return x > 0 ? x + 1 : std::exp(x); }
double derivative(double x) { return x > 0 ? 1 : std::exp(x); }

bool check(bool per_feature) {
  const int64_t heads = 2, n = 150, d = 24, dv = 70, columns = per_feature ? d : 1;
  Tensor query(heads, n, d), key(1, n, d), value(1, n, dv), out(heads, n, dv), decay(1, n, columns);
  Tensor grad_out(heads, n, dv), grad_query(heads, n, d), grad_key(1, n, d), grad_value(1, n, dv), grad_decay(1, n, columns);
  query.draw(1, -2, 2), key.draw(2, -2, 2), value.draw(3, -2, 2), decay.draw(4, -0.1f, 0), grad_out.draw(5, -2, 2);

  LinearAttentionBackwardParams params;
  LinearAttentionParams& p = params.forward;
  p.causal = true;
  p.num_batch_dims = 1, p.batch_sizes[0] = 1;
  p.num_heads = heads, p.num_heads_kv = 1, p.seqlen_q = p.seqlen_kv = n, p.head_dim = d, p.head_dim_v = dv;
  p.query = query.view(), p.key = key.view(), p.value = value.view(), p.out = out.view(), p.log_decay = decay.view();
  p.decay_per_feature = per_feature;
  params.grad_out = grad_out.view(), params.grad_query = grad_query.view(), params.grad_key = grad_key.view(), params.grad_value = grad_value.view();
  params.grad_log_decay = grad_decay.view();
  std::unique_ptr<uint4[]> memory(new uint4[(cuda::linear_fwd_scratch_of<float>(p) + 15) / 16]);
  const char* problem = cuda::linear_fwd_of<float>(p, memory.get(), nullptr);
  memory.reset(new uint4[(cuda::linear_bwd_scratch_of<float>(params) + 15) / 16]);
  if (!problem) problem = cuda::linear_bwd_of<float>(params, memory.get(), nullptr);
  if (problem) return puts(problem), false;

  // out_t = sum_j w_tj v_j / sum_j w_tj with w_tj = sum_c a_tc b_jc exp(G_tc - G_jc), G_t the sum of decays up to t.
  Sums total(query), want_out(out), want_query(query), want_key(key), want_value(value), want_decay(decay);
  const auto decay_at = [&](int64_t t, int64_t c) { return double(decay.row(0, t)[per_feature ? c : 0]); };
  for (int64_t t = 0; t < n; ++t)
    for (int64_t c = 0; c < d; ++c) total.row(0, t)[c] = (t ? total.row(0, t - 1)[c] : 0) + decay_at(t, c);
  std::vector<double> weight(size_t(n), 0.0);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < n; ++t) {
      double sum = 0;
      const auto term = [&](int64_t j, int64_t c) {
        return feature(query.row(h, t)[c]) * feature(key.row(0, j)[c]) * std::exp(total.row(0, t)[c] - total.row(0, j)[c]);
      };
      for (int64_t j = 0; j <= t; ++j) {
        weight[size_t(j)] = 0;
        for (int64_t c = 0; c < d; ++c) weight[size_t(j)] += term(j, c);
        sum += weight[size_t(j)];
      }
      double mean = 0;  // of the gradients of the weights
      for (int64_t e = 0; e < dv; ++e) {
        for (int64_t j = 0; j <= t; ++j) {
          want_out.row(h, t)[e] += weight[size_t(j)] / sum * value.row(0, j)[e];
          want_value.row(0, j)[e] += weight[size_t(j)] / sum * grad_out.row(h, t)[e];
        }
        mean += want_out.row(h, t)[e] * grad_out.row(h, t)[e];
      }
      for (int64_t j = 0; j <= t; ++j) {
        double grad = -mean;
        for (int64_t e = 0; e < dv; ++e) grad += double(grad_out.row(h, t)[e]) * value.row(0, j)[e];
        for (int64_t c = 0; c < d; ++c) {
          const double flow = grad / sum * term(j, c), q = query.row(h, t)[c], k = key.row(0, j)[c];
          want_query.row(h, t)[c] += flow / feature(q) * derivative(q);
          want_key.row(0, j)[c] += flow / feature(k) * derivative(k);
          // The decays of tokens j + 1 to t: a difference at either end, summed below.
          want_decay.row(0, t)[per_feature ? c : 0] += flow;
          want_decay.row(0, j)[per_feature ? c : 0] -= flow;
        }
      }
    }
  for (int64_t t = n - 2; t >= 0; --t)
    for (int64_t c = 0; c < columns; ++c) want_decay.row(0, t)[c] += want_decay.row(0, t + 1)[c];

  bool ok = true;
  const auto compare = [&](const char* name, const Sums& want, const Tensor& got) {
    const double error = want.distance(got);
    const bool right = error <= 1e-5;
    printf("%s %s, decay per %s: error %.1e\n", right ? "right" : "wrong result:", name, per_feature ? "feature" : "token", error);
    ok &= right;
  };
  compare("out", want_out, out), compare("grad_query", want_query, grad_query), compare("grad_key", want_key, grad_key);
  compare("grad_value", want_value, grad_value), compare("grad_log_decay", want_decay, grad_decay);
  return ok;
}

}  // namespace

int main() {
  try {
    const bool ok = check(false) & check(true);
    return ok ? 0 : 2;
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
}
