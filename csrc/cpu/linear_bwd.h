#pragma once
// The backward of linear attention as one sweep from the last token to the first, whatever computes a run of tokens.
//
// A state lies as S^T: panels of kPanel key columns [rows of value columns][kPanel], then z; the gradient of a state likewise.
// The sweep needs the state before each chunk: they are computed forward from the initial one and kept, all at once or in two
// levels: one per group of chunks first, the others of a group when the sweep gets there.
//
// Few heads are shared among threads by segments (linear_fwd.h): 1. the states at their starts, each thread with some key
// columns; 2. in every segment the factors of its queries, for which the state is all they need; 3. with those the gradients of
// the states at their ends, again by key columns; 4. every segment as in the sweep over all of them. The same operations in the
// same order, so the same bits. Without causality there is one state, and the same four steps: the state, the queries, its
// gradient, the keys.

#include "linear_fwd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Above this, for one head, the states are kept in two levels, which computes them once more (6 to 12 points of the peak at n = 16384);
// less where many workers keep theirs at a time.
inline int64_t linear_state_bytes(int workers) { return max_of(int64_t(8) << 20, min_of(int64_t(20) << 20, (int64_t(160) << 20) / workers)); }

template <class Real>
struct StateLayout {
  static constexpr int P = kPanel<Real>;
  int head_dim, head_dim_v, rows, panels;
  int64_t panel_stride, size;
  explicit StateLayout(const LinearAttentionParams& p)
      : head_dim(int(p.head_dim)),
        head_dim_v(int(p.head_dim_v)),
        rows(round_up(head_dim_v, kRowStep)),
        panels((head_dim + P - 1) / P),
        panel_stride(int64_t(rows) * P),
        size(panels * panel_stride + int64_t(panels) * P) {}
  Real* sum(Real* state) const { return state + panels * panel_stride; }
  const Real* sum(const Real* state) const { return state + panels * panel_stride; }
  // From [head_dim][head_dim_v] and [head_dim]; zeros where there is none. Returns whether it is finite.
  bool load(const void* kv, const void* k_sum, Real* state) const {
    memset(state, 0, size * sizeof(Real));
    if (kv) pack_transposed<Real>((const Real*)kv, head_dim_v, head_dim, head_dim_v, state, panel_stride);
    if (k_sum) memcpy(sum(state), k_sum, head_dim * sizeof(Real));
    NativeVec<Real> check(Real(0));
    for (int64_t i = 0; i < size; i += kLanes<Real>) check = check + (NativeVec<Real>::load(state + i) - NativeVec<Real>::load(state + i));
    return is_zero(check);
  }
  void store(const Real* state, int first_panel, int last_panel, void* kv, void* k_sum) const {
    for (int d = first_panel * P; d < min_of(last_panel * P, head_dim); d++) {
      const Real* column = state + d / P * panel_stride + d % P;
      for (int e = 0; kv && e < head_dim_v; e++) ((Real*)kv)[int64_t(d) * head_dim_v + e] = column[int64_t(e) * P];
      if (k_sum) ((Real*)k_sum)[d] = sum(state)[d];
    }
  }
  void copy(const Real* from, int first_panel, int last_panel, Real* to) const {
    memcpy(to + first_panel * panel_stride, from + first_panel * panel_stride, (last_panel - first_panel) * panel_stride * sizeof(Real));
    memcpy(sum(to) + first_panel * P, sum(from) + first_panel * P, (last_panel - first_panel) * P * sizeof(Real));
  }
};

// `Tokens` computes runs of tokens of one head:
//   Tokens(const LinearAttentionBackwardParams&, Scratch&)       buffers; static int chunk_of(params)
//   start(item, first_panel, last_panel)                            which head, and which key columns of the states
//   bool advance(state, begin, end)                                 the state over one chunk
//   bool factors(state, begin, end, to, stride)                     those of the queries of one chunk, and nothing else
//   bool advance_grad(grad_state, empty, begin, end, from, stride)  the gradient of the state over one chunk, backward
//   backward(state, grad_state, empty, begin, end)                  all gradients of one chunk, and the gradient of the state
// and without causality
//   full_queries(state, begin, end, to, stride)                     the gradients of queries, and their factors
//   transpose_grad_state(grad_state), full_keys(grad_state, empty, begin, end)   the gradients of keys and values
// The first three return whether all they met was finite; empty says that grad_state is zero.
template <class T, class Tokens>
struct LinearBackward {
  using Real = ComputeType<T>;
  const LinearAttentionBackwardParams& params;
  const LinearAttentionParams& p;
  ThreadPool pool;
  StateLayout<Real> layout;
  int chunk, segments;
  int64_t segment_size, group;  // tokens of a segment, chunks of a group

