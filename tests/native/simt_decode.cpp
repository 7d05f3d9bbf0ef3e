// Runs decode of csrc/cuda over caches whose lengths and pages nobody checked: what a device reads then must stay inside of the cache. Beside the
// definition in double over the keys that are left. Exits like simt_attention.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/attention_decode.cuh"

namespace {

using namespace tiled_attention;

// Memory of exactly the size that is asked for, NaN at first.
template <class T>
struct Exact {
  std::unique_ptr<T[]> data;
  int64_t size;
  explicit Exact(int64_t n) : data(new T[size_t(n)]), size(n) { memset((void*)data.get(), 0xff, size_t(n) * sizeof(T)); }
  T& operator[](int64_t i) { return data[size_t(i)]; }
};

struct Draw {
  uint32_t seed = 1;
  float operator()() {
    seed = seed * 1664525u + 1013904223u;
    return float(seed >> 8) / float(1 << 23) - 1;
  }
};

template <class T>
TensorView view(Exact<T>& tensor, int64_t heads, int64_t rows, int64_t cols) {
  TensorView v;
  v.data = tensor.data.get();
  v.batch_strides[0] = heads * rows * cols, v.head_stride = rows * cols, v.row_stride = cols, v.col_stride = 1;
  return v;
}

struct Problem {
  int64_t group, seqlen_q, head_dim, head_dim_v, slots, page_size, pinned, window;
  std::vector<int64_t> seqlens;  // any numbers
};

template <class T> constexpr DType kDType = sizeof(T) == 4 ? DType::kFloat32 : DType::kBFloat16;

template <class T>
bool check(const Problem& problem) {
  using R = cuda::Real<T>;
  const int64_t batch = int64_t(problem.seqlens.size()), heads_kv = 2, heads = heads_kv * problem.group, d = problem.head_dim, dv = problem.head_dim_v;
  const int64_t n = problem.seqlen_q, num_new = n, page = problem.page_size ? problem.page_size : problem.slots, table_pages = problem.slots / page;
  const int64_t pages = problem.page_size ? batch * table_pages : batch;
  Exact<T> query(batch * heads * n * d), key(pages * heads_kv * page * d), value(pages * heads_kv * page * dv), out(batch * heads * n * dv);
  Exact<T> new_key(batch * heads_kv * num_new * d), new_value(batch * heads_kv * num_new * dv);
  Exact<R> lse(batch * heads * n);
  Exact<int64_t> seqlens(batch);
  Exact<int32_t> table(batch * table_pages);
  Draw draw;
  for (Exact<T>* tensor : {&query, &key, &value, &new_key, &new_value}) {
    for (int64_t i = 0; i < tensor->size; ++i) (*tensor)[i] = cuda::from_real<T>(R(draw()));
  }
  for (int64_t b = 0; b < batch; ++b) seqlens[b] = problem.seqlens[size_t(b)];
  // The second page of every item but the first is out of range.
  for (int64_t i = 0; i < table.size; ++i) table[i] = int32_t(i % table_pages == 1 && i > table_pages ? (i % 2 ? -1 - i : 1000000 + i) : i);

  CacheParams cache;
  cache.slots = problem.slots, cache.pinned = problem.pinned;
  if (problem.page_size) cache.page_table = table.data.get(), cache.table_pages = table_pages, cache.num_pages = pages, cache.page_size = page;
  cache.cache_seqlens = seqlens.data.get();
  cache.num_new = num_new;
  CacheAppendParams append;
  append.dtype = kDType<T>;
  append.batch = batch, append.num_heads_kv = heads_kv, append.head_dim = d, append.head_dim_v = dv;
  append.cache = cache;
  append.key = view(key, heads_kv, page, d), append.value = view(value, heads_kv, page, dv);
  append.new_key = view(new_key, heads_kv, num_new, d), append.new_value = view(new_value, heads_kv, num_new, dv);
  cuda::launch_cache_append<T>(append, nullptr);

  AttentionDecodeParams params;
  AttentionParams& p = params.attention;
  p.dtype = kDType<T>;
  p.num_batch_dims = 1, p.batch = p.batch_sizes[0] = batch;
  p.num_heads = heads, p.num_heads_kv = heads_kv, p.seqlen_q = n, p.seqlen_kv = problem.slots, p.head_dim = d, p.head_dim_v = dv;
  p.scale = 0.3;
  p.mask.limit_left = problem.window, p.mask.limit_right = 0;
  p.query = view(query, heads, n, d), p.key = append.key, p.value = append.value, p.out = view(out, heads, n, dv);
  p.lse = lse.data.get();
  params.cache = cache;
  const cuda::DecodePlan plan = cuda::decode_plan_of<T>(params);
  Scratch count(nullptr);
  cuda::DecodeScratch(p, plan, &count);
  std::unique_ptr<uint4[]> memory(new uint4[(count.used + 15) / 16]);
  cuda::launch_decode<T>(params, plan, memory.get(), nullptr);

  double error = 0, size = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const CacheItem item(cache, b);
    const auto row_of = [&](Exact<T>& tensor, int64_t head, int64_t j, int64_t cols) -> const T* {
      const int64_t slot = item.slot(j), at = item.pages ? item.page(slot) : b;
      return at < 0 ? nullptr : &tensor[((at * heads_kv + head) * page + (item.pages ? item.row_of_page(slot) : slot)) * cols];
    };
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < n; ++i) {
        const int64_t position = item.length - n + i;
        std::vector<double> sum(size_t(dv), 0.0);
        double total = 0;
        for (int64_t j = 0; j < item.length; ++j) {
          if (!item.holds(int(j)) || j > position || j < position - problem.window || !row_of(key, h / problem.group, j, d)) continue;
          const T* k = row_of(key, h / problem.group, j, d);
          double score = 0;
          for (int64_t c = 0; c < d; ++c) score += double(cuda::to_real(query[((b * heads + h) * n + i) * d + c])) * double(cuda::to_real(k[c]));
          const double weight = std::exp(0.3 * score);
          total += weight;
          for (int64_t c = 0; c < dv; ++c) sum[size_t(c)] += weight * double(cuda::to_real(row_of(value, h / problem.group, j, dv)[c]));
        }
        for (int64_t c = 0; c < dv; ++c) {
          const double want = total == 0 ? 0 : sum[size_t(c)] / total, got = double(cuda::to_real(out[((b * heads + h) * n + i) * dv + c]));
          error += (got - want) * (got - want), size += want * want;
        }
        const double got = double(lse[(b * heads + h) * n + i]);
        if (total == 0 ? got != -HUGE_VAL : std::fabs(got - std::log(total)) > 1e-4) error += 1;
      }
  }
  error = std::sqrt(error / (size > 0 ? size : 1));
  const bool right = error <= (sizeof(T) == 2 ? 3e-3 : 1e-5);
  printf("%s %d bytes, group %d, %d queries, %d to %d, %d slots, pages of %d, ring %d: error %.1e\n", right ? "right" : "wrong result:", int(sizeof(T)),
         int(problem.group), int(n), int(d), int(dv), int(problem.slots), int(problem.page_size), int(problem.pinned), error);
  return right;
}

}  // namespace

