#pragma once
// A few tokens of the backward of linear attention with a decay per feature, one after the other. With w_i, t_i, dS and dz as in
// linear_bwd_chunk.h, D_i and E_i the gradients of the state behind token i, and r_i = S_i do_i:
//   da_i = w_i (r_i - t_i z_i),  t_i = w_i a_i . r_i
//   D_i = exp(g_(i+1)) D_(i+1) + a_i (w_i do_i)^T,  E_i = exp(g_(i+1)) E_(i+1) - t_i w_i a_i
//   db_i = D_i v_i + E_i,  dv_i = b_i D_i,  dg_i = exp(g_i) (S_(i-1) . D_i + z_(i-1) E_i), row by row
// Features stand in the lanes; the states before all tokens of the chunk are kept.

#include "linear_bwd.h"
#include "linear_gated.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
struct LinearTokens {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, P = kPanel<Real>, kStep = 4;  // tokens in registers
  const LinearAttentionBackwardParams& params;
  const LinearAttentionParams& p;
  const StateLayout<Real> layout;
  int head_dim, head_dim_v, chunk, group, key_stride, value_stride;

  Real *key, *gate, *value;              // rows of b, exp(g) and v
  Real *query, *grad_out, *factor, *query_factor, *reads;  // of the query heads one after the other: rows of a and of do, w, -t w, rows of r
  Real* history;                         // the states before each token and behind the last
  Real *grad_key, *grad_gate, *grad_value, *partial;  // rows; [kStep][kN value columns][kN]
  T *key_temp, *value_temp, *query_temp, *grad_out_temp;
  uint8_t* mask_temp;

  LinearHead<T> head{p, 0};
  int first_panel = 0, last_panel = 0;
  const uint8_t* mask = nullptr;
  bool resets = false;  // a decay of exactly 0, which forgets even what is not finite

  // The kept states stay in L2.
  static int chunk_of(const LinearAttentionParams& p) { return p.head_dim * p.head_dim_v > 64 * 64 ? 8 : 16; }

  LinearTokens(const LinearAttentionBackwardParams& params, Scratch& s)
      : params(params),
        p(params.forward),
        layout(p),
        head_dim(int(p.head_dim)),
        head_dim_v(int(p.head_dim_v)),
        chunk(chunk_of(p)),
        group(int(p.num_heads / p.num_heads_kv)),
        key_stride(layout.panels * P),
        value_stride(round_up(head_dim_v, kN)) {
    const int64_t key_rows = int64_t(chunk) * key_stride, value_rows = int64_t(chunk) * value_stride;
    const auto strided = [](const TensorView& view) { return view.col_stride != 1; };
    key = s.take<Real>(key_rows);
    gate = s.take<Real>(key_rows);
    value = s.take<Real>(value_rows);
    query = s.take<Real>(group * key_rows);
    grad_out = s.take<Real>(group * value_rows);
    factor = s.take<Real>(int64_t(group) * chunk);
    query_factor = s.take<Real>(int64_t(group) * chunk);
    reads = s.take<Real>(group * key_rows);
    history = s.take<Real>((chunk + 1) * layout.size);
    grad_key = s.take<Real>(key_rows);
    grad_gate = s.take<Real>(key_rows);
    grad_value = s.take<Real>(value_rows);
    partial = s.take<Real>(kStep * kN * kN);
    key_temp = s.take<T>(strided(p.key) ? int64_t(chunk) * head_dim : 0);
    value_temp = s.take<T>(strided(p.value) ? int64_t(chunk) * head_dim_v : 0);
    query_temp = s.take<T>(strided(p.query) ? int64_t(chunk) * head_dim : 0);
    grad_out_temp = s.take<T>(strided(params.grad_out) ? int64_t(chunk) * head_dim_v : 0);
    mask_temp = s.take<uint8_t>(chunk);
  }

