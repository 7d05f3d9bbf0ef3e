#pragma once
// Packed sequences on the CPU. Each one is a problem of its own for the kernels of exact attention, which read it where it lies, so that its
// results are the bits it has alone. Workers take (sequence, KV head) pairs, the longest first; a sequence so long that they would wait for one of
// its heads is given to all of them at once before.

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "core/packed.h"
#include "core/view.h"
#include "cpu/kernels.h"

namespace tiled_attention {

class PackedAttention {
 public:
  // `backward` is null in forward. All arguments stay as they are until run() is done.
  PackedAttention(const Kernels& table, const AttentionParams& forward, const AttentionBackwardParams* backward, const ThreadPool& pool)
      : table_(table), p_(forward), backward_(backward), pool_(pool), group_(p_.num_heads / p_.num_heads_kv) {
    double total = 0;
    for (int64_t b = 0; b < p_.batch; ++b) {
      const double work = work_of_head(b);
      total += work * static_cast<double>(p_.num_heads_kv);
      if (work > 0) whole_.push_back({b, 0, work});
    }
    const auto longer = [](const Task& a, const Task& b) { return a.work > b.work; };
    std::stable_sort(whole_.begin(), whole_.end(), longer);
    // A head that is more than half of one worker's share would leave the others waiting at the end.
    size_t long_ones = 0;
    if (pool_.num_workers > 1) {
      while (long_ones < whole_.size() && whole_[long_ones].work * 2 * pool_.num_workers > total) total -= whole_[long_ones++].work * double(p_.num_heads_kv);
    }
    for (size_t i = long_ones; i < whole_.size(); ++i) {
      for (int64_t head = 0; head < p_.num_heads_kv; ++head) heads_.push_back({whole_[i].sequence, head, whole_[i].work});
    }
    whole_.resize(long_ones);
    workers_ = static_cast<int>(std::min<int64_t>(pool_.num_workers, static_cast<int64_t>(heads_.size())));
    for (const Task& task : whole_) whole_bytes_ = std::max(whole_bytes_, kernel_bytes(task, p_.num_heads_kv, pool_));
    for (const Task& task : heads_) {
      if (task.head_kv == 0) head_bytes_ = std::max(head_bytes_, kernel_bytes(task, 1, kOneWorker));
    }
    head_bytes_ = (head_bytes_ + 63) / 64 * 64;
  }

  size_t scratch_bytes() const { return parts_bytes() + std::max(whole_bytes_, static_cast<size_t>(workers_) * head_bytes_); }

  // `scratch` is 64-byte aligned.
  void run(void* scratch) const {
    std::memset(scratch, 0, parts_bytes());
    for (int64_t b = 0; b < p_.batch; ++b) {
      if (query_segment(p_, b).length == 0 || key_segment(p_, b).length == 0) run_empty(b, scratch);
    }
    char* const memory = static_cast<char*>(scratch) + parts_bytes();
    for (const Task& task : whole_) run_task(task, p_.num_heads_kv, pool_, scratch, memory);
    struct Context {
      const PackedAttention& self;
      void* scratch;
      char* memory;
      int64_t next;
    } context = {*this, scratch, memory, 0};
    const auto body = [](void* opaque, int worker) {
      Context& c = *static_cast<Context*>(opaque);
      const auto count = static_cast<int64_t>(c.self.heads_.size());
      for (int64_t i; (i = __atomic_fetch_add(&c.next, 1, __ATOMIC_RELAXED)) < count;) {
        c.self.run_task(c.self.heads_[static_cast<size_t>(i)], 1, kOneWorker, c.scratch, c.memory + static_cast<size_t>(worker) * c.self.head_bytes_);
      }
    };
    if (workers_ > 1) pool_.run(workers_, body, &context);
    else body(&context, 0);
    if (!backward_) return;
    p_.dtype == DType::kFloat64 ? sum_parts<double>(scratch) : sum_parts<float>(scratch);
  }

 private:
  // One KV head of a sequence, or all of them.
  struct Task {
    int64_t sequence, head_kv;
    double work;
  };
  static constexpr ThreadPool kOneWorker{};

