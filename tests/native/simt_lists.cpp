// The attention kernels of csrc/cuda with block lists. Each head has the bits that a bool mask gives it, NaN behind the mask included, whatever numbers
// the lists of other heads hold: nothing outside of the tensors is touched, which AddressSanitizer sees. Products are made for listed tiles
// alone. With SIMT_FMA the kernels without tensor cores. Exits like simt_attention.

#include "simt_attention.h"

#ifdef SIMT_FMA
#include "cuda/attention_fma_bwd.cuh"
#include "cuda/attention_fma_fwd.cuh"
#include "cuda/attention_weights.cuh"
#else
#include "cuda/attention_bwd.cuh"
#include "cuda/not_finite.cuh"
#endif

namespace {

struct List {
  int64_t heads, tiles_q, tiles_kv;
  Exact<int32_t> rows, tiles;
  Exact<uint64_t> bits;
  Exact<uint8_t> visible;  // [heads][seqlen_q][seqlen_kv]

  // state(head, tile of queries, tile of keys): 0 hidden, 1 in part, 2 whole.
  template <class State>
  List(const Problem& p, Draw draw, State state)
      : heads(p.heads),
        tiles_q((p.seqlen_q + kListTile - 1) / kListTile),
        tiles_kv((p.seqlen_kv + kListTile - 1) / kListTile),
        rows(heads * tiles_q * 2),
        tiles(count(state, 0) * 2),
        bits(count(state, 1) * kListTile),
        visible(heads * p.seqlen_q * p.seqlen_kv) {
    int32_t entry = 0, partial = 0;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t a = 0; a < tiles_q; ++a) {
        rows[(h * tiles_q + a) * 2] = entry;
        for (int64_t b = 0; b < tiles_kv; ++b) {
          const int how = state(h, a, b);
          for (int64_t i = 0; i < kListTile; ++i) {
            uint64_t word = how == 2 ? ~uint64_t(0) : 0;
            for (int64_t j = 0; how == 1 && j < kListTile; ++j) word |= uint64_t(draw() > 0) << j;
            if (how == 1) bits[partial * kListTile + i] = word;
            const int64_t query = a * kListTile + i;
            for (int64_t j = 0; query < p.seqlen_q && j < kListTile && b * kListTile + j < p.seqlen_kv; ++j)
              visible[(h * p.seqlen_q + query) * p.seqlen_kv + b * kListTile + j] = uint8_t(word >> j & 1);
          }
          if (how == 0) continue;
          tiles[2 * entry] = int32_t(b), tiles[2 * entry + 1] = how == 1 ? partial++ : -1;
          ++entry;
        }
        rows[(h * tiles_q + a) * 2 + 1] = entry;
      }
  }

  void give(AttentionParams* p) {
    p->blocks.rows.data = rows.data.get();
    p->blocks.rows.head_stride = tiles_q * 2, p->blocks.rows.row_stride = 2, p->blocks.rows.col_stride = 1;
    p->blocks.tiles = (const ListedTile*)tiles.data.get(), p->blocks.bits = bits.data.get();
    p->blocks.num_tiles = int64_t(tiles.size) / 2, p->blocks.num_bits = int64_t(bits.size) / kListTile;
  }
  void give_mask(AttentionParams* p) {
    p->bool_mask.data = visible.data.get();
    p->bool_mask.head_stride = p->seqlen_q * p->seqlen_kv, p->bool_mask.row_stride = p->seqlen_kv, p->bool_mask.col_stride = 1;
  }

 private:
  // Tiles that are visible, or those that are so in part.
  template <class State>
  int64_t count(State state, int in_part) const {
    int64_t sum = 0;
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t a = 0; a < tiles_q; ++a)
        for (int64_t b = 0; b < tiles_kv; ++b) sum += in_part ? state(h, a, b) == 1 : state(h, a, b) != 0;
    return sum;
  }
};

