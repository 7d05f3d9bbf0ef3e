#pragma once
// Packed sequences of linear attention on the CPU. Each one is a problem of its own for the kernels, which read it where it lies, so that its
// results are the bits it has alone. Workers take (sequence, KV head) pairs, the longest first; sequences so long that workers would wait for one
// of their heads are given to all of them before, one after the other.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/kernels.h"

namespace tiled_attention {

class PackedLinear {
 public:
  // `backward` is null in forward. All arguments stay as they are until run() is done.
  PackedLinear(const Kernels& table, const LinearAttentionParams& forward, const LinearAttentionBackwardParams* backward, const ThreadPool& pool)
      : table_(table), p_(forward), backward_(backward), pool_(pool), group_(p_.num_heads / p_.num_heads_kv) {
    // Waking a thread costs as much as some 10^5 multiply-adds.
    const double tokens = static_cast<double>(p_.seqlen_q) * static_cast<double>(p_.num_heads);
    if (2 * tokens * static_cast<double>(p_.head_dim) * static_cast<double>(p_.head_dim_v + 32) < 1e5) pool_.num_workers = 1;
    for (int64_t b = 0; b < p_.num_sequences; ++b) {
      if (length(b) > 0) sequences_.push_back(b);
    }
    std::stable_sort(sequences_.begin(), sequences_.end(), [this](int64_t a, int64_t b) { return length(a) > length(b); });
    whole_ = count_whole();
    const auto heads = static_cast<int64_t>(sequences_.size() - whole_) * p_.num_heads_kv;
    workers_ = static_cast<int>(std::min<int64_t>(pool_.num_workers, heads));
    for (size_t i = 0; i < sequences_.size(); ++i) {
      size_t& bytes = i < whole_ ? whole_bytes_ : head_bytes_;
      // Lengths come in descending order.
      if (i > 0 && i != whole_ && length(sequences_[i]) == length(sequences_[i - 1])) continue;
      bytes = std::max(bytes, i < whole_ ? kernel_bytes(sequences_[i], p_.num_heads_kv, pool_) : kernel_bytes(sequences_[i], 1, kOneWorker));
    }
    head_bytes_ = (head_bytes_ + 63) / 64 * 64;
  }

  size_t scratch_bytes() const { return std::max(whole_bytes_, static_cast<size_t>(workers_) * head_bytes_); }

  // `scratch` is 64-byte aligned.
  void run(void* scratch) const {
    for (int64_t b = 0; b < p_.num_sequences; ++b) {
      if (length(b) == 0) run_empty(b);
    }
    for (size_t i = 0; i < whole_; ++i) run_heads(sequences_[i], 0, p_.num_heads_kv, pool_, scratch);
    struct Context {
      const PackedLinear& self;
      char* memory;
      int64_t next;
    } context = {*this, static_cast<char*>(scratch), 0};
    const auto body = [](void* opaque, int worker) {
      Context& c = *static_cast<Context*>(opaque);
      const PackedLinear& self = c.self;
      const int64_t heads = self.p_.num_heads_kv, count = static_cast<int64_t>(self.sequences_.size() - self.whole_) * heads;
      for (int64_t i; (i = __atomic_fetch_add(&c.next, 1, __ATOMIC_RELAXED)) < count;) {
        const int64_t sequence = self.sequences_[self.whole_ + static_cast<size_t>(i / heads)];
        self.run_heads(sequence, i % heads, 1, kOneWorker, c.memory + static_cast<size_t>(worker) * self.head_bytes_);
      }
    };
    if (workers_ > 1) pool_.run(workers_, body, &context);
    else body(&context, 0);
  }

 private:
  static constexpr ThreadPool kOneWorker{};
  // A head that is shared moves its state twice, and threads wait for each other.
  static constexpr double kSharing = 1.5;

  int64_t length(int64_t sequence) const { return p_.cu_seqlens[sequence + 1] - p_.cu_seqlens[sequence]; }
  int64_t real_size() const { return p_.dtype == DType::kFloat64 ? 8 : 4; }
  int64_t element_size() const { return p_.dtype == DType::kFloat64 ? 8 : p_.dtype == DType::kFloat32 ? 4 : 2; }

  // How many of the longest sequences all workers do together: the number that is done first, in tokens of a head on one worker.
  size_t count_whole() const {
    if (pool_.num_workers == 1) return 0;
    const auto heads = static_cast<double>(p_.num_heads_kv), workers = static_cast<double>(pool_.num_workers);
    const double each = p_.num_heads_kv >= pool_.num_workers ? static_cast<double>((p_.num_heads_kv + pool_.num_workers - 1) / pool_.num_workers)
                                                             : std::min(1.0, kSharing * heads / workers);
    double done = 0, rest = static_cast<double>(p_.seqlen_q), best = std::numeric_limits<double>::infinity();
    size_t whole = 0;
    for (size_t i = 0; i <= sequences_.size(); ++i) {
      const double longest = i < sequences_.size() ? static_cast<double>(length(sequences_[i])) : 0;
      const double time = done + std::max(longest, rest * heads / workers);
      if (time < best) best = time, whole = i;
      if (longest * workers <= rest * heads) break;
      done += longest * each, rest -= longest;
    }
    return whole;
  }