int main() {
  constexpr int64_t kFar = int64_t(1) << 40;
  try {
    bool ok = true;
    // Lengths below 0, beyond the cache, and far beyond everything.
    const std::vector<int64_t> lengths = {40, -5, 95, 1000, kFar, -kFar, 0};
    ok &= check<float>({1, 1, 16, 24, 96, 0, -1, kUnbounded, lengths});
    ok &= check<float>({4, 1, 64, 64, 96, 16, -1, kUnbounded, lengths});
    ok &= check<bf16>({4, 1, 128, 128, 96, 16, -1, 50, lengths});
    ok &= check<bf16>({3, 3, 72, 40, 90, 9, -1, kUnbounded, lengths});
    ok &= check<float>({8, 1, 20, 300, 96, 0, -1, kUnbounded, lengths});
    ok &= check<bf16>({8, 1, 64, 64, 700, 0, -1, kUnbounded, {600, 700, 90}});
    ok &= check<bf16>({8, 1, 256, 256, 64, 0, -1, kUnbounded, {60}});
    // Rings.
    ok &= check<float>({2, 2, 32, 32, 60, 0, 0, 40, {20, 70, 1000, -3}});
    ok &= check<bf16>({8, 1, 64, 64, 60, 10, 7, 40, {20, 70, 1003, -3}});
    simt::print_conflicts(stdout);
    return ok ? 0 : 2;
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
}