template <class T>
struct Results {
  Exact<T> out, grad_query, grad_key, grad_value;
  Exact<float> lse, grad_bias, grad_slopes, grad_sinks, weights;
  explicit Results(const Problem& p)
      : out(p.heads * p.seqlen_q * p.head_dim_v),
        grad_query(p.heads * p.seqlen_q * p.head_dim),
        grad_key(p.heads_kv * p.seqlen_kv * p.head_dim),
        grad_value(p.heads_kv * p.seqlen_kv * p.head_dim_v),
        lse(p.heads * p.seqlen_q),
        grad_bias(p.heads * p.seqlen_kv),
        grad_slopes(p.heads),
        grad_sinks(p.heads),
        weights(p.heads * p.seqlen_q * p.seqlen_kv) {}
};

// Forward, then backward; weights without tensor cores.
template <class T>
void run(AttentionParams p, Exact<T>& grad_out, Results<T>& results) {
  p.out = view(results.out, p.dtype, p.seqlen_q, p.head_dim_v), p.lse = results.lse.data.get();
  AttentionBackwardParams params;
  params.forward = p;
  params.grad_out = view(grad_out, p.dtype, p.seqlen_q, p.head_dim_v), params.grad_query = view(results.grad_query, p.dtype, p.seqlen_q, p.head_dim);
  params.grad_key = view(results.grad_key, p.dtype, p.seqlen_kv, p.head_dim);
  params.grad_value = view(results.grad_value, p.dtype, p.seqlen_kv, p.head_dim_v);
  if (p.alibi_slopes) params.grad_alibi_slopes = results.grad_slopes.data.get();
  if (p.sinks) params.grad_sinks = results.grad_sinks.data.get();
  if (p.bias.data) params.grad_bias = view(results.grad_bias, DType::kFloat32, 1, p.seqlen_kv), params.grad_bias.row_stride = 0;
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
  AttentionWeightsParams weights;
  weights.forward = p, weights.num_rows = p.seqlen_q;
  weights.weights = view(results.weights, DType::kFloat32, p.seqlen_q, p.seqlen_kv);
  with_memory([&](Scratch& s) { cuda::WeightsScratch(weights, &s); },
              [&](void* memory) { cuda::launch_attention_weights<T, cuda::Products::kFma>(weights, memory, nullptr); });
#else
  constexpr int kDim = 64;
  with_memory([&](Scratch& s) { cuda::take_row_table(p, &s); },
              [&](void* memory) {
                Scratch scratch(memory);
                const cuda::RowTable table = cuda::take_row_table(p, &scratch);
                cuda::fill_row_table(p, table, nullptr);
                cuda::flag_not_finite_tiles<T>(p, p.value, p.head_dim_v, table, nullptr);
                cuda::launch_attention_fwd<T, kDim, true>(p, table, nullptr);
                cuda::add_values_that_are_not_finite<T>(p, table, nullptr);
              });
  with_memory([&](Scratch& s) { cuda::take_backward_work(params, &s); },
              [&](void* memory) {
                Scratch scratch(memory);
                const cuda::BackwardWork work = cuda::take_backward_work(params, &scratch);
                cuda::launch_attention_bwd<T, kDim>(params, work, nullptr);
              });
#endif
}

template <class T>
struct Call {
  Tensors<T> x;
  Exact<float> sinks, bias;
  Exact<T> grad_out;
  AttentionParams p;

  Call(const Problem& problem, DType dtype, bool with_bias)
      : x(problem, 7), sinks(problem.heads), bias(problem.heads * problem.seqlen_kv), grad_out(x.out.size) {
    p = x.p;
    p.dtype = dtype, p.num_batch_dims = 0;
    for (TensorView* v : {&p.query, &p.key, &p.value}) v->dtype = dtype;
    for (int64_t h = 0; h < p.num_heads; ++h) sinks[h] = 0.5f;
    x.draw.fill(bias), x.draw.fill(grad_out);
    p.sinks = sinks.data.get();
    if (with_bias) p.bias = view(bias, DType::kFloat32, 1, p.seqlen_kv), p.bias.row_stride = 0;
  }
};