  void move(TensorView* view, int64_t row, int64_t head, int64_t size) const {
    if (view->data) view->data = static_cast<char*>(view->data) + (row * view->row_stride + head * view->head_stride) * size;
  }
  // The state of a head, of `columns` value columns.
  template <class Pointer>
  void move_state(Pointer* state, int64_t sequence, int64_t head_kv, int64_t columns) const {
    if (*state) *state = (char*)*state + (sequence * p_.num_heads_kv + head_kv) * p_.head_dim * columns * real_size();
  }

  // `heads_kv` KV heads of a sequence from `head_kv` on, as a call of its own.
  LinearAttentionParams params_of(int64_t sequence, int64_t head_kv, int64_t heads_kv) const {
    const int64_t begin = p_.cu_seqlens[sequence], size = element_size();
    LinearAttentionParams s = p_;
    s.cu_seqlens = nullptr, s.num_sequences = 0;
    s.num_heads = heads_kv * group_, s.num_heads_kv = heads_kv, s.seqlen_q = s.seqlen_kv = length(sequence);
    for (TensorView* view : {&s.query, &s.out}) move(view, begin, head_kv * group_, size);
    for (TensorView* view : {&s.key, &s.value}) move(view, begin, head_kv, size);
    move(&s.log_decay, begin, head_kv, real_size());
    if (s.key_mask.data) s.key_mask.data = static_cast<char*>(s.key_mask.data) + begin * s.key_mask.col_stride + head_kv * s.key_mask.head_stride;
    move_state(&s.initial_kv, sequence, head_kv, p_.head_dim_v);
    move_state(&s.initial_k_sum, sequence, head_kv, 1);
    move_state(&s.final_kv, sequence, head_kv, p_.head_dim_v);
    move_state(&s.final_k_sum, sequence, head_kv, 1);
    return s;
  }
  LinearAttentionBackwardParams gradients_of(int64_t sequence, int64_t head_kv, int64_t heads_kv) const {
    const int64_t begin = p_.cu_seqlens[sequence], size = element_size();
    LinearAttentionBackwardParams s = *backward_;
    s.forward = params_of(sequence, head_kv, heads_kv);
    s.calls = pool_.num_workers;
    for (TensorView* view : {&s.grad_out, &s.grad_query}) move(view, begin, head_kv * group_, size);
    for (TensorView* view : {&s.grad_key, &s.grad_value}) move(view, begin, head_kv, size);
    move(&s.grad_log_decay, begin, head_kv, real_size());
    move_state(&s.grad_final_kv, sequence, head_kv, p_.head_dim_v);
    move_state(&s.grad_final_k_sum, sequence, head_kv, 1);
    move_state(&s.grad_initial_kv, sequence, head_kv, p_.head_dim_v);
    move_state(&s.grad_initial_k_sum, sequence, head_kv, 1);
    return s;
  }

  size_t kernel_bytes(int64_t sequence, int64_t heads_kv, const ThreadPool& pool) const {
    if (backward_) return table_.linear_bwd_scratch(gradients_of(sequence, 0, heads_kv), pool);
    return table_.linear_fwd_scratch(params_of(sequence, 0, heads_kv), pool);
  }
  void run_heads(int64_t sequence, int64_t head_kv, int64_t heads_kv, const ThreadPool& pool, void* scratch) const {
    if (backward_) table_.linear_bwd(gradients_of(sequence, head_kv, heads_kv), pool, scratch);
    else table_.linear_fwd(params_of(sequence, head_kv, heads_kv), pool, scratch);
  }

  // Without tokens a state passes through; what is absent is zero.
  void run_empty(int64_t sequence) const {
    pass(backward_ ? backward_->grad_final_kv : p_.initial_kv, sequence, p_.head_dim_v, backward_ ? backward_->grad_initial_kv : p_.final_kv);
    pass(backward_ ? backward_->grad_final_k_sum : p_.initial_k_sum, sequence, 1, backward_ ? backward_->grad_initial_k_sum : p_.final_k_sum);
  }
  void pass(const void* from, int64_t sequence, int64_t columns, void* to) const {
    const auto bytes = static_cast<size_t>(p_.num_heads_kv * p_.head_dim * columns * real_size());
    if (!to || bytes == 0) return;
    move_state(&from, sequence, 0, columns);
    move_state(&to, sequence, 0, columns);
    if (from) std::memcpy(to, from, bytes);
    else std::memset(to, 0, bytes);
  }

  const Kernels& table_;
  const LinearAttentionParams& p_;
  const LinearAttentionBackwardParams* backward_;
  ThreadPool pool_;
  const int64_t group_;
  std::vector<int64_t> sequences_;  // those with tokens, the longest first
  size_t whole_ = 0;                // so many of them by all workers together, the others a head at a time
  int workers_ = 1;
  size_t whole_bytes_ = 0, head_bytes_ = 0;
};

}  // namespace tiled_attention