  LinearBackward(const LinearAttentionBackwardParams& params, const ThreadPool& all)
      : params(params), p(params.forward), pool(linear_workers(all, p)), layout(p), chunk(Tokens::chunk_of(p)) {
    const int64_t tokens = max_of(p.seqlen_q, p.seqlen_kv), chunks = (tokens + chunk - 1) / chunk;
    segments = linear_segments(p, pool, tokens);
    const int64_t segment_chunks = max_of(int64_t(1), (chunks + segments - 1) / segments);
    segment_size = segment_chunks * chunk;
    segments = int(max_of(int64_t(1), (chunks + segment_chunks - 1) / segment_chunks));
    group = segment_chunks;
    if (group * layout.size * int64_t(sizeof(Real)) > linear_state_bytes(max_of(pool.num_workers, params.calls)))
      for (group = 1; group * group < segment_chunks;) group++;
    if (!p.causal) group = 1;
  }

  struct Buffers {
    Real *checkpoints, *states, *grad_state;  // one per group of the whole head, one per chunk of a group
    Buffers(const LinearBackward& b, Scratch& s) {
      const int64_t chunks = (b.p.seqlen_kv + b.chunk - 1) / b.chunk;
      checkpoints = s.take<Real>(max_of(int64_t(1), (chunks + b.group - 1) / b.group) * b.layout.size);
      states = s.take<Real>(b.group * b.layout.size);
      grad_state = s.take<Real>(b.layout.size);
    }
  };
  size_t worker_bytes() const {
    Scratch s(nullptr);
    Buffers(*this, s);
    Tokens(params, s);
    return s.used;
  }
  bool keeps_segments() const { return segments > 1 || !p.causal; }
  int64_t num_segments() const { return keeps_segments() ? p.batch * p.num_heads_kv * segments : 0; }
  int64_t factors_size() const { return keeps_segments() ? 2 * p.num_heads / p.num_heads_kv * segment_size : 0; }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes() + num_segments() * (2 * layout.size + factors_size()) * sizeof(Real) + 64; }

  void run(void* memory) const {
    Call call(*this, memory);
    if (!p.causal) return call.run_full();
    // What is not finite decides which tokens stand alone, and threads that share a head see some columns only.
    if (segments > 1 && call.run_segments()) return;
    for_each_item(pool, p.batch * p.num_heads_kv, [&](int worker, int64_t head) { call.run_head(worker, head); });
  }

 private:
  // A call with its memory: `kept` is one state and one gradient of a state per segment, then the factors of its queries.
  struct Call {
    const LinearBackward& b;
    const LinearAttentionParams& p;
    const StateLayout<Real>& layout;
    char* memory;
    size_t bytes;
    Real *kept_states, *kept_grads, *kept_factors;
    const int segments, chunk;
    const bool grad_empty;

    Call(const LinearBackward& b, void* memory)
        : b(b),
          p(b.p),
          layout(b.layout),
          memory((char*)memory),
          bytes(b.worker_bytes()),
          kept_states((Real*)((char*)memory + b.pool.num_workers * bytes)),
          kept_grads(kept_states + b.num_segments() * layout.size),
          kept_factors(kept_grads + b.num_segments() * layout.size),
          segments(b.segments),
          chunk(b.chunk),
          grad_empty(!b.params.grad_final_kv && !b.params.grad_final_k_sum) {}

    int64_t begin_of(int64_t segment) const { return min_of(segment * b.segment_size, max_of(p.seqlen_q, p.seqlen_kv)); }
    Real* factors(int64_t item, int64_t token) const { return kept_factors + item * b.factors_size() + token; }
    const Real* of_head(const void* states, int64_t head, int64_t size) const { return states ? (const Real*)states + head * size : nullptr; }
    bool load_initial(int64_t head, Real* state) const {
      return layout.load(of_head(p.initial_kv, head, p.head_dim * p.head_dim_v), of_head(p.initial_k_sum, head, p.head_dim), state);
    }
    bool load_final_grad(int64_t head, Real* state) const {
      return layout.load(of_head(b.params.grad_final_kv, head, p.head_dim * p.head_dim_v), of_head(b.params.grad_final_k_sum, head, p.head_dim), state);
    }
    void store_initial_grad(int64_t head, const Real* state, int first_panel, int last_panel) const {
      layout.store(state, first_panel, last_panel, (void*)of_head(b.params.grad_initial_kv, head, p.head_dim * p.head_dim_v),
                   (void*)of_head(b.params.grad_initial_k_sum, head, p.head_dim));
    }

    // Calls f(tokens, buf, head, first, last) for every head and, where heads are shared, share of its key columns.
    template <class F>
    void for_each_part(const F& f) const {
      const int parts = segments > 1 ? max_of(layout.panels, 1) : 1;
      for_each_item(b.pool, p.batch * p.num_heads_kv * parts, [&](int worker, int64_t item) {
        Scratch scratch(memory + worker * bytes);
        Buffers buf(b, scratch);
        Tokens tokens(b.params, scratch);
        const int part = int(item % parts), first = part * layout.panels / parts, last = (part + 1) * layout.panels / parts;
        tokens.start(item / parts, first, last);
        f(tokens, buf, item / parts, first, last);
      });
    }
    // Calls f(tokens, buf, item, begin, end) for every segment of every head.
    template <class F>
    void for_each_segment(const F& f) const {
      for_each_item(b.pool, p.batch * p.num_heads_kv * segments, [&](int worker, int64_t item) {
        Scratch scratch(memory + worker * bytes);
        Buffers buf(b, scratch);
        Tokens tokens(b.params, scratch);
        tokens.start(item / segments, 0, layout.panels);
        f(tokens, buf, item, begin_of(item % segments), begin_of(item % segments + 1));
      });
    }

    // Chunks of [begin, end) from the last to the first. The state before the first lies in checkpoints[0].
    void sweep(Tokens& tokens, Buffers& buf, int64_t begin, int64_t end, bool empty) const {
      const int64_t group = b.group, size = layout.size, chunks = (end - begin + chunk - 1) / chunk, groups = (chunks + group - 1) / group;
      const auto token = [&](int64_t c) { return min_of(begin + c * chunk, end); };
      const auto advanced = [&](Real* to, const Real* from, int64_t first, int64_t last) {
        memcpy(to, from, size * sizeof(Real));
        for (int64_t c = first; c < last; c++) tokens.advance(to, token(c), token(c + 1));
      };
      for (int64_t g = 1; g < groups; g++) advanced(buf.checkpoints + g * size, buf.checkpoints + (g - 1) * size, (g - 1) * group, g * group);
      for (int64_t g = groups - 1; g >= 0; g--) {
        const int64_t first = g * group, last = min_of(first + group, chunks);
        memcpy(buf.states, buf.checkpoints + g * size, size * sizeof(Real));
        for (int64_t c = first + 1; c < last; c++) advanced(buf.states + (c - first) * size, buf.states + (c - first - 1) * size, c - 1, c);
        for (int64_t c = last - 1; c >= first; c--) {
          tokens.backward(buf.states + (c - first) * size, buf.grad_state, empty, token(c), token(c + 1));
          empty = false;
        }
      }
    }

    void run_head(int worker, int64_t head) const {
      Scratch scratch(memory + worker * bytes);
      Buffers buf(b, scratch);
      Tokens tokens(b.params, scratch);
      tokens.start(head, 0, layout.panels);
      load_initial(head, buf.checkpoints);
      load_final_grad(head, buf.grad_state);
      sweep(tokens, buf, 0, p.seqlen_kv, grad_empty);
      store_initial_grad(head, buf.grad_state, 0, layout.panels);
    }

    // Returns false, with nothing of use done, where something is not finite.
    bool run_segments() const {
      int not_finite = 0;
      const auto note = [&](bool finite) {
        if (!finite) __atomic_store_n(&not_finite, 1, __ATOMIC_RELAXED);
      };
      for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int first, int last) {
        bool finite = load_initial(head, buf.states);
        for (int segment = 0; segment < segments; segment++) {
          layout.copy(buf.states, first, last, kept_states + (head * segments + segment) * layout.size);
          for (int64_t at = begin_of(segment); segment + 1 < segments && at < begin_of(segment + 1); at += chunk)
            finite &= tokens.advance(buf.states, at, at + chunk);
        }
        note(finite);
      });
      for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
        memcpy(buf.states, kept_states + item * layout.size, layout.size * sizeof(Real));
        bool finite = true;
        for (int64_t at = begin; at < end; at += chunk) {
          const int64_t next = min_of(at + chunk, end);
          finite &= tokens.factors(buf.states, at, next, factors(item, at - begin), b.segment_size);
          if (next < end) finite &= tokens.advance(buf.states, at, next);
        }
        note(finite);
      });
      if (not_finite) return false;
      for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int first, int last) {
        bool finite = load_final_grad(head, buf.grad_state), empty = grad_empty;
        for (int segment = segments - 1; segment >= 0; segment--) {
          const int64_t item = head * segments + segment, begin = begin_of(segment), chunks = (begin_of(segment + 1) - begin + chunk - 1) / chunk;
          layout.copy(buf.grad_state, first, last, kept_grads + item * layout.size);
          for (int64_t c = chunks - 1; c >= 0; c--) {
            const int64_t at = begin + c * chunk, next = min_of(at + chunk, p.seqlen_kv);
            finite &= tokens.advance_grad(buf.grad_state, empty, at, next, factors(item, at - begin), b.segment_size);
            empty = false;
          }
        }
        store_initial_grad(head, buf.grad_state, first, last);
        note(finite);
      });
      if (not_finite) return false;
      for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
        memcpy(buf.checkpoints, kept_states + item * layout.size, layout.size * sizeof(Real));
        memcpy(buf.grad_state, kept_grads + item * layout.size, layout.size * sizeof(Real));
        sweep(tokens, buf, begin, end, grad_empty && end == p.seqlen_kv);
      });
      return true;
    }

    // Not causal: the state and its gradient lie in the first segment of their head.
    void run_full() const {
      const auto first_of = [&](int64_t item) { return item / segments * segments * layout.size; };
      for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int first, int last) {
        load_initial(head, buf.states);
        for (int64_t at = 0; at < p.seqlen_kv; at += chunk) tokens.advance(buf.states, at, min_of(at + chunk, p.seqlen_kv));
        layout.copy(buf.states, first, last, kept_states + first_of(head * segments));
      });
      for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
        memcpy(buf.states, kept_states + first_of(item), layout.size * sizeof(Real));
        for (int64_t at = begin; at < min_of(end, p.seqlen_q); at += chunk)
          tokens.full_queries(buf.states, at, min_of(at + chunk, p.seqlen_q), factors(item, at - begin), b.segment_size);
      });
      for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int first, int last) {
        load_final_grad(head, buf.grad_state);
        for (int64_t at = 0; at < p.seqlen_q; at += chunk) {
          const Real* from = factors(head * segments + at / b.segment_size, at % b.segment_size);
          tokens.advance_grad(buf.grad_state, grad_empty && at == 0, at, min_of(at + chunk, p.seqlen_q), from, b.segment_size);
        }
        layout.copy(buf.grad_state, first, last, kept_grads + first_of(head * segments));
      });
      for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
        memcpy(buf.grad_state, kept_grads + first_of(item), layout.size * sizeof(Real));
        tokens.transpose_grad_state(buf.grad_state);
        for (int64_t at = begin; at < min_of(end, p.seqlen_kv); at += chunk)
          tokens.full_keys(buf.grad_state, grad_empty && p.seqlen_q == 0, at, min_of(at + chunk, p.seqlen_kv));
      });
    }
  };
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