  void start(int64_t item, int first, int last) {
    head = LinearHead<T>(p, item);
    first_panel = first, last_panel = last;
  }
  // Only causal.
  void full_queries(const Real*, int64_t, int64_t, Real*, int64_t) {}
  void transpose_grad_state(const Real*) {}
  void full_keys(const Real*, bool, int64_t, int64_t) {}

  void pack_keys(int64_t begin, int rows) {
    mask = head.mask_rows(begin, rows, mask_temp);
    zero_tail(key, rows);
    feature_rows(p.key_map, adjacent_columns(head.key, begin, rows, head_dim, key_temp), rows, head_dim, mask, key, key_stride);
    feature_rows(FeatureMap::kIdentity, adjacent_columns(head.value, begin, rows, head_dim_v, value_temp), rows, head_dim_v, mask, value, value_stride);
    zero_tail(gate, rows);
    resets = gate_rows(head.log_decay, begin, rows, head_dim, gate, key_stride);
  }
  void pack_queries(int index, int64_t begin, int rows) {
    const auto query_rows = adjacent_columns(head.template query_rows<const T>(p.query, index), begin, rows, head_dim, query_temp);
    const auto grad_rows = adjacent_columns(head.template query_rows<const T>(params.grad_out, index), begin, rows, head_dim_v, grad_out_temp);
    Real* to = query + int64_t(index) * chunk * key_stride;
    zero_tail(to, rows);
    feature_rows(p.query_map, query_rows, rows, head_dim, (const uint8_t*)nullptr, to, key_stride);
    feature_rows(FeatureMap::kIdentity, grad_rows, rows, head_dim_v, (const uint8_t*)nullptr, grad_out + int64_t(index) * chunk * value_stride, value_stride);
  }
  // Whole panels are computed: zeros where no vector reaches.
  void zero_tail(Real* rows, int count) const {
    if (key_stride - kN < head_dim) return;
    for (int i = 0; i < count; i++) V(Real(0)).store(rows + i * key_stride + key_stride - kN);
  }
  template <bool kResets>
  static ALWAYS_INLINE V decayed(V x, V g) {
    return kResets ? V(g.v == 0 ? V(Real(0)).v : (x * g).v) : x * g;
  }

