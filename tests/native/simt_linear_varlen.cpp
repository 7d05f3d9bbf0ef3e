// Linear attention of csrc/cuda on packed sequences with offsets that no caller should give, in segments of a few chunks. Nothing outside the
// tensors is touched, which AddressSanitizer sees, and every sequence gets the bits that it gets alone. Exits like simt_attention.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

// Segments of one chunk in the backward and of three in the forward, or of two and all.
static int64_t kept_bytes;
#define LINEAR_KEPT_BYTES kept_bytes

#include "cuda/linear_bwd.cuh"
#include "cuda/linear_fwd.cuh"

namespace {

using namespace tiled_attention;

constexpr int64_t kTotal = 310, kSequences = 8, kHeads = 2, kHeadDim = 20, kHeadDimV = 70;
// A first one that is not 0, no tokens, an end before the one before it, ends out of all range, a last one that is not the total. Of the chunks, 3, 3
// and 1, segments of two have one with the end of a sequence that began before and the beginning of one that ends behind.
const int64_t kOffsets[kSequences + 1] = {7, 0, 130, 130, 130, 90, 300, int64_t(1) << 62, -5};
const int64_t kMeant[kSequences + 1] = {0, 0, 130, 130, 130, 130, 300, 310, 310};

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
  TensorView view(int64_t from = 0) {
    TensorView v;
    v.data = data.get() + from * cols, v.head_stride = rows * cols, v.row_stride = cols, v.col_stride = 1;
    return v;
  }
};

// What a call returns: rows of all tokens, states of all sequences.
struct Results {
  Tensor out{kHeads, kTotal, kHeadDimV}, grad_query{kHeads, kTotal, kHeadDim}, grad_key{1, kTotal, kHeadDim}, grad_value{1, kTotal, kHeadDimV};
  Tensor grad_decay, kv{kSequences, kHeadDim, kHeadDimV}, k_sum{kSequences, 1, kHeadDim}, grad_kv = like(kv), grad_k_sum = like(k_sum);
  explicit Results(int64_t columns) : grad_decay(1, kTotal, columns) {}
  static Tensor like(const Tensor& t) { return Tensor(t.size / (t.rows * t.cols), t.rows, t.cols); }
  std::vector<Tensor*> all() { return {&out, &grad_query, &grad_key, &grad_value, &grad_decay, &kv, &k_sum, &grad_kv, &grad_k_sum}; }
};

enum class Kind { kFull, kNone, kToken, kFeature };

const char* run(LinearAttentionBackwardParams params) {
  std::unique_ptr<uint4[]> memory(new uint4[(cuda::linear_fwd_scratch_of<float>(params.forward) + 15) / 16]);
  const char* problem = cuda::linear_fwd_of<float>(params.forward, memory.get(), nullptr);
  memory.reset(new uint4[(cuda::linear_bwd_scratch_of<float>(params) + 15) / 16]);
  return problem ? problem : cuda::linear_bwd_of<float>(params, memory.get(), nullptr);
}

