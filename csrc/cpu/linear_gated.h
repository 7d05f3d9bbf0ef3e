#pragma once
// Linear attention forward with a decay per feature (gated linear attention, Yang et al., 2024, section 4): token by token,
//   S_t = diag(exp(g_t)) S_(t-1) + b_t v_t^T, out_t = a_t S_t / (a_t . z_t)
// a few tokens at a time for each row of S, so that it is read and written once for all of them. That is three operations for
// each element of S and token, where a chunk with one decay per token needs some 2.7: no chunk form is worth its exponentials.

#include "linear_fwd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// exp of the decays of tokens [begin, begin + rows), ones behind head_dim. Returns whether one of them is 0.
template <class Real>
inline bool gate_rows(const Matrix<const Real>& log_decay, int64_t begin, int rows, int head_dim, Real* gate, int stride) {
  using V = NativeVec<Real>;
  bool resets = false;
  for (int i = 0; i < rows; i++)
    for (int d = 0; d < head_dim; d += V::kLanes) {
      const V x = keep_lanes(exp(load_strided(log_decay.row(begin + i), log_decay.col_stride, d, head_dim)), 0, head_dim - d, V(Real(1)));
      x.store(gate + i * stride + d);
      for (int k = 0; k < V::kLanes; k++) resets |= x.v[k] == 0;
    }
  return resets;
}

template <int kValue> struct IntConstant {
  static constexpr int value = kValue;
};
// Calls f with the number of vectors, 1 to 4.
template <class F>
ALWAYS_INLINE void with_vectors(int vectors, const F& f) {
  if (vectors == 1) f(IntConstant<1>());
  else if (vectors == 2) f(IntConstant<2>());
  else if (vectors == 3) f(IntConstant<3>());
  else f(IntConstant<4>());
}

template <class T>
struct LinearGatedForward {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, P = kPanel<Real>;
  static constexpr int kWide = 4, kTokens = kVectorBytes == 64 ? 4 : 2;  // most vectors of value columns, and tokens, in registers
  static constexpr int kChunk = P;                                       // tokens whose features are made at a time
  const LinearAttentionParams& p;
  ThreadPool pool;
  int head_dim, head_dim_v, group, key_stride, wide, blocks, shares;  // vectors in a block of value columns; blocks; shares of a head

  LinearGatedForward(const LinearAttentionParams& p, const ThreadPool& all)
      : p(p), pool(linear_workers(all, p)), head_dim(int(p.head_dim)), head_dim_v(int(p.head_dim_v)), group(int(p.num_heads / p.num_heads_kv)) {
    key_stride = round_up(head_dim, kN);
    const int64_t heads = p.batch * p.num_heads_kv;
    // Value columns do not depend on each other: few heads are shared among threads by narrower blocks of them.
    for (wide = kWide; wide > 1 && heads * ((head_dim_v + wide * kN - 1) / (wide * kN)) < pool.num_workers;) wide /= 2;
    blocks = max_of(1, (head_dim_v + wide * kN - 1) / (wide * kN));
    shares = heads < pool.num_workers ? blocks : 1;
  }

