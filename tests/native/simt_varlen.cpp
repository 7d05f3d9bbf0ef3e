// The attention kernels of csrc/cuda on packed sequences with offsets that no caller should give. Nothing outside the tensors is touched, which
// AddressSanitizer sees, and a sequence whose own offsets are right gets the bits that it gets alone. With SIMT_FMA the kernels without tensor cores.
// Exits like simt_attention.

#include "simt_attention.h"

#ifdef SIMT_FMA
#include "cuda/attention_fma_bwd.cuh"
#include "cuda/attention_fma_fwd.cuh"
#else
#include "cuda/attention_bwd.cuh"
#endif

namespace {

constexpr int64_t kQueries = 100, kKeys = 120, kItems = 6;
// Sequence 0 is right. Then keys without queries and an end behind the tensor, no keys, ends before their beginning, ends out of all range.
const int64_t kOffsetsQ[kItems + 1] = {0, 40, 40, 90, 95, int64_t(1) << 62, -5};
const int64_t kOffsetsKV[kItems + 1] = {0, 50, 200, 60, -(int64_t(1) << 62), 119, 500};

template <class T>
struct Results {
  Exact<T> out, grad_query, grad_key, grad_value;
  Exact<float> lse, grad_slopes, grad_sinks;
  explicit Results(const Problem& p)
      : out(p.heads * kQueries * p.head_dim_v),
        grad_query(p.heads * kQueries * p.head_dim),
        grad_key(p.heads_kv * kKeys * p.head_dim),
        grad_value(p.heads_kv * kKeys * p.head_dim_v),
        lse(p.heads * kQueries),
        grad_slopes(p.heads),
        grad_sinks(p.heads) {}
};

// Forward, then backward.
template <class T>
void run(AttentionParams p, Exact<T>& grad_out, Results<T>& results) {
  p.out = view(results.out, p.dtype, kQueries, p.head_dim_v), p.lse = results.lse.data.get();
  AttentionBackwardParams params;
  params.forward = p;
  params.grad_out = view(grad_out, p.dtype, kQueries, p.head_dim_v), params.grad_query = view(results.grad_query, p.dtype, kQueries, p.head_dim);
  params.grad_key = view(results.grad_key, p.dtype, kKeys, p.head_dim), params.grad_value = view(results.grad_value, p.dtype, kKeys, p.head_dim_v);
  if (p.alibi_slopes) params.grad_alibi_slopes = results.grad_slopes.data.get();
  params.grad_sinks = results.grad_sinks.data.get();
  const auto with_memory = [](auto take, auto launch) {
    Scratch count(nullptr);
    take(count);
    Exact<uint4> memory(int64_t(count.used + 15) / 16);
    launch(memory.data.get());
  };
#ifdef SIMT_FMA
  with_memory([&](Scratch& s) { cuda::take_row_table(p, &s, false); },
              [&](void* memory) { cuda::launch_attention_fma_fwd<T, cuda::Products::kFma>(p, memory, nullptr); });
  with_memory([&](Scratch& s) { cuda::FmaBackwardScratch(params, &s); },
              [&](void* memory) { cuda::launch_attention_fma_bwd<T, cuda::Products::kFma>(params, memory, nullptr); });
#else
  with_memory([&](Scratch& s) { cuda::take_row_table(p, &s); },
              [&](void* memory) {
                Scratch scratch(memory);
                const cuda::RowTable table = cuda::take_row_table(p, &scratch);
                cuda::fill_row_table(p, table, nullptr);
                cuda::flag_not_finite_tiles<T>(p, p.value, p.head_dim_v, table, nullptr);
                if (p.alibi_slopes) cuda::launch_attention_fwd<T, 64, true>(p, table, nullptr);
                else cuda::launch_attention_fwd<T, 64, false>(p, table, nullptr);
              });
  with_memory([&](Scratch& s) { cuda::take_backward_work(params, &s); },
              [&](void* memory) {
                Scratch scratch(memory);
                const cuda::BackwardWork work = cuda::take_backward_work(params, &scratch);
                cuda::launch_attention_bwd<T, 64>(params, work, nullptr);
              });
#endif
}

template <class T>
bool check_offsets(const Problem& problem, DType dtype) {
  Tensors<T> x(problem, 7);
  AttentionParams p = x.p;
  p.dtype = dtype, p.num_batch_dims = 0;
  for (TensorView* v : {&p.query, &p.key, &p.value}) v->dtype = dtype;
  Exact<float> sinks(p.num_heads);
  for (int64_t h = 0; h < p.num_heads; ++h) sinks[h] = 0.5f;
  p.sinks = sinks.data.get();
  Exact<T> grad_out(p.num_heads * kQueries * p.head_dim_v);
  x.draw.fill(grad_out);
  Exact<int64_t> offsets_q(kItems + 1), offsets_kv(kItems + 1);
  for (int64_t i = 0; i <= kItems; ++i) offsets_q[i] = kOffsetsQ[i], offsets_kv[i] = kOffsetsKV[i];

  AttentionParams packed = p;
  packed.batch = kItems, packed.cu_seqlens_q = offsets_q.data.get(), packed.cu_seqlens_kv = offsets_kv.data.get();
  packed.total_q = kQueries, packed.total_kv = kKeys, packed.lse_head_stride = kQueries;
  packed.seqlen_q = 60, packed.seqlen_kv = 70;
  Results<T> together(problem), alone(problem);
  run(packed, grad_out, together);

  AttentionParams first = p;
  first.seqlen_q = kOffsetsQ[1], first.seqlen_kv = kOffsetsKV[1];
  run(first, grad_out, alone);
  bool ok = true;
  for (int64_t h = 0; h < p.num_heads; ++h) {
    const auto same = [&](auto& a, auto& b, int64_t cols) {
      return memcmp(&a[h * kQueries * cols], &b[h * kQueries * cols], size_t(first.seqlen_q * cols) * sizeof(a[0])) == 0;
    };
    ok &= same(together.out, alone.out, p.head_dim_v) && same(together.grad_query, alone.grad_query, p.head_dim);
    for (int64_t i = 0; i < first.seqlen_q; ++i) ok &= together.lse[h * kQueries + i] == alone.lse[h * first.seqlen_q + i];
  }
  printf("%s ", ok ? "right" : "wrong result:");
  print_problem(problem);
  printf("\n");
  return ok;
}

}  // namespace

int main() {
  bool ok = true;
  try {
#ifdef SIMT_FMA
    ok &= check_offsets<float>({2, 1, kQueries, kKeys, 24, 40, true, kUnbounded, 0, true}, DType::kFloat32);
    ok &= check_offsets<bf16>({2, 2, kQueries, kKeys, 24, 40, false, 30, 2.0, true}, DType::kBFloat16);
#else
    ok &= check_offsets<bf16>({2, 1, kQueries, kKeys, 64, 64, true}, DType::kBFloat16);
    ok &= check_offsets<f16>({2, 2, kQueries, kKeys, 24, 40, false, 30, 2.0, true}, DType::kFloat16);
#endif
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  return ok ? 0 : 2;
}