  int64_t real_size() const { return p_.dtype == DType::kFloat64 ? 8 : 4; }
  int64_t element_size() const { return p_.dtype == DType::kFloat64 ? 8 : p_.dtype == DType::kFloat32 ? 4 : 2; }

  // Gradients of slopes and of sinks by sequence, Real [2][batch][num_heads], added up at the end in the order of the sequences.
  size_t parts_bytes() const { return backward_ ? static_cast<size_t>((2 * p_.batch * p_.num_heads * real_size() + 63) / 64 * 64) : 0; }
  void* part(void* scratch, bool of_sinks, int64_t sequence, int64_t head) const {
    return static_cast<char*>(scratch) + (((of_sinks ? p_.batch : 0) + sequence) * p_.num_heads + head) * real_size();
  }
  template <class Real>
  void sum_parts(void* scratch) const {
    for (int of_sinks = 0; of_sinks < 2; ++of_sinks) {
      Real* const to = static_cast<Real*>(of_sinks ? backward_->grad_sinks : backward_->grad_alibi_slopes);
      for (int64_t head = 0; to && head < p_.num_heads; ++head) {
        double sum = 0;
        for (int64_t b = 0; b < p_.batch; ++b) sum += static_cast<double>(*static_cast<const Real*>(part(scratch, of_sinks != 0, b, head)));
        to[head] = static_cast<Real>(sum);
      }
    }
  }

  // In proportion to the multiply-adds of one KV head; 0 where there is nothing to compute.
  double work_of_head(int64_t sequence) const {
    const int64_t queries = query_segment(p_, sequence).length, keys = key_segment(p_, sequence).length;
    if (queries == 0 || keys == 0) return 0;
    const RowMask mask(p_.mask, sequence, queries, keys);
    const auto seen = [&](int64_t query) { return static_cast<double>(visible_keys(mask.row(query))); };
    const double rows = static_cast<double>(queries), per_row = (seen(0) + seen(queries / 2) + seen(queries - 1)) / 3;
    return (rows * (per_row + 64) + static_cast<double>(keys) * 16) * static_cast<double>(group_);
  }

  void move(TensorView* view, int64_t row, int64_t head) const {
    if (view->data) view->data = static_cast<char*>(view->data) + (row * view->row_stride + head * view->head_stride) * element_size();
  }
  const void* moved(const void* data, int64_t count) const { return data ? static_cast<const char*>(data) + count * real_size() : nullptr; }

  // `heads_kv` KV heads of a sequence from `head_kv` on, as a call of its own.
  AttentionParams params_of(int64_t sequence, int64_t head_kv, int64_t heads_kv) const {
    const Segment queries = query_segment(p_, sequence), keys = key_segment(p_, sequence);
    const int64_t head = head_kv * group_;
    AttentionParams s = p_;
    s.cu_seqlens_q = s.cu_seqlens_kv = nullptr;
    s.batch = 1, s.num_heads = heads_kv * group_, s.num_heads_kv = heads_kv, s.seqlen_q = queries.length, s.seqlen_kv = keys.length;
    for (TensorView* view : {&s.query, &s.out, &s.residual}) move(view, queries.begin, head);
    for (TensorView* view : {&s.key, &s.value}) move(view, keys.begin, head_kv);
    s.rotary.query_table.data = const_cast<void*>(moved(p_.rotary.query_table.data, queries.begin * p_.rotary.query_table.row_stride));
    s.rotary.key_table.data = const_cast<void*>(moved(p_.rotary.key_table.data, keys.begin * p_.rotary.key_table.row_stride));
    s.lse = const_cast<void*>(moved(p_.lse, head * p_.lse_head_stride + queries.begin));
    s.alibi_slopes = moved(p_.alibi_slopes, head), s.sinks = moved(p_.sinks, head);
    if (s.mask.key_lengths) s.mask.key_lengths += sequence;
    if (s.mask.query_offsets) s.mask.query_offsets += sequence;
    s.dropout.batch_offset += sequence, s.dropout.head_offset += head;
    return s;
  }
  // `parts` null: for the size of scratch memory.
  AttentionBackwardParams gradients_of(int64_t sequence, int64_t head_kv, int64_t heads_kv, void* parts) const {
    const Segment queries = query_segment(p_, sequence), keys = key_segment(p_, sequence);
    const int64_t head = head_kv * group_;
    AttentionBackwardParams s = *backward_;
    s.forward = params_of(sequence, head_kv, heads_kv);
    s.plan_heads = p_.num_heads_kv;
    for (TensorView* view : {&s.grad_out, &s.grad_query}) move(view, queries.begin, head);
    for (TensorView* view : {&s.grad_key, &s.grad_value}) move(view, keys.begin, head_kv);
    s.grad_lse = moved(s.grad_lse, head * p_.lse_head_stride + queries.begin);
    if (parts && s.grad_alibi_slopes) s.grad_alibi_slopes = part(parts, false, sequence, head);
    if (parts && s.grad_sinks) s.grad_sinks = part(parts, true, sequence, head);
    return s;
  }