  struct Buffers {
    Real *key, *query, *gate;               // rows of b, a and exp(g)
    Real* value;                            // [chunk][blocks * wide * kN]
    Real* state;                            // [block][head_dim][wide * kN]
    Real *k_sum, *k_sums, *transposed, *transposed_sums;  // z, z after each token, panels of a and of those
    Real* sums;
    T *key_temp, *value_temp, *query_temp;
    uint8_t* mask;
    Buffers(const LinearGatedForward& f, Scratch& s) {
      const int64_t rows = int64_t(kChunk) * f.key_stride, width = int64_t(f.blocks) * f.wide * kN;
      const auto strided = [](const TensorView& view) { return view.col_stride != 1; };
      key = s.take<Real>(rows);
      query = s.take<Real>(f.group * rows);
      gate = s.take<Real>(rows);
      value = s.take<Real>(kChunk * width);
      state = s.take<Real>(f.head_dim * width);
      k_sum = s.take<Real>(f.key_stride);
      k_sums = s.take<Real>(rows);
      transposed = s.take<Real>(int64_t(f.head_dim) * P);
      transposed_sums = s.take<Real>(int64_t(f.head_dim) * P);
      sums = s.take<Real>(f.group * kChunk);
      key_temp = s.take<T>(strided(f.p.key) ? int64_t(kChunk) * f.head_dim : 0);
      value_temp = s.take<T>(strided(f.p.value) ? int64_t(kChunk) * f.head_dim_v : 0);
      query_temp = s.take<T>(strided(f.p.query) ? int64_t(kChunk) * f.head_dim : 0);
      mask = s.take<uint8_t>(kChunk);
    }
  };
  size_t worker_bytes() const {
    Scratch s(nullptr);
    Buffers(*this, s);
    return s.used;
  }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes(); }

  void run(void* memory) const {
    for_each_item(pool, p.batch * p.num_heads_kv * shares, [&](int worker, int64_t item) {
      Scratch scratch((char*)memory + worker * worker_bytes());
      Buffers buf(*this, scratch);
      const int share = int(item % shares), first = share * blocks / shares, last = (share + 1) * blocks / shares;
      sweep(LinearHead<T>(p, item / shares), buf, first, last);
    });
  }

  // All tokens, for the blocks [first, last) of value columns.
  void sweep(const LinearHead<T>& head, Buffers& buf, int first, int last) const {
    const int64_t size = p.head_dim * p.head_dim_v, width = int64_t(blocks) * wide * kN;
    const Real *kv = head.state_at(p.initial_kv, size), *k_sum = head.state_at(p.initial_k_sum, p.head_dim);
    memset(buf.state, 0, head_dim * width * sizeof(Real));
    memset(buf.k_sum, 0, key_stride * sizeof(Real));
    if (k_sum) memcpy(buf.k_sum, k_sum, head_dim * sizeof(Real));
    const auto column = [&](int d, int e) { return buf.state + (e / (wide * kN) * int64_t(head_dim) + d) * wide * kN + e % (wide * kN); };
    const int begin_e = first * wide * kN, end_e = min_of(last * wide * kN, head_dim_v);
    for (int d = 0; kv && d < head_dim; d++)
      for (int e = begin_e; e < end_e; e++) *column(d, e) = kv[int64_t(d) * head_dim_v + e];
    for (int64_t begin = 0; begin < p.seqlen_kv; begin += kChunk) chunk(head, buf, begin, int(min_of(int64_t(kChunk), p.seqlen_kv - begin)), first, last);
    Real *final_kv = head.state_at(p.final_kv, size), *final_k_sum = head.state_at(p.final_k_sum, p.head_dim);
    if (first == 0) memcpy(final_k_sum, buf.k_sum, head_dim * sizeof(Real));
    for (int d = 0; d < head_dim; d++)
      for (int e = begin_e; e < end_e; e++) final_kv[int64_t(d) * head_dim_v + e] = *column(d, e);
  }

  void chunk(const LinearHead<T>& head, Buffers& buf, int64_t begin, int rows, int first, int last) const {
    const int width = blocks * wide * kN;
    const uint8_t* mask = head.mask_rows(begin, rows, buf.mask);
    feature_rows(p.key_map, adjacent_columns(head.key, begin, rows, head_dim, buf.key_temp), rows, head_dim, mask, buf.key, key_stride);
    feature_rows(FeatureMap::kIdentity, adjacent_columns(head.value, begin, rows, head_dim_v, buf.value_temp), rows, head_dim_v, mask, buf.value, width);
    const bool resets = gate_rows(head.log_decay, begin, rows, head_dim, buf.gate, key_stride);
    for (int i = 0; i < rows; i++)
      for (int d = 0; d < key_stride; d += kN) {
        const V gate = V::load(buf.gate + i * key_stride + d), old = V::load((i ? buf.k_sums + (i - 1) * key_stride : buf.k_sum) + d);
        const V key = V::load(buf.key + i * key_stride + d);
        V(gate.v == 0 ? key.v : multiply_add(old, gate, key).v).store(buf.k_sums + i * key_stride + d);
      }
    memcpy(buf.k_sum, buf.k_sums + (rows - 1) * key_stride, key_stride * sizeof(Real));
    if (p.normalize) pack_transposed<Real>(buf.k_sums, key_stride, rows, head_dim, buf.transposed_sums, 0);
    for (int i = 0; i < group; i++) {
      const auto query = adjacent_columns(head.template query_rows<const T>(p.query, i), begin, rows, head_dim, buf.query_temp);
      Real* to = buf.query + i * kChunk * key_stride;
      feature_rows(p.query_map, query, rows, head_dim, (const uint8_t*)nullptr, to, key_stride);
      if (p.normalize) sum_weights(buf, to, rows, buf.sums + i * kChunk);
    }
    for (int block = first; block < last; block++) {
      const int vectors = max_of(1, min_of(wide, (head_dim_v + kN - 1) / kN - block * wide));
      for (int t = 0; t < rows;) {
        const int count = t + kTokens <= rows ? kTokens : 1;
        // The last query head of the group moves the state on.
        for (int i = 0; i < group; i++)
          with_vectors(vectors, [&](auto count_of) {
            constexpr int kVectors = decltype(count_of)::value;
            const Matrix<T> out = head.template query_rows<T>(p.out, i);
            if (count == 1) tokens<1, kVectors, true>(buf, i, block, t, out, begin);
            else if (resets) tokens<kTokens, kVectors, true>(buf, i, block, t, out, begin);
            else tokens<kTokens, kVectors, false>(buf, i, block, t, out, begin);
          });
        t += count;
      }
    }
  }

  // sums[i] = a_i . z_i, feature by feature as in the products with S.
  void sum_weights(const Buffers& buf, const Real* query, int rows, Real* sums) const {
    pack_transposed<Real>(query, key_stride, rows, head_dim, buf.transposed, 0);
    for (int x = 0; x < P; x += kN) {
      V sum(Real(0));
      for (int d = 0; d < head_dim; d++) sum = multiply_add(V::load(buf.transposed + d * P + x), V::load(buf.transposed_sums + d * P + x), sum);
      sum.store(sums + x);
    }
  }

  // Output rows t .. t + kCount of one query head, and S behind them. With values of 1 each column of S takes the same steps as z.
  template <int kCount, int kVectors, bool kResets>
  __attribute__((noinline)) void tokens(const Buffers& buf, int index, int block, int t, const Matrix<T>& out, int64_t begin) const {
    const int width = blocks * wide * kN, columns = wide * kN, stride = key_stride, features = head_dim;
    const Real *key = buf.key + t * key_stride, *gate = buf.gate + t * key_stride, *query = buf.query + (index * kChunk + t) * key_stride;
    const Real* value = buf.value + t * width + block * wide * kN;
    Real* state = buf.state + int64_t(block) * head_dim * wide * kN;
    const bool moves = index == group - 1;
    V sum[kCount][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; i++)
#pragma GCC unroll 4
      for (int x = 0; x < kVectors; x++) sum[i][x] = V(Real(0));
    for (int d = 0; d < features; d++, state += columns) {
      V s[kVectors];
#pragma GCC unroll 4
      for (int x = 0; x < kVectors; x++) s[x] = V::load(state + x * kN);
#pragma GCC unroll 16
      for (int i = 0; i < kCount; i++) {
        const V b(key[i * stride + d]), g(gate[i * stride + d]), a(query[i * stride + d]);
        const bool reset = kResets && gate[i * stride + d] == 0;
#pragma GCC unroll 4
        for (int x = 0; x < kVectors; x++) {
          const V product = rounded(b * V::load(value + i * width + x * kN));
          s[x] = reset ? product : multiply_add(s[x], g, product);
          sum[i][x] = multiply_add(a, s[x], sum[i][x]);
        }
      }
      if (moves)
#pragma GCC unroll 4
        for (int x = 0; x < kVectors; x++) s[x].store(state + x * kN);
    }
    for (int i = 0; i < kCount; i++) {
      const Quotient<Real> quotient(p.normalize, buf.sums[index * kChunk + t + i], Real(p.scale));
      T* to = out.row(begin + t + i);
      for (int x = 0; x < kVectors; x++) store_strided(quotient.of(sum[i][x]), to, out.col_stride, (block * wide + x) * kN, head_dim_v);
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