// The first `count` elements, NaN where the other has NaN.
template <class T>
bool same(const char* name, Exact<T>& a, Exact<T>& b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = simt::to_float(a[i]), y = simt::to_float(b[i]);
    if (x == y || (x != x && y != y)) continue;
    printf("%s %lld: %g, not %g\n", name, (long long)i, x, y);
    return false;
  }
  return true;
}

bool report(bool ok, const Problem& problem) {
  printf("%s ", ok ? "right" : "wrong result:");
  print_problem(problem);
  printf("\n");
  return ok;
}

template <class T>
bool equals_bool_mask(const Problem& problem, DType dtype, bool with_bias) {
  Call<T> call(problem, dtype, with_bias);
  List list(problem, {3}, [&](int64_t h, int64_t a, int64_t b) { return int((5 * h + 3 * a + b * b + 1) % 4 % 3); });
  // Nobody sees key 70.
  for (int64_t i = 0; i < int64_t(list.tiles.size) / 2; ++i) {
    if (list.tiles[2 * i] != 1) continue;
    if (list.tiles[2 * i + 1] < 0) list.tiles[2 * i + 1] = 0;
    for (int64_t r = 0; r < kListTile; ++r) list.bits[list.tiles[2 * i + 1] * kListTile + r] &= ~(uint64_t(1) << 6);
  }
  for (int64_t h = 0; h < problem.heads; ++h)
    for (int64_t i = 0; i < problem.seqlen_q; ++i)
      for (int64_t b = 0; b < list.tiles_kv; ++b)
        for (int64_t j = b * kListTile; j < (b + 1) * kListTile && j < problem.seqlen_kv; ++j) {
          uint8_t sees = 0;
          const int32_t* range = &list.rows[(h * list.tiles_q + i / kListTile) * 2];
          for (int32_t e = range[0]; e < range[1]; ++e) {
            if (list.tiles[2 * e] != b) continue;
            sees = list.tiles[2 * e + 1] < 0 ? 1 : uint8_t(list.bits[list.tiles[2 * e + 1] * kListTile + i % kListTile] >> (j % kListTile) & 1);
          }
          list.visible[(h * problem.seqlen_q + i) * problem.seqlen_kv + j] = sees;
        }
  for (int64_t h = 0; h < problem.heads_kv; ++h) {
    call.x.key[(h * problem.seqlen_kv + 70) * problem.head_dim + 3] = simt::from_float<T>(NAN);
    call.x.value[(h * problem.seqlen_kv + 70) * problem.head_dim_v + 5] = simt::from_float<T>(NAN);
  }
  AttentionParams listed = call.p, masked = call.p;
  list.give(&listed), list.give_mask(&masked);
  Results<T> ours(problem), want(problem);
  run(listed, call.grad_out, ours), run(masked, call.grad_out, want);
  bool ok = same("out", ours.out, want.out, int64_t(want.out.size)) && same("lse", ours.lse, want.lse, int64_t(want.lse.size)) &&
            same("grad_query", ours.grad_query, want.grad_query, int64_t(want.grad_query.size)) &&
            same("grad_key", ours.grad_key, want.grad_key, int64_t(want.grad_key.size)) &&
            same("grad_value", ours.grad_value, want.grad_value, int64_t(want.grad_value.size)) &&
            same("grad_sinks", ours.grad_sinks, want.grad_sinks, problem.heads);
  if (with_bias) ok = ok && same("grad_bias", ours.grad_bias, want.grad_bias, int64_t(want.grad_bias.size));
  if (problem.alibi) ok = ok && same("grad_slopes", ours.grad_slopes, want.grad_slopes, problem.heads);
#ifdef SIMT_FMA
  ok = ok && same("weights", ours.weights, want.weights, int64_t(want.weights.size));
#endif
  // Queries do see something, and what nobody sees has no gradient.
  double largest = 0;
  for (size_t i = 0; i < want.grad_key.size; ++i) largest = std::max(largest, std::fabs(double(simt::to_float(want.grad_key[int64_t(i)]))));
  return report(ok && largest > 0.01 && simt::to_float(want.grad_key[70 * problem.head_dim]) == 0, problem);
}

