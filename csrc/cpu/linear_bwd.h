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
// same order, so the same bits.

#include "linear_fwd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Above this the states are kept in two levels.
constexpr int64_t kLinearStateBytes = 8 << 20;

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
//   bool start(item, first_panel, last_panel)                    which head, and which key columns of the states
//   bool advance(state, begin, end)                              the state over one chunk
//   bool factors(state, begin, end, to, stride)                  those of the queries of one chunk, and nothing else
//   bool advance_grad(grad_state, empty, begin, end, from, stride)  the gradient of the state over one chunk, backward
//   bool backward(state, grad_state, grad_empty, begin, end)     all gradients of one chunk, and the gradient of the state
// Each returns whether all it met was finite; grad_empty says that grad_state is zero.
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
    segments = p.causal ? linear_segments(p, pool, p.seqlen_kv) : 1;
    const int64_t chunks = (p.seqlen_kv + chunk - 1) / chunk;
    const int64_t segment_chunks = max_of(int64_t(1), (chunks + segments - 1) / segments);
    segment_size = segment_chunks * chunk;
    segments = int(max_of(int64_t(1), (chunks + segment_chunks - 1) / segment_chunks));
    group = segment_chunks;
    if (group * layout.size * int64_t(sizeof(Real)) > kLinearStateBytes)
      for (group = 1; group * group < segment_chunks;) group++;
    if (!p.causal) group = 1;
  }

  struct Buffers {
    Real *checkpoints, *states, *grad_state;  // one per group, one per chunk of a group
    Buffers(const LinearBackward& b, Scratch& s) {
      checkpoints = s.take<Real>((b.segment_size / b.chunk + b.group - 1) / b.group * b.layout.size);
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
  int64_t num_segments() const { return segments > 1 ? p.batch * p.num_heads_kv * segments : 0; }
  int64_t factors_size() const { return segments > 1 ? 2 * p.num_heads / max_of(p.num_heads_kv, int64_t(1)) * segment_size : 0; }
  size_t scratch_bytes() const { return pool.num_workers * worker_bytes() + num_segments() * (2 * layout.size + factors_size()) * sizeof(Real) + 64; }

  // Chunks of [begin, end) from the last to the first. The state before the first lies in checkpoints[0].
  bool sweep(Tokens& tokens, Buffers& buf, int64_t begin, int64_t end, bool grad_empty) const {
    bool finite = true;
    const int64_t chunks = (end - begin + chunk - 1) / chunk, groups = (chunks + group - 1) / group;
    const auto token = [&](int64_t c) { return min_of(begin + c * chunk, end); };
    const auto advanced = [&](Real* to, const Real* from, int64_t first, int64_t last) {
      memcpy(to, from, layout.size * sizeof(Real));
      for (int64_t c = first; c < last; c++) finite &= tokens.advance(to, token(c), token(c + 1));
    };
    for (int64_t g = 1; g < groups; g++) advanced(buf.checkpoints + g * layout.size, buf.checkpoints + (g - 1) * layout.size, (g - 1) * group, g * group);
    for (int64_t g = groups - 1; g >= 0; g--) {
      const int64_t first = g * group, last = min_of(first + group, chunks);
      memcpy(buf.states, buf.checkpoints + g * layout.size, layout.size * sizeof(Real));
      for (int64_t c = first + 1; c < last; c++) advanced(buf.states + (c - first) * layout.size, buf.states + (c - first - 1) * layout.size, c - 1, c);
      for (int64_t c = last - 1; c >= first; c--) {
        finite &= tokens.backward(buf.states + (c - first) * layout.size, buf.grad_state, grad_empty, token(c), token(c + 1));
        grad_empty = false;
      }
    }
    return finite;
  }

  void run(void* memory) const {
    const int64_t heads = p.batch * p.num_heads_kv, size = p.head_dim * p.head_dim_v;
    const size_t bytes = worker_bytes();
    const bool grad_empty = !params.grad_final_kv && !params.grad_final_k_sum;
    const auto of_head = [&](auto* states, int64_t head, int64_t elements) { return states ? (Real*)states + head * elements : nullptr; };
    const auto load_initial = [&](int64_t head, Real* state) {
      return layout.load(of_head(p.initial_kv, head, size), of_head(p.initial_k_sum, head, p.head_dim), state);
    };
    const auto load_final_grad = [&](int64_t head, Real* state) {
      return layout.load(of_head(params.grad_final_kv, head, size), of_head(params.grad_final_k_sum, head, p.head_dim), state);
    };
    const auto store_initial_grad = [&](int64_t head, const Real* state, int first_panel, int last_panel) {
      layout.store(state, first_panel, last_panel, of_head(params.grad_initial_kv, head, size), of_head(params.grad_initial_k_sum, head, p.head_dim));
    };
    const auto sweep_head = [&](int worker, int64_t head) {
      Scratch scratch((char*)memory + worker * bytes);
      Buffers buf(*this, scratch);
      Tokens tokens(params, scratch);
      tokens.start(head, 0, layout.panels);
      load_initial(head, buf.checkpoints);
      load_final_grad(head, buf.grad_state);
      if (p.causal) sweep(tokens, buf, 0, p.seqlen_kv, grad_empty);
      else tokens.full(buf.checkpoints, buf.grad_state, grad_empty);
      store_initial_grad(head, buf.grad_state, 0, layout.panels);
    };
    if (segments == 1) return for_each_item(pool, heads, sweep_head);

    Real* kept_states = (Real*)((char*)memory + pool.num_workers * bytes);
    Real* kept_grads = kept_states + num_segments() * layout.size;
    Real* factors = kept_grads + num_segments() * layout.size;
    const auto begin_of = [&](int64_t segment) { return min_of(segment * segment_size, p.seqlen_kv); };
    int not_finite = 0;
    const auto note = [&](bool finite) {
      if (!finite) __atomic_store_n(&not_finite, 1, __ATOMIC_RELAXED);
    };
    const int parts = max_of(layout.panels, 1);
    const auto for_each_part = [&](const auto& f) {
      for_each_item(pool, heads * parts, [&](int worker, int64_t item) {
        Scratch scratch((char*)memory + worker * bytes);
        Buffers buf(*this, scratch);
        Tokens tokens(params, scratch);
        const int panel = int(item % parts), end = min_of(panel + 1, layout.panels);
        tokens.start(item / parts, panel, end);
        f(tokens, buf, item / parts, panel, end);
      });
    };
    const auto for_each_segment = [&](const auto& f) {
      for_each_item(pool, heads * segments, [&](int worker, int64_t item) {
        Scratch scratch((char*)memory + worker * bytes);
        Buffers buf(*this, scratch);
        Tokens tokens(params, scratch);
        tokens.start(item / segments, 0, layout.panels);
        f(tokens, buf, item, begin_of(item % segments), begin_of(item % segments + 1));
      });
    };
    for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int panel, int end) {
      Real* state = buf.states;
      bool finite = load_initial(head, state);
      for (int segment = 0; segment < segments; segment++) {
        layout.copy(state, panel, end, kept_states + (head * segments + segment) * layout.size);
        for (int64_t at = begin_of(segment); segment + 1 < segments && at < begin_of(segment + 1); at += chunk) finite &= tokens.advance(state, at, at + chunk);
      }
      note(finite);
    });
    for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
      memcpy(buf.states, kept_states + item * layout.size, layout.size * sizeof(Real));
      bool finite = true;
      for (int64_t at = begin; at < end; at += chunk) {
        const int64_t next = min_of(at + chunk, end);
        finite &= tokens.factors(buf.states, at, next, factors + item * factors_size() + (at - begin), segment_size);
        finite &= next < end ? tokens.advance(buf.states, at, next) : true;
      }
      note(finite);
    });
    if (!not_finite)
      for_each_part([&](Tokens& tokens, Buffers& buf, int64_t head, int panel, int end) {
        bool finite = load_final_grad(head, buf.grad_state), empty = grad_empty;
        for (int segment = segments - 1; segment >= 0; segment--) {
          const int64_t item = head * segments + segment, begin = begin_of(segment), chunks = (begin_of(segment + 1) - begin + chunk - 1) / chunk;
          layout.copy(buf.grad_state, panel, end, kept_grads + item * layout.size);
          for (int64_t c = chunks - 1; c >= 0; c--) {
            const int64_t at = begin + c * chunk;
            finite &=
                tokens.advance_grad(buf.grad_state, empty, at, min_of(at + chunk, p.seqlen_kv), factors + item * factors_size() + (at - begin), segment_size);
            empty = false;
          }
        }
        store_initial_grad(head, buf.grad_state, panel, end);
        note(finite);
      });
    // What is not finite decides which tokens stand alone, and each thread saw some columns only.
    if (not_finite) return for_each_item(pool, heads, sweep_head);
    for_each_segment([&](Tokens& tokens, Buffers& buf, int64_t item, int64_t begin, int64_t end) {
      memcpy(buf.checkpoints, kept_states + item * layout.size, layout.size * sizeof(Real));
      memcpy(buf.grad_state, kept_grads + item * layout.size, layout.size * sizeof(Real));
      sweep(tokens, buf, begin, end, grad_empty && end == p.seqlen_kv);
    });
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
