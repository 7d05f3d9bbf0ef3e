#pragma once
// One token of linear attention. Bound by reading and writing the state once: four vectors of output columns at a time, all of
// head_dim inside. The sums are made in the order of the products, so that values that are all 1 give exactly 1.

#include "linear_rows.h"
#include "workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
struct LinearStep {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, kWide = 4;
  const LinearAttentionParams& p;

  void run(const ThreadPool& pool) const {
    for_each_item(pool, p.batch * p.num_heads_kv, [&](int, int64_t item) {
      const LinearHead<T> head(p, item);
      with_feature(p.query_map, [&](auto query_map) {
        with_feature(p.key_map, [&](auto key_map) {
          for (int64_t i = 0; i < head.group(); i++) token<decltype(query_map)::value, decltype(key_map)::value>(head, i);
        });
      });
    });
  }

  // The first query head of the group moves the state on, the others read it.
  template <FeatureMap kQueryMap, FeatureMap kKeyMap>
  void token(const LinearHead<T>& head, int64_t index) const {
    const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    const bool moves = index == 0, masked = head.mask.data && !*head.mask.data, decays = head.log_decay.data != nullptr;
    const int64_t size = p.head_dim * p.head_dim_v;
    const Real* kv = moves ? head.state_at(p.initial_kv, size) : head.state_at(p.final_kv, size);
    const Real* k_sum = moves ? head.state_at(p.initial_k_sum, p.head_dim) : head.state_at(p.final_k_sum, p.head_dim);
    Real *new_kv = head.state_at(p.final_kv, size), *new_k_sum = head.state_at(p.final_k_sum, p.head_dim);
    const Matrix<const T> query = head.template query_rows<const T>(p.query, index);
    const Matrix<T> out = head.template query_rows<T>(p.out, index);
    const V zero(Real(0));
    Real denominator = 0;
    for (int e = 0; e == 0 || e < head_dim_v; e += kWide * kN) {
      const int left = head_dim_v - e;
      V value[kWide], sum[kWide], weight(Real(0));
      for (int x = 0; x < kWide; x++) {
        value[x] = masked ? zero : load_strided(head.value.data, head.value.col_stride, e + x * kN, head_dim_v);
        sum[x] = zero;
      }
      for (int d = 0; d < head_dim; d += kN) {
        alignas(64) Real a[kN], b[kN], gate[kN], z[kN];
        const int count = min_of(kN, head_dim - d);
        keep_lanes(feature<kQueryMap>(load_strided(query.data, query.col_stride, d, head_dim)), 0, count, zero).store(a);
        if (moves) {
          (masked ? zero : keep_lanes(feature<kKeyMap>(load_strided(head.key.data, head.key.col_stride, d, head_dim)), 0, count, zero)).store(b);
          const Matrix<const Real>& g = head.log_decay;
          const V decay = !decays ? V(Real(1)) : exp(p.decay_per_feature ? load_strided(g.data, g.col_stride, d, head_dim) : V(*g.data));
          decay.store(gate);
          if (e == 0) {
            const V old = load_converted(k_sum + d, head_dim - d);
            const V key = V::load(b), moved = decay.v == 0 ? key.v : multiply_add(old, decay, key).v;
            store_converted(moved, new_k_sum + d, head_dim - d);
            moved.store(z);
          }
        } else if (e == 0) {
          load_converted(k_sum + d, head_dim - d).store(z);
        }
        for (int row = 0; row < count; row++) {
          const int64_t at = int64_t(d + row) * head_dim_v + e;
          const auto columns = [&](auto load, auto store) {
#pragma GCC unroll 4
            for (int x = 0; x < kWide; x++) {
              V s = load(kv + at + x * kN, x);
              if (moves) {
                const V product = rounded(V(b[row]) * value[x]);
                s = gate[row] == 0 ? product : multiply_add(s, V(gate[row]), product);
                store(s, new_kv + at + x * kN, x);
              }
              sum[x] = multiply_add(V(a[row]), s, sum[x]);
            }
          };
          if (left >= kWide * kN) columns([](const Real* from, int) { return V::load(from); }, [](V s, Real* to, int) { s.store(to); });
          else
            columns([&](const Real* from, int x) { return load_converted(from, left - x * kN); },
                    [&](V s, Real* to, int x) { store_converted(s, to, left - x * kN); });
          if (e == 0) weight = multiply_add(V(a[row]), V(z[row]), weight);
        }
      }
      if (e == 0) denominator = weight.v[0];
      const Quotient<Real> quotient(p.normalize, denominator, Real(p.scale));
      for (int x = 0; x < kWide && x * kN < left; x++) {
        store_strided(quotient.of(sum[x]), out.data, out.col_stride, e + x * kN, head_dim_v);
      }
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
