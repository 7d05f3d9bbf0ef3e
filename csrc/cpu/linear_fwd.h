#pragma once
// Linear attention forward, in chunks of C tokens, with a = query_map(query) and b = key_map(key). Inside a chunk that starts
// from the state S, z (i, j count from its start):
//   W_ij = P_ij a_i . b_j for j <= i            the pairs inside the chunk, P as in linear_decay.h
//   out_i = (in_i a_i S + sum_j W_ij v_j) / (in_i a_i . z + sum_j W_ij)
//   S' = in_last S + sum_j out_j b_j v_j^T      z' = in_last z + sum_j out_j b_j
// The tile is computed as [a^T; W^T] with queries in the lanes, so that it is the left operand of one product with [S; v] and,
// lane by lane, of the sums with [z; 1]: numerator and denominator add the same terms in the same order, and values that are
// all 1 give exactly 1. A chunk with a non-finite key or value is cut into single tokens: then nothing masked is multiplied
// with it.

#include "linear_decay.h"
#include "workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Tokens of a chunk. Measured: 32 is the fastest causal forward everywhere (fewer operations outweigh the state, which is read and
// written once per chunk); the backward, which keeps a state for each, is as fast or faster with 64 but at head_dim 64 on AVX-512.
// Without pairs a longer chunk only means fewer passes over the state.
#ifndef LINEAR_CHUNK
#define LINEAR_CHUNK 32
#define LINEAR_CHUNK_WIDE 64
#define LINEAR_CHUNK_FULL 128
#endif
// Tokens of a segment, when one head is shared among threads: at least this many.
#ifndef LINEAR_SEGMENT
#define LINEAR_SEGMENT 256
#endif

// How few heads are shared among threads: first the states at the starts of segments, each thread with some columns of them,
// then the segments, each as in one sweep over all of them. The same operations in the same order, so the same bits.
inline int linear_segments(const LinearAttentionParams& p, const ThreadPool& pool, int64_t seqlen) {
  const int64_t heads = p.batch * p.num_heads_kv;
  if (heads >= pool.num_workers) return 1;
  return int(max_of(int64_t(1), min_of((4 * pool.num_workers + heads - 1) / heads, seqlen / LINEAR_SEGMENT)));
}
// Waking a thread costs as much as some 10^5 multiply-adds.
inline ThreadPool linear_workers(ThreadPool pool, const LinearAttentionParams& p) {
  const double work = double(p.batch) * p.num_heads * double(p.seqlen_q + p.seqlen_kv) * double(p.head_dim) * double(p.head_dim_v + 32);
  if (work < 1e5) pool.num_workers = 1;
  return pool;
}

template <class T, bool kDecay>
struct LinearForward {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, P = kPanel<Real>;
  // Queries whose keys end together: whole row blocks.
  static constexpr int kStep = kN % kLinearRows == 0 ? kN : P;
  const LinearAttentionParams& p;
  ThreadPool pool;
  int head_dim, head_dim_v, chunk, panels, state_rows, key_stride, out_stride, segments;
  int64_t left_stride, right_stride, segment_size, state_size;

  LinearForward(const LinearAttentionParams& p, const ThreadPool& all)
      : p(p), pool(linear_workers(all, p)), head_dim(int(p.head_dim)), head_dim_v(int(p.head_dim_v)) {
    chunk = p.causal ? LINEAR_CHUNK : LINEAR_CHUNK_FULL;
    panels = (head_dim_v + P - 1) / P;
    state_rows = round_up(head_dim, kRowStep);
    key_stride = round_up(head_dim, kN);
    out_stride = round_up(head_dim_v, P);
    left_stride = int64_t(state_rows + (p.causal ? round_up(chunk, kLinearRows) + kLinearRows : 0)) * P;
    right_stride = int64_t(state_rows + chunk) * P;
    state_size = int64_t(panels) * state_rows * P + key_stride;
    segments = linear_segments(p, pool, p.seqlen_q);
    const int64_t chunks = (p.seqlen_q + chunk - 1) / chunk;
    segment_size = (chunks + segments - 1) / segments * chunk;
    segments = int(max_of(int64_t(1), segment_size ? (p.seqlen_q + segment_size - 1) / segment_size : 1));
  }