// Head 0 has a list, the others numbers that no list should hold.
template <class T>
bool wrong_numbers(const Problem& problem, DType dtype, int kind) {
  Call<T> call(problem, dtype, true);
  const auto state = [](int64_t, int64_t a, int64_t b) { return int((a + b) % 3); };
  List list(problem, {3}, state), right(problem, {3}, state);
  const int32_t far[] = {-5, int32_t(0x80000000), 0x7fffffff, 1 << 20};
  const int64_t of_first = list.tiles_q * 2;
  for (int64_t i = of_first; i < int64_t(list.rows.size); ++i) {
    if (kind == 0) list.rows[i] = far[i % 4];
  }
  for (int64_t i = 2 * list.rows[of_first - 1]; i < int64_t(list.tiles.size); ++i) {
    if (kind == 1) list.tiles[i] = far[(i / 2 + i) % 4];
    if (kind == 2) list.tiles[i] = i % 2 ? far[2] : int32_t(3 - i / 2 % 4);
  }
  AttentionParams listed = call.p, sane = call.p;
  list.give(&listed), right.give(&sane);
  Results<T> ours(problem), want(problem);
  run(listed, call.grad_out, ours), run(sane, call.grad_out, want);
  return report(same("out", ours.out, want.out, problem.seqlen_q * problem.head_dim_v) && same("lse", ours.lse, want.lse, problem.seqlen_q) &&
                    same("grad_query", ours.grad_query, want.grad_query, problem.seqlen_q * problem.head_dim),
                problem);
}

#ifndef SIMT_FMA
// Tensor-core products of a list that shows each tile of queries one of the four tiles of keys.
template <class T>
bool costs_what_is_listed(const Problem& problem, DType dtype) {
  Call<T> call(problem, dtype, false);
  uint64_t products[2];
  for (int all = 0; all < 2; ++all) {
    List list(problem, {3}, [&](int64_t h, int64_t a, int64_t b) { return all || b == (a + h) % 4 ? 2 : 0; });
    AttentionParams p = call.p;
    list.give(&p);
    Results<T> results(problem);
    const uint64_t before = simt::stats.mma;
    run(p, call.grad_out, results);
    products[all] = simt::stats.mma - before;
  }
  return report(products[0] > 0 && 4 * products[0] == products[1], problem);
}
#endif

}  // namespace

int main() {
  bool ok = true;
  try {
#ifdef SIMT_FMA
    ok &= equals_bool_mask<float>({2, 1, 150, 200, 24, 40, false, kUnbounded, 0, true}, DType::kFloat32, true);
    ok &= equals_bool_mask<bf16>({2, 2, 70, 300, 20, 12, true, 150, 2.0, false}, DType::kBFloat16, false);
    for (int kind = 0; kind < 3; ++kind) ok &= wrong_numbers<float>({2, 1, 150, 200, 8, 8}, DType::kFloat32, kind);
#else
    ok &= equals_bool_mask<bf16>({2, 1, 150, 200, 64, 64, false, kUnbounded, 0, true}, DType::kBFloat16, true);
    ok &= equals_bool_mask<f16>({2, 2, 70, 300, 20, 12, true, 150, 2.0, false}, DType::kFloat16, false);
    for (int kind = 0; kind < 3; ++kind) ok &= wrong_numbers<bf16>({2, 1, 150, 200, 64, 64}, DType::kBFloat16, kind);
    ok &= costs_what_is_listed<bf16>({2, 1, 256, 256, 64, 64}, DType::kBFloat16);
#endif
    simt::print_conflicts(stdout);
  } catch (const simt::Fault& fault) {
    puts(fault.what());
    return 3;
  }
  return ok ? 0 : 2;
}