  size_t kernel_bytes(const Task& task, int64_t heads_kv, const ThreadPool& pool) const {
    if (backward_) return table_.attention_bwd_scratch(gradients_of(task.sequence, task.head_kv, heads_kv, nullptr), pool);
    return table_.attention_fwd_scratch(params_of(task.sequence, task.head_kv, heads_kv), pool);
  }
  void run_task(const Task& task, int64_t heads_kv, const ThreadPool& pool, void* parts, void* memory) const {
    if (backward_) table_.attention_bwd(gradients_of(task.sequence, task.head_kv, heads_kv, parts), pool, memory);
    else table_.attention_fwd(params_of(task.sequence, task.head_kv, heads_kv), pool, memory);
  }

  void clear(const TensorView& view, const Segment& rows, int64_t heads, int64_t cols) const {
    if (!view.data) return;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
        char* const row = static_cast<char*>(view.data) + (head * view.head_stride + i * view.row_stride) * element_size();
        for (int64_t d = 0; d < cols; ++d) std::memset(row + d * view.col_stride * element_size(), 0, static_cast<size_t>(element_size()));
      }
    }
  }

  // A sequence without queries or without keys.
  void run_empty(int64_t sequence, void* parts) const {
    const Segment queries = query_segment(p_, sequence), keys = key_segment(p_, sequence);
    if (!backward_) {
      clear(p_.out, queries, p_.num_heads, p_.head_dim_v);
      clear(p_.residual, queries, p_.num_heads, p_.head_dim_v);
    } else {
      clear(backward_->grad_query, queries, p_.num_heads, p_.head_dim);
      clear(backward_->grad_key, keys, p_.num_heads_kv, p_.head_dim);
      clear(backward_->grad_value, keys, p_.num_heads_kv, p_.head_dim_v);
    }
    p_.dtype == DType::kFloat64 ? run_lse<double>(sequence, queries, parts) : run_lse<float>(sequence, queries, parts);
  }
  // lse is the sink itself, so what arrives at lse passes on to it; a sink of -inf is no sink.
  template <class Real>
  void run_lse(int64_t sequence, const Segment& queries, void* parts) const {
    for (int64_t head = 0; head < p_.num_heads; ++head) {
      const Real sink = p_.sinks ? static_cast<const Real*>(p_.sinks)[head] : -std::numeric_limits<Real>::infinity();
      const int64_t first = head * p_.lse_head_stride + queries.begin;
      if (!backward_) {
        std::fill_n(static_cast<Real*>(p_.lse) + first, queries.length, sink);
      } else if (backward_->grad_sinks && backward_->grad_lse && sink != -std::numeric_limits<Real>::infinity()) {
        double sum = 0;
        for (int64_t i = 0; i < queries.length; ++i) sum += static_cast<double>(static_cast<const Real*>(backward_->grad_lse)[first + i]);
        *static_cast<Real*>(part(parts, true, sequence, head)) = static_cast<Real>(sum);
      }
    }
  }

  const Kernels& table_;
  const AttentionParams& p_;
  const AttentionBackwardParams* backward_;
  const ThreadPool pool_;
  const int64_t group_;
  std::vector<Task> whole_, heads_;  // for all workers one after the other, then for one worker each; both the longest first
  int workers_ = 1;
  size_t whole_bytes_ = 0, head_bytes_ = 0;
};

}  // namespace tiled_attention