  struct Buffers {
    Real *key, *query;  // rows of b and of a
    Real* left;         // panels of queries: state_rows rows of in_i a_i^T, then W^T
    Real* right;        // panels of value columns: state_rows rows of S, then the values of the chunk
    Real *k_sum, *sums, *out;
    T *key_temp, *value_temp, *query_temp;
    uint8_t* mask;
    ChunkDecay<Real> decay;
    Buffers(const LinearForward& f, Scratch& s) : decay(f.chunk, kDecay, s) {
      const int rows = round_up(f.chunk, kLinearRows) + kLinearRows;
      const auto strided = [](const TensorView& view) { return view.col_stride != 1; };
      key = s.take<Real>(int64_t(rows) * f.key_stride);
      query = s.take<Real>(int64_t(rows) * f.key_stride);
      left = s.take<Real>((f.chunk + P - 1) / P * f.left_stride);
      right = s.take<Real>(f.panels * f.right_stride);
      k_sum = s.take<Real>(f.key_stride);
      sums = s.take<Real>(round_up(f.chunk, P));
      out = s.take<Real>(kLinearRows * f.out_stride);
      key_temp = s.take<T>(strided(f.p.key) ? int64_t(f.chunk) * f.head_dim : 0);
      value_temp = s.take<T>(strided(f.p.value) ? int64_t(f.chunk) * f.head_dim_v : 0);
      query_temp = s.take<T>(strided(f.p.query) ? int64_t(f.chunk) * f.head_dim : 0);
      mask = s.take<uint8_t>(f.chunk);
    }
  };
  size_t worker_bytes() const {
    Scratch s(nullptr);
    Buffers(*this, s);
    return s.used;
  }
  bool shares_heads() const { return segments > 1 || (!p.causal && p.batch * p.num_heads_kv < pool.num_workers); }
  int64_t kept_states() const { return shares_heads() ? p.batch * p.num_heads_kv * (p.causal ? segments : 1) : 0; }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes() + kept_states() * state_size * sizeof(Real) + 64; }

  // One sweep over the tokens of a head, or over a part of them.
  struct Sweep {
    const LinearForward& f;
    LinearHead<T> head;
    Buffers buf;
    int first_panel, last_panel;  // of the columns of the state that it keeps
    bool empty = true;            // S is zero and is not read
    bool poisoned = false;        // S may hold what is not finite: token by token, until a decay of exactly 0 forgets it

    Sweep(const LinearForward& f, int64_t item, Scratch scratch, int first_panel, int last_panel)
        : f(f), head(f.p, item), buf(f, scratch), first_panel(first_panel), last_panel(last_panel) {}
    Real* state(int panel) const { return buf.right + panel * f.right_stride; }
    int64_t state_elements() const { return int64_t(f.state_rows) * P; }

    // Returns whether it is finite.
    bool load_initial() {
      const int64_t size = f.p.head_dim * f.p.head_dim_v;
      memset(buf.k_sum, 0, f.key_stride * sizeof(Real));
      for (int panel = first_panel; panel < last_panel; panel++) memset(state(panel), 0, state_elements() * sizeof(Real));
      empty = !f.p.initial_k_sum;
      if (empty) return true;
      const Real* kv = head.state_at(f.p.initial_kv, size);
      const Real* k_sum = head.state_at(f.p.initial_k_sum, f.p.head_dim);
      memcpy(buf.k_sum, k_sum, f.head_dim * sizeof(Real));
      V check(Real(0));
      for (int d = 0; d < f.key_stride; d += kN) check = check + (V::load(buf.k_sum + d) - V::load(buf.k_sum + d));
      bool finite = is_zero(check);
      for (int panel = first_panel; panel < last_panel; panel++) {
        const int cols = min_of(P, f.head_dim_v - panel * P);
        finite &= pack_panels<Real>(kv + panel * P, f.head_dim_v, f.head_dim, cols, state(panel), 0);
      }
      poisoned = !finite && kDecay;
      return finite;
    }
    void load_kept(const Real* kept) {
      for (int panel = 0; panel < f.panels; panel++) memcpy(state(panel), kept + panel * state_elements(), state_elements() * sizeof(Real));
      memcpy(buf.k_sum, kept + f.panels * state_elements(), f.key_stride * sizeof(Real));
      empty = false;
    }
    void keep(Real* kept) const {
      for (int panel = first_panel; panel < last_panel; panel++) memcpy(kept + panel * state_elements(), state(panel), state_elements() * sizeof(Real));
      if (first_panel == 0) memcpy(kept + f.panels * state_elements(), buf.k_sum, f.key_stride * sizeof(Real));
    }
    void store_final() const {
      Real* kv = head.state_at(f.p.final_kv, f.p.head_dim * f.p.head_dim_v);
      Real* k_sum = head.state_at(f.p.final_k_sum, f.p.head_dim);
      if (k_sum && first_panel == 0) memcpy(k_sum, buf.k_sum, f.head_dim * sizeof(Real));
      for (int panel = first_panel; kv && panel < last_panel; panel++)
        for (int row = 0; row < f.head_dim; row++)
          for (int d = panel * P; d < min_of((panel + 1) * P, f.head_dim_v); d += kN)
            store_converted(V::load(state(panel) + row * P + d % P), kv + int64_t(row) * f.head_dim_v + d, f.head_dim_v - d);
    }

    // Keys and values of tokens [begin, begin + rows); zeros where they are masked. Returns whether the others are finite.
    bool pack_keys(int64_t begin, int rows) {
      const uint8_t* mask = head.mask_rows(begin, rows, buf.mask);
      // With causality queries() asks for the rows of the next chunk.
      const Ahead next_key = f.p.causal ? Ahead() : head.ahead(head.key, begin + rows, rows, f.p.seqlen_kv, f.head_dim);
      const Ahead next_value = f.p.causal ? Ahead() : head.ahead(head.value, begin + rows, rows, f.p.seqlen_kv, f.head_dim_v);
      const Matrix<const T> key = adjacent_columns(head.key, begin, rows, f.head_dim, buf.key_temp);
      bool finite = feature_rows(f.p.key_map, key, rows, f.head_dim, mask, buf.key, f.key_stride, next_key);
      const Matrix<const T> value = adjacent_columns(head.value, begin, rows, f.head_dim_v, buf.value_temp);
      for (int panel = first_panel; panel < last_panel; panel++) {
        Real* to = state(panel) + state_elements();
        const int cols = min_of(P, f.head_dim_v - panel * P);
        finite &= pack_panels<Real>(value.data + panel * P, value.row_stride, rows, cols, to, 0, panel == first_panel ? next_value : Ahead()) || mask;
        for (int i = 0; mask && i < rows; i++)
          for (int d = 0; d < P; d += kN) {
            if (!mask[i]) V(Real(0)).store(to + i * P + d);
            else if (d < cols) finite &= is_zero(V::load(to + i * P + d) - V::load(to + i * P + d));
          }
      }
      return finite;
    }
    // Queries of one head, transposed into the panels of `left`.
    void pack_queries(const Matrix<const T>& query, int64_t begin, int rows) {
      feature_rows(f.p.query_map, adjacent_columns(query, begin, rows, f.head_dim, buf.query_temp), rows, f.head_dim, (const uint8_t*)nullptr, buf.query,
                   f.key_stride);
      pack_transposed(buf.query, f.key_stride, rows, f.head_dim, buf.left, f.left_stride);
      for (int panel = 0; panel * P < rows; panel++)
        memset(buf.left + panel * f.left_stride + f.head_dim * P, 0, (f.state_rows - f.head_dim) * P * sizeof(Real));
    }

    // Tokens [begin, end), in chunks that start at multiples of the chunk. Returns false, with_queries being false, at the first
    // thing that is not finite.
    bool run(int64_t begin, int64_t end, bool with_queries) {
      for (int64_t at = begin; at < end; at += f.chunk) {
        const int rows = int(min_of(int64_t(f.chunk), end - at));
        const bool finite = pack_keys(at, rows);
        if ((finite && !poisoned) || !f.p.causal || rows == 1) run_chunk(at, rows, finite, with_queries);
        else if (!with_queries) return false;
        else
          for (int i = 0; i < rows; i++) {
            const bool token_finite = pack_keys(at + i, 1);
            run_chunk(at + i, 1, token_finite, true);
          }
      }
      return true;
    }
    void run_chunk(int64_t begin, int rows, bool finite, bool with_queries) {
      if (kDecay) {
        buf.decay.build_ends(head, begin, rows);
        if (poisoned && buf.decay.through == 0) {
          empty = true;
          poisoned = false;
        }
        poisoned |= !finite;
        if (with_queries) buf.decay.build_pairs_transposed(rows);
      }
      for (int64_t i = 0; with_queries && i < head.group(); i++) queries(i, begin, rows, true);
      update_state(rows);
    }
    // Queries of a whole head, after the last key.
    void run_queries(int64_t begin, int64_t end) {
      for (int64_t i = 0; i < head.group(); i++)
        for (int64_t at = begin; at < end; at += f.chunk) queries(i, at, int(min_of(int64_t(f.chunk), end - at)), false);
    }

    // Output rows [begin, begin + rows) of query head `index`; with_chunk: they also see the keys of their own chunk.
    void queries(int64_t index, int64_t begin, int rows, bool with_chunk) {
      const Matrix<const T> query = head.template query_rows<const T>(f.p.query, index);
      const Matrix<T> out = head.template query_rows<T>(f.p.out, index);
      pack_queries(query, begin, rows);
      for (int i0 = 0; i0 < rows; i0 += P) {
        Real* left = buf.left + i0 / P * f.left_stride;
        const int count = min_of(P, rows - i0);
        if (with_chunk) pairs(left, i0, count, rows);
        if (f.p.normalize) sum_weights(left, i0, count, with_chunk ? min_of(rows, i0 + P) : 0);
        for (int i = 0; i < count; i += kLinearRows) {
          const int64_t next = begin + rows + i0 + i;
          const int block = min_of(kLinearRows, count - i), ahead = int(max_of(int64_t(0), min_of(int64_t(block), f.p.seqlen_q - next)));
          const int cols = with_chunk ? min_of(rows, i0 + i + block) : 0, skip = empty ? f.state_rows : 0;
          prefetch_rows<Access::Read>(query, next, ahead, f.head_dim);
          prefetch_rows<Access::Write>(out, begin + i0 + i, block, f.head_dim_v);
          if (with_chunk) {
            prefetch_rows<Access::Read>(head.key, next, ahead, f.head_dim);
            prefetch_rows<Access::Read>(head.value, next, ahead, f.head_dim_v);
          }
          gemm<Left::Transposed, Store::Overwrite, kLinearRows>(block, f.head_dim_v, f.state_rows + cols - skip, left + skip * P + i, P, buf.right + skip * P,
                                                                f.right_stride, buf.out, f.out_stride);
          store_rows(out, begin + i0 + i, block, buf.sums + i0 + i);
        }
      }
    }
    // W^T below `left`: keys [0, min(rows, i0 + count)) against the queries [i0, i0 + count) of one panel, zero where j > i.
    void pairs(Real* left, int i0, int count, int rows) {
      Real* weights = left + f.state_rows * P;
      for (int i = 0; i < count; i += kStep) {
        // Keys that the queries before i do not see: one vector narrower.
        const int j0 = i ? i0 + i : 0, keys = min_of(rows, i0 + i + kStep) - j0;
        gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(keys, count - i, f.head_dim, buf.key + j0 * f.key_stride, f.key_stride, left + i, 0,
                                                            weights + j0 * P + i, P);
      }
      for (int j = kDecay ? 0 : i0; j < min_of(rows, i0 + P); j++)
        for (int i = 0; i < count; i += kN) {
          Real* at = weights + j * P + i;
          if (i0 + i + kN <= j) {
            V(Real(0)).store(at);
            continue;
          }
          V w = V::load(at);
          if (kDecay) w = w * V::load(buf.decay.pairs + j * buf.decay.stride + i0 + i);
          if (j > i0 + i) w = keep_lanes(w, j - i0 - i, kN, V(Real(0)));
          w.store(at);
        }
      if (kDecay)
        for (int d = 0; d < f.head_dim; d++)
          for (int i = 0; i < count; i += kN) {
            const V in = V::load(buf.decay.in + i0 + i);
            V(in.v == 0 ? V(Real(0)).v : (V::load(left + d * P + i) * in).v).store(left + d * P + i);
          }
    }
    // sums[i] = in_i a_i . z + sum_j W_ij, in the order of the product with S and the values.
    void sum_weights(const Real* left, int i0, int count, int keys) {
      V sum[2] = {V(Real(0)), V(Real(0))};
      for (int d = 0; !empty && d < f.head_dim; d++)
        for (int x = 0; x < 2; x++) sum[x] = multiply_add(V::load(left + d * P + x * kN), V(buf.k_sum[d]), sum[x]);
      const Real* weights = left + f.state_rows * P;
      const int narrow = min_of(keys, i0 + kN);
      int j = 0;
      for (; j < narrow; j++)
        for (int x = 0; x < 2; x++) sum[x] = sum[x] + V::load(weights + j * P + x * kN);
      for (; count > kN && j < keys; j++) sum[1] = sum[1] + V::load(weights + j * P + kN);
      for (int x = 0; x < 2; x++) sum[x].store(buf.sums + i0 + x * kN);
    }
    void store_rows(const Matrix<T>& out, int64_t begin, int rows, const Real* sums) {
      for (int i = 0; i < rows; i++) {
        const Quotient<Real> quotient(f.p.normalize, sums[i], Real(f.p.scale));
        const Real* row = buf.out + i * f.out_stride;
        T* to = out.row(begin + i);
        for (int d = 0; d < f.head_dim_v; d += kN) store_strided(quotient.of(V::load(row + d)), to, out.col_stride, d, f.head_dim_v);
      }
    }

    void update_state(int rows) {
      const Real through = buf.decay.through;
      if (kDecay) {
        for (int j = 0; j < rows; j++) scale_row(buf.key + j * f.key_stride, buf.decay.out[j], f.key_stride, buf.key + j * f.key_stride);
        scale_row(buf.k_sum, through, f.key_stride, buf.k_sum);
      }
      add_rows<Real>(buf.key, f.key_stride, nullptr, rows, f.key_stride, buf.k_sum);
      for (int panel = first_panel; panel < last_panel; panel++) {
        const int cols = min_of(P, f.head_dim_v - panel * P);
        Real *to = state(panel), *values = to + state_elements();
        if (empty || (kDecay && through == 0)) {
          gemm<Left::Transposed, Store::Overwrite, kLinearRows>(f.head_dim, cols, rows, buf.key, f.key_stride, values, 0, to, P);
        } else {
          if (kDecay) scale_row(to, through, state_elements(), to);
          gemm<Left::Transposed, Store::Accumulate, kLinearRows>(f.head_dim, cols, rows, buf.key, f.key_stride, values, 0, to, P);
        }
      }
      empty = false;
    }
  };

  void run(void* memory) const {
    const int64_t heads = p.batch * p.num_heads_kv;
    const size_t bytes = worker_bytes();
    Real* kept = (Real*)((char*)memory + pool.num_workers * bytes);
    const auto scratch = [&](int worker) { return Scratch((char*)memory + worker * bytes); };
    const auto sweep_head = [&](int worker, int64_t head) {
      Sweep sweep(*this, head, scratch(worker), 0, panels);
      sweep.load_initial();
      sweep.run(0, p.seqlen_kv, p.causal);
      if (!p.causal) sweep.run_queries(0, p.seqlen_q);
      sweep.store_final();
    };
    if (!shares_heads()) return for_each_item(pool, heads, sweep_head);
    int not_finite = 0;
    for_each_item(pool, heads * max_of(panels, 1), [&](int worker, int64_t item) {
      const int64_t head = item / max_of(panels, 1);
      const int panel = int(item % max_of(panels, 1));
      Sweep sweep(*this, head, scratch(worker), panel, min_of(panel + 1, panels));
      bool finite = sweep.load_initial();
      if (p.causal) {
        for (int segment = 0; finite && segment < segments; segment++) {
          sweep.keep(kept + (head * segments + segment) * state_size);
          finite = sweep.run(segment * segment_size, min_of((segment + 1) * segment_size, p.seqlen_kv), false);
        }
      } else {
        sweep.run(0, p.seqlen_kv, false);
        sweep.keep(kept + head * state_size);
        finite = true;
      }
      if (!finite) __atomic_store_n(&not_finite, 1, __ATOMIC_RELAXED);
      else sweep.store_final();
    });
    // What is not finite decides which tokens stand alone, and each thread saw some columns only.
    if (not_finite) return for_each_item(pool, heads, sweep_head);
    for_each_item(pool, heads * segments, [&](int worker, int64_t item) {
      const int64_t head = item / segments, begin = item % segments * segment_size, end = min_of(begin + segment_size, p.seqlen_q);
      Sweep sweep(*this, head, scratch(worker), 0, panels);
      if (!p.causal) {
        sweep.load_kept(kept + head * state_size);
        sweep.run_queries(begin, end);
        return;
      }
      if (begin == 0) sweep.load_initial();
      else sweep.load_kept(kept + item * state_size);
      sweep.run(begin, end, true);
    });
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
