// Exact attention by the CPU kernels alone: no torch, no library, one struct and one call, beside the formula in double precision.
//   g++ -std=c++17 -O3 -fno-math-errno -pthread -mavx2 -mfma -mf16c -DKERNEL_ISA=avx2 -Icsrc
//     examples/libtorch/plain.cpp csrc/cpu/instances/attention_fwd.cpp -o plain
// Prints the largest errors; exits with 1 if they are too large.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "core/params.h"
#include "cpu/kernel_functions.h"

namespace ta = tiled_attention;

namespace {

// A thread for each worker of a call. A program that has a pool of its own gives the kernels that one.
void run_workers(int num_workers, void (*body)(void* context, int worker), void* context) {
  std::vector<std::thread> threads;
  for (int worker = 1; worker < num_workers; ++worker) threads.emplace_back(body, context, worker);
  body(context, 0);
  for (std::thread& thread : threads) thread.join();
}

// [batch][num_heads][rows][cols] floats without gaps. Any other layout is other strides, in elements.
ta::TensorView view(float* data, int64_t num_heads, int64_t rows, int64_t cols) {
  ta::TensorView result;
  result.data = data;
  result.batch_strides[0] = num_heads * rows * cols;
  result.head_stride = rows * cols;
  result.row_stride = cols;
  result.col_stride = 1;
  return result;
}

constexpr int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlenQ = 70, kSeqlenKv = 90, kHeadDim = 32, kHeadDimV = 24;

// Query i of (b, h) sees the keys up to i + kSeqlenKv - kSeqlenQ. Returns lse.
double formula(const std::vector<float>& query, const std::vector<float>& key, const std::vector<float>& value, double scale, int64_t b, int64_t h, int64_t i,
               double (&out)[kHeadDimV]) {
  const float* q = &query[((b * kHeads + h) * kSeqlenQ + i) * kHeadDim];
  const int64_t head = b * kHeadsKv + h / (kHeads / kHeadsKv);
  double sum = 0;
  for (double& x : out) x = 0;
  for (int64_t j = 0; j <= i + kSeqlenKv - kSeqlenQ; ++j) {
    double score = 0;
    for (int64_t d = 0; d < kHeadDim; ++d) score += double(q[d]) * key[(head * kSeqlenKv + j) * kHeadDim + d];
    const double weight = std::exp(scale * score);
    sum += weight;
    for (int64_t d = 0; d < kHeadDimV; ++d) out[d] += weight * value[(head * kSeqlenKv + j) * kHeadDimV + d];
  }
  for (double& x : out) x /= sum;
  return std::log(sum);
}

// The larger error; NaN where one is.
double worse(double one, double other) { return other <= one || one != one ? one : other; }

}  // namespace

int main() {
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(generator);
    return values;
  };
  std::vector<float> query = draw(kBatch * kHeads * kSeqlenQ * kHeadDim), key = draw(kBatch * kHeadsKv * kSeqlenKv * kHeadDim),
                     value = draw(kBatch * kHeadsKv * kSeqlenKv * kHeadDimV);
  std::vector<float> out(kBatch * kHeads * kSeqlenQ * kHeadDimV), lse(kBatch * kHeads * kSeqlenQ);

  ta::AttentionParams params;
  params.dtype = ta::DType::kFloat32;
  params.num_batch_dims = 1, params.batch_sizes[0] = params.batch = kBatch;
  params.num_heads = kHeads, params.num_heads_kv = kHeadsKv;
  params.seqlen_q = kSeqlenQ, params.seqlen_kv = kSeqlenKv;
  params.head_dim = kHeadDim, params.head_dim_v = kHeadDimV;
  params.scale = 1 / std::sqrt(double(kHeadDim));
  params.mask.limit_right = 0;  // causal
  params.query = view(query.data(), kHeads, kSeqlenQ, kHeadDim);
  params.key = view(key.data(), kHeadsKv, kSeqlenKv, kHeadDim);
  params.value = view(value.data(), kHeadsKv, kSeqlenKv, kHeadDimV);
  params.out = view(out.data(), kHeads, kSeqlenQ, kHeadDimV);
  params.lse = lse.data();

  const ta::ThreadPool pool{2, run_workers};
  void* scratch = std::aligned_alloc(64, (ta::attention_fwd_scratch(params, pool) / 64 + 1) * 64);
  if (!scratch) return 2;
  ta::attention_fwd(params, pool, scratch);
  std::free(scratch);

  double out_error = 0, lse_error = 0, exact[kHeadDimV];
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        const int64_t row = (b * kHeads + h) * kSeqlenQ + i;
        lse_error = worse(lse_error, std::fabs(formula(query, key, value, params.scale, b, h, i, exact) - lse[row]));
        for (int64_t d = 0; d < kHeadDimV; ++d) out_error = worse(out_error, std::fabs(exact[d] - out[row * kHeadDimV + d]));
      }
    }
  }
  std::printf("largest error of out %.1e, of lse %.1e\n", out_error, lse_error);
  return out_error <= 2e-6 && lse_error <= 2e-6 ? 0 : 1;
}