bool check(Kind kind) {
  const int64_t columns = kind == Kind::kFeature ? kHeadDim : 1;
  Tensor query(kHeads, kTotal, kHeadDim), key(1, kTotal, kHeadDim), value(1, kTotal, kHeadDimV), decay(1, kTotal, columns), grad_out(kHeads, kTotal, kHeadDimV);
  Tensor kv(kSequences, kHeadDim, kHeadDimV), k_sum(kSequences, 1, kHeadDim), grad_kv = Results::like(kv), grad_k_sum = Results::like(k_sum);
  uint32_t seed = 0;
  for (Tensor* tensor : {&query, &key, &value, &grad_out, &kv, &grad_kv, &grad_k_sum}) tensor->draw(++seed, -2, 2);
  k_sum.draw(++seed, 0.5f, 2), decay.draw(++seed, -0.1f, 0);
  Results packed(columns), alone(columns);

  const bool causal = kind != Kind::kFull, decays = kind == Kind::kToken || kind == Kind::kFeature;
  // The rows from `begin` on and the states from sequence b on, into `to`.
  const auto params_of = [&](Results& to, int64_t begin, int64_t length, int64_t b) {
    LinearAttentionBackwardParams params;
    LinearAttentionParams& p = params.forward;
    p.causal = causal, p.num_batch_dims = 0, p.decay_per_feature = kind == Kind::kFeature;
    p.num_heads = kHeads, p.num_heads_kv = 1, p.seqlen_q = p.seqlen_kv = length, p.head_dim = kHeadDim, p.head_dim_v = kHeadDimV;
    p.query = query.view(begin), p.key = key.view(begin), p.value = value.view(begin), p.out = to.out.view(begin);
    const auto state = [&](Tensor& tensor) { return tensor.data.get() + b * tensor.rows * tensor.cols; };
    p.final_kv = state(to.kv), p.final_k_sum = state(to.k_sum);
    params.grad_out = grad_out.view(begin), params.grad_query = to.grad_query.view(begin), params.grad_key = to.grad_key.view(begin);
    params.grad_value = to.grad_value.view(begin);
    params.grad_final_kv = state(grad_kv), params.grad_final_k_sum = state(grad_k_sum);
    if (decays) p.log_decay = decay.view(begin), params.grad_log_decay = to.grad_decay.view(begin);
    if (causal) {
      p.initial_kv = state(kv), p.initial_k_sum = state(k_sum);
      params.grad_initial_kv = state(to.grad_kv), params.grad_initial_k_sum = state(to.grad_k_sum);
    }
    return params;
  };

  LinearAttentionBackwardParams whole = params_of(packed, 0, kTotal, 0);
  std::unique_ptr<int64_t[]> offsets(new int64_t[kSequences + 1]);
  std::copy_n(kOffsets, kSequences + 1, offsets.get());
  whole.forward.cu_seqlens = offsets.get(), whole.forward.num_sequences = kSequences;
  if (const char* problem = run(whole)) return puts(problem), false;

  for (int64_t b = 0; b < kSequences; ++b) {
    const int64_t begin = kMeant[b], length = kMeant[b + 1] - begin;
    if (length > 0) {
      if (const char* problem = run(params_of(alone, begin, length, b))) return puts(problem), false;
      continue;
    }
    const auto pass = [&](const Tensor& from, Tensor& to) {
      const int64_t size = to.rows * to.cols;
      for (int64_t i = b * size; i < (b + 1) * size; ++i) to.data[size_t(i)] = causal ? from.data[size_t(i)] : 0;
    };
    pass(kv, alone.kv), pass(k_sum, alone.k_sum);
    if (causal) pass(grad_kv, alone.grad_kv), pass(grad_k_sum, alone.grad_k_sum);
  }
  const std::vector<Tensor*> got = packed.all(), want = alone.all();
  for (size_t i = 0; i < got.size(); ++i) {
    if (memcmp(got[i]->data.get(), want[i]->data.get(), size_t(want[i]->size) * sizeof(float)) != 0) {
      for (int64_t k = 0; k < want[i]->size; ++k) {
        const float a = got[i]->data[size_t(k)], b = want[i]->data[size_t(k)];
        if (memcmp(&a, &b, sizeof(float)) != 0) return printf("tensor %zu at %lld: %g, alone %g\n", i, (long long)k, double(a), double(b)), false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  int wrong = 0;
  const char* names[] = {"not causal", "no decay", "a decay per token", "a decay per feature"};
  for (Kind kind : {Kind::kFull, Kind::kNone, Kind::kToken, Kind::kFeature}) {
    bool right = true;
    for (int64_t bytes : {20000, 160000}) kept_bytes = bytes, right &= check(kind);
    wrong += !right;
    printf("%s %s\n", right ? "right" : "wrong", names[int(kind)]);
  }
  return wrong ? 2 : 0;
}