  // The state behind `rows` tokens; kKeep: those before each of them, and behind the last, in the history, whose first is given.
  template <bool kKeep>
  void move_state(Real* state, int rows) {
    for (int panel = first_panel; panel < last_panel; panel++)
      for (int x = 0; x < P; x += kN) {
        Real* z = layout.sum(state) + panel * P + x;
        for (int t = 0; t < rows; t++, z += kKeep ? layout.size : 0) {
          const int64_t at = int64_t(t) * key_stride + panel * P + x;
          const V moved = decayed<true>(V::load(z), V::load(gate + at)) + V::load(key + at);
          moved.store(kKeep ? z + layout.size : z);
        }
        for (int t = 0; t < rows; t += kStep) {
          Real* from = (kKeep ? history + t * layout.size : state) + panel * layout.panel_stride + x;
          const int count = min_of(kStep, rows - t);
          if (count < kStep || resets || panel * P + x + kN > head_dim)
            for (int i = 0; i < count; i++) state_columns<kKeep, 1, true>(from + (kKeep ? i * layout.size : 0), t + i, panel * P + x);
          else state_columns<kKeep, kStep, false>(from, t, panel * P + x);
        }
      }
  }
  // One vector of features over tokens t .. t + kCount; kAny: decays may be 0, and lanes may lie behind head_dim, where 0 times what
  // is not finite must not stay.
  template <bool kKeep, int kCount, bool kAny>
  __attribute__((noinline)) void state_columns(Real* from, int t, int d) const {
    const int64_t size = kKeep ? layout.size : 0;
    const Real* values = value + int64_t(t) * value_stride;
    const int columns = head_dim_v, stride = value_stride;
    V b[kCount], g[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i++) b[i] = V::load(key + int64_t(t + i) * key_stride + d), g[i] = V::load(gate + int64_t(t + i) * key_stride + d);
    for (int e = 0; e < columns; e++, from += P) {
      V s = V::load(from);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; i++) {
        s = decayed<kAny>(s, g[i]) + b[i] * V(values[i * stride + e]);
        if (kAny) s = keep_lanes(s, 0, head_dim - d, V(Real(0)));
        if (kKeep) s.store(from + (i + 1) * size);
      }
      if (!kKeep) s.store(from);
    }
  }

  bool advance(Real* state, int64_t begin, int64_t end) {
    pack_keys(begin, int(end - begin));
    move_state<false>(state, int(end - begin));
    return true;
  }

  // r, w and -t w of all queries, from the history.
  void read_states(int64_t begin, int rows) {
    for (int index = 0; index < group; index++) {
      pack_queries(index, begin, rows);
      const Real *a = query + int64_t(index) * chunk * key_stride, *grads = grad_out + int64_t(index) * chunk * value_stride;
      Real* r = reads + int64_t(index) * chunk * key_stride;
      for (int t = 0; t < rows; t++) {
        const Real *state = history + (t + 1) * layout.size, *grad = grads + t * value_stride;
        for (int panel = 0; panel < layout.panels; panel++) {
          constexpr int kChains = 4;
          V sum[kChains][2];
          for (auto& chain : sum) chain[0] = chain[1] = V(Real(0));
          const Real* column = state + panel * layout.panel_stride;
          int e = 0;
          for (; e + kChains <= head_dim_v; e += kChains)
#pragma GCC unroll 4
            for (int i = 0; i < kChains; i++)
              for (int x = 0; x < 2; x++) sum[i][x] = multiply_add(V::load(column + (e + i) * P + x * kN), V(grad[e + i]), sum[i][x]);
          for (; e < head_dim_v; e++)
            for (int x = 0; x < 2; x++) sum[0][x] = multiply_add(V::load(column + e * P + x * kN), V(grad[e]), sum[0][x]);
          for (int x = 0; x < 2; x++) ((sum[0][x] + sum[1][x]) + (sum[2][x] + sum[3][x])).store(r + t * key_stride + panel * P + x * kN);
        }
        Real inverse = Real(p.scale), delta = 0;
        if (p.normalize) {
          const Real denominator = dot(a + t * key_stride, layout.sum(state), key_stride);
          inverse = denominator == 0 ? Real(0) : 1 / denominator;
          delta = inverse == 0 ? Real(0) : inverse * dot(a + t * key_stride, r + t * key_stride, key_stride);
        }
        factor[index * chunk + t] = inverse;
        query_factor[index * chunk + t] = -delta * inverse;
      }
    }
  }
  bool factors(const Real* state, int64_t begin, int64_t end, Real* to, int64_t stride) {
    const int rows = int(end - begin);
    pack_keys(begin, rows);
    layout.copy(state, 0, layout.panels, history);
    move_state<true>(history, rows);
    read_states(begin, rows);
    for (int i = 0; i < group; i++) {
      memcpy(to + 2 * i * stride, factor + i * chunk, rows * sizeof(Real));
      memcpy(to + (2 * i + 1) * stride, query_factor + i * chunk, rows * sizeof(Real));
    }
    return true;
  }

  bool advance_grad(Real* grad_state, bool, int64_t begin, int64_t end, const Real* from, int64_t stride) {
    const int rows = int(end - begin);
    pack_keys(begin, rows);
    for (int i = 0; i < group; i++) {
      pack_queries(i, begin, rows);
      memcpy(factor + i * chunk, from + 2 * i * stride, rows * sizeof(Real));
      memcpy(query_factor + i * chunk, from + (2 * i + 1) * stride, rows * sizeof(Real));
    }
    scale_grads(rows);
    move_grads<false>(grad_state, rows);
    return true;
  }
  // grad_out times w.
  void scale_grads(int rows) {
    for (int i = 0; i < group; i++)
      for (int t = 0; t < rows; t++) {
        Real* row = grad_out + (int64_t(i) * chunk + t) * value_stride;
        scale_row(row, factor[i * chunk + t], value_stride, row);
      }
  }

  // The gradient of the state before `rows` tokens; kGrads: the gradients of key, value and decay as well.
  template <bool kGrads>
  void move_grads(Real* grad_state, int rows) {
    for (int t0 = (rows - 1) / kStep * kStep; t0 >= 0; t0 -= kStep) {
      const int count = min_of(kStep, rows - t0);
      for (int panel = first_panel; panel < last_panel; panel++)
        for (int x = 0; x < P; x += kN) move_sums<kGrads>(layout.sum(grad_state) + panel * P + x, t0, count, panel * P + x);
      // So few columns at a time that what is summed over features stays in L1.
      for (int e = 0; e < head_dim_v; e += kN) {
        if (kGrads) memset(partial, 0, kStep * kN * kN * sizeof(Real));
        for (int panel = first_panel; panel < last_panel; panel++)
          for (int x = 0; x < P; x += kN) {
            const int64_t at = panel * layout.panel_stride + int64_t(e) * P + x;
            if (count == kStep && group == 1 && !resets && panel * P + x + kN <= head_dim)
              grad_columns<kGrads, kStep, false>(grad_state + at, at, t0, e, panel * P + x);
            else
              for (int i = count - 1; i >= 0; i--) grad_columns<kGrads, 1, true>(grad_state + at, at, t0 + i, e, panel * P + x);
          }
        for (int i = 0; kGrads && i < count; i++) {
          V lanes[kN];
#pragma GCC unroll 16
          for (int k = 0; k < kN; k++) lanes[k] = V::load(partial + ((t0 + i) % kStep * kN + k) * kN);
          transpose(lanes);
#pragma GCC unroll 4
          for (int width = kN / 2; width; width /= 2)
            for (int k = 0; k < width; k++) lanes[k] = lanes[k] + lanes[k + width];
          lanes[0].store(grad_value + int64_t(t0 + i) * value_stride + e);
        }
      }
    }
    if (!kGrads) return;
    // A decay of 0 has gradient 0, whatever it forgot.
    for (int64_t i = 0; i < int64_t(rows) * key_stride; i += kN) {
      const V g = V::load(gate + i);
      V(g.v == 0 ? V(Real(0)).v : (V::load(grad_gate + i) * g).v).store(grad_gate + i);
    }
  }
  // E of one vector of features over tokens t0 .. t0 + count: what the gradients of key and decay start from.
  template <bool kGrads>
  void move_sums(Real* sum, int t0, int count, int d) const {
    V z = V::load(sum);
    for (int t = t0 + count - 1; t >= t0; t--) {
      const int64_t at = int64_t(t) * key_stride + d;
      for (int h = 0; p.normalize && h < group; h++) z = multiply_add(V::load(query + int64_t(h) * chunk * key_stride + at), V(query_factor[h * chunk + t]), z);
      if (kGrads) {
        z.store(grad_key + at);
        (z * V::load(layout.sum(history + t * layout.size) + d)).store(grad_gate + at);
      }
      z = decayed<true>(z, V::load(gate + at));
    }
    z.store(sum);
  }
  // D of one vector of features and kN value columns from e on, over tokens t .. t + kCount; kAny: any number of query heads, and
  // the rest as above.
  template <bool kGrads, int kCount, bool kAny>
  __attribute__((noinline)) void grad_columns(Real* to, int64_t state_at, int t, int e, int d) const {
    const int columns = min_of(kN, head_dim_v - e), heads = kAny ? group : 1, stride = value_stride;
    const int64_t size = layout.size, head_rows = int64_t(chunk) * value_stride;
    const Real *grads = grad_out + int64_t(t) * value_stride + e, *values = value + int64_t(t) * value_stride + e, *states = history + t * size + state_at;
    Real* sums = partial + t % kStep * kN * kN;
    V a[kCount], b[kCount], g[kCount], key_sum[kCount], gate_sum[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i++) {
      const int64_t at = int64_t(t + i) * key_stride + d;
      a[i] = V::load(query + at);
      b[i] = V::load(key + at);
      g[i] = V::load(gate + at);
      key_sum[i] = V::load(grad_key + at);
      gate_sum[i] = V::load(grad_gate + at);
    }
    for (int k = 0; k < columns; k++, to += P, states += P, sums += kN) {
      V s = V::load(to);
#pragma GCC unroll 4
      for (int i = kCount - 1; i >= 0; i--) {
        s = multiply_add(a[i], V(grads[i * stride + k]), s);
        for (int h = 1; h < heads; h++)
          s = multiply_add(V::load(query + (int64_t(h) * chunk + t + i) * key_stride + d), V(grads[h * head_rows + i * stride + k]), s);
        if (kAny) s = keep_lanes(s, 0, head_dim - d, V(Real(0)));
        if (kGrads) {
          multiply_add(b[i], s, V::load(sums + i * kN * kN)).store(sums + i * kN * kN);
          key_sum[i] = multiply_add(s, V(values[i * stride + k]), key_sum[i]);
          gate_sum[i] = multiply_add(s, V::load(states + i * size), gate_sum[i]);
        }
        s = decayed<kAny>(s, g[i]);
      }
      s.store(to);
    }
    if (!kGrads) return;
#pragma GCC unroll 4
    for (int i = 0; i < kCount; i++) {
      key_sum[i].store(grad_key + int64_t(t + i) * key_stride + d);
      gate_sum[i].store(grad_gate + int64_t(t + i) * key_stride + d);
    }
  }

  void backward(const Real* state, Real* grad_state, bool, int64_t begin, int64_t end) {
    const int rows = int(end - begin);
    pack_keys(begin, rows);
    layout.copy(state, 0, layout.panels, history);
    move_state<true>(history, rows);
    read_states(begin, rows);
    store_query_grads(begin, rows);
    scale_grads(rows);
    move_grads<true>(grad_state, rows);
    if (params.grad_key.data)
      store_feature_grad(p.key_map, grad_key, key_stride, key, key_stride, rows, head_dim, mask, head.template rows<T>(params.grad_key), begin);
    if (params.grad_value.data)
      store_feature_grad(FeatureMap::kIdentity, grad_value, value_stride, value, value_stride, rows, head_dim_v, mask, head.template rows<T>(params.grad_value),
                         begin);
    if (params.grad_log_decay.data) {
      const Matrix<Real> to = head.template rows<Real>(params.grad_log_decay);
      for (int t = 0; t < rows; t++)
        for (int d = 0; d < head_dim; d += kN) store_strided(V::load(grad_gate + t * key_stride + d), to.row(begin + t), to.col_stride, d, head_dim);
    }
  }
  void store_query_grads(int64_t begin, int rows) {
    if (!params.grad_query.data) return;
    for (int index = 0; index < group; index++) {
      Real* r = reads + int64_t(index) * chunk * key_stride;
      for (int t = 0; t < rows; t++) {
        const V w(factor[index * chunk + t]), wt(query_factor[index * chunk + t]);
        const Real* k_sum = layout.sum(history + (t + 1) * layout.size);
        for (int d = 0; d < key_stride; d += kN) {
          const V grad = p.normalize ? multiply_add(V::load(k_sum + d), wt, V::load(r + t * key_stride + d) * w) : V::load(r + t * key_stride + d) * w;
          V(w.v == 0 ? V(Real(0)).v : grad.v).store(r + t * key_stride + d);
        }
      }
      store_feature_grad(p.query_map, r, key_stride, query + int64_t(index) * chunk * key_stride, key_stride, rows, head_dim, nullptr,
                         head.template query_rows<T>(params.grad_query, index), begin);
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
