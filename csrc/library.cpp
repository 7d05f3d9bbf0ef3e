// The schemas of all operators, and the operators without tensors. A program that is not Python loads this library and
// calls attention_fwd and attention_bwd itself: the autograd formula is registered from Python.

#include <string>

#include "backend.h"
#include "checks.h"

#ifndef TILED_ATTENTION_BACKEND_EMULATED
#include <pthread.h>

#include <atomic>
#endif

namespace tiled_attention {
namespace {

#ifdef TILED_ATTENTION_BACKEND_EMULATED
std::string isa_in_use() { return "emulated"; }
std::string isa_names() { return "emulated"; }

void set_isa(std::string_view isa) {
  if (isa != "emulated") fail("isa must be one of emulated, got ", isa);
}

double peak(int64_t) { fail("the emulator has no peak"); }
#else
std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });

std::string isa_in_use() { return kernels().isa; }

// Worst first, separated by spaces.
std::string isa_names() {
  const char* names[4];
  const int count = available_isas(names);
  std::string text;
  for (int i = 0; i < count; ++i) text.append(i ? " " : "").append(names[i]);
  return text;
}

void set_isa(std::string_view isa) {
  const Kernels* found = find_kernels(std::string(isa).c_str());
  if (!found) fail("isa must be one of ", isa_names(), ", got ", isa);
  set_kernels(*found);
}

// GFLOP/s of one thread; dtype 0 float32, 1 float64, 2 bfloat16, 3 float16.
double peak(int64_t dtype) {
  if (dtype < 0 || dtype > 3) fail("dtype must be 0 (float32), 1 (float64), 2 (bfloat16) or 3 (float16), got ", dtype);
  return kernels().peak(static_cast<DType>(dtype));
}
#endif

void poison(bool on) { poison_buffers = on; }

}  // namespace

#ifndef TILED_ATTENTION_BACKEND_EMULATED
bool in_forked_child() { return forked.load(std::memory_order_relaxed); }
#endif

}  // namespace tiled_attention

// How a row's score is made: dtypes and shapes as in docs/semantics.md.
#define MASKS_AND_SCORES(SINKS)                                                                               \
  "Tensor? mask, Tensor? bias, Tensor? alibi_slopes, " SINKS "Tensor? key_lengths, Tensor? documents, "       \
  "Tensor? query_offset, Tensor? dropout_seed, Tensor? block_rows, Tensor? block_tiles, Tensor? block_bits, " \
  "Tensor? query_table, Tensor? key_table, float scale, float softcap, float dropout_p, SymInt[] intervals, " \
  "SymInt[] dropout_offsets, bool allow_tf32, bool interleaved"
#define ATTENTION_ARGUMENTS "Tensor query, Tensor key, Tensor value, " MASKS_AND_SCORES("Tensor? sinks, ")
#define ADDITIVE_MASKS                                                                                                      \
  "Tensor score_weight, Tensor? mask, Tensor? key_lengths, Tensor? documents, Tensor? query_offset, Tensor? dropout_seed, " \
  "float dropout_p, SymInt[] intervals, SymInt[] dropout_offsets"
#define ADDITIVE_ARGUMENTS "Tensor query, Tensor key, Tensor value, " ADDITIVE_MASKS
// key_lengths and query_offset hold one number per sequence.
#define VARLEN_ARGUMENTS                                                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? alibi_slopes, " \
  "Tensor? sinks, Tensor? key_lengths, Tensor? documents, Tensor? query_offset, Tensor? dropout_seed, "       \
  "Tensor? query_table, Tensor? key_table, SymInt max_seqlen_q, SymInt max_seqlen_kv, float scale, "          \
  "float softcap, float dropout_p, SymInt[] intervals, SymInt[] dropout_offsets, bool interleaved"
#define LINEAR_INPUTS "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? log_decay, "
#define LINEAR_ARGUMENTS \
  LINEAR_INPUTS "Tensor? initial_kv, Tensor? initial_k_sum, Tensor? cu_seqlens, int query_map, int key_map, bool causal, bool normalize, float scale"

STABLE_TORCH_LIBRARY(tiled_attention, m) {
  // No autograd formula: inference, and the eager autograd function inside itself.
  m.def("attention_fwd(" ATTENTION_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  // The same, for compiled code: carries the autograd formula.
  m.def("attention(" ATTENTION_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  // Bit i of `gradients`: the i-th result is wanted.
  m.def("attention_bwd(Tensor grad_out, Tensor? grad_lse, " ATTENTION_ARGUMENTS
        ", Tensor out, Tensor lse, Tensor residual, int gradients) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_bias, Tensor grad_alibi_slopes, Tensor grad_sinks)");
  // On the CPU, the same for keys beside others: `out`, `lse` and `residual` over those become the results over all, and what these keys add
  // is added to the gradients that are given.
  m.def("_attention_fwd_add_(" ATTENTION_ARGUMENTS ", Tensor(a!) out, Tensor(b!) lse, Tensor(c!) residual) -> ()");
  m.def("_attention_bwd_add_(Tensor grad_out, Tensor? grad_lse, " ATTENTION_ARGUMENTS
        ", Tensor out, Tensor lse, Tensor residual, Tensor(a!)? grad_query, Tensor(b!)? grad_key, Tensor(c!)? grad_value, "
        "Tensor(d!)? grad_alibi_slopes) -> ()");
  m.def("attention_weights(Tensor query, Tensor key, " MASKS_AND_SCORES("") ", Tensor lse, Tensor? rows, bool average) -> Tensor");
  // Of a cache. `pinned`: it is a ring that keeps its first `pinned` keys, -1: it is none.
  m.def("attention_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens, Tensor? page_table, "
        "Tensor? alibi_slopes, Tensor? sinks, Tensor? key_lengths, Tensor? documents, float scale, float softcap, SymInt[] intervals, "
        "SymInt num_new, SymInt pinned) -> (Tensor out, Tensor lse)");
  m.def("cache_append_(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor new_key, Tensor new_value, Tensor cache_seqlens, "
        "Tensor? page_table, SymInt pinned) -> ()");
  m.def("additive_attention_fwd(" ADDITIVE_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  m.def("additive_attention(" ADDITIVE_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  m.def("additive_attention_bwd(Tensor grad_out, Tensor? grad_lse, " ADDITIVE_ARGUMENTS
        ", Tensor out, Tensor lse, Tensor residual, int gradients) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_score_weight)");
  m.def("additive_attention_weights(Tensor query, Tensor key, " ADDITIVE_MASKS ", Tensor lse, Tensor? rows) -> Tensor");
  m.def("attention_varlen_fwd(" VARLEN_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  m.def("attention_varlen(" VARLEN_ARGUMENTS ", bool with_residual) -> (Tensor out, Tensor lse, Tensor residual)");
  m.def("attention_varlen_bwd(Tensor grad_out, Tensor? grad_lse, " VARLEN_ARGUMENTS
        ", Tensor out, Tensor lse, Tensor residual, int gradients) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value, Tensor grad_alibi_slopes, Tensor grad_sinks)");
  m.def("linear_attention_fwd(" LINEAR_ARGUMENTS ") -> (Tensor out, Tensor kv, Tensor k_sum)");
  m.def("linear_attention(" LINEAR_ARGUMENTS ") -> (Tensor out, Tensor kv, Tensor k_sum)");
  m.def("linear_attention_bwd(Tensor grad_out, Tensor? grad_kv, Tensor? grad_k_sum, " LINEAR_ARGUMENTS
        ", int gradients) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_log_decay, "
        "Tensor grad_initial_kv, Tensor grad_initial_k_sum)");
  m.def("linear_attention_step(" LINEAR_INPUTS
        "Tensor kv, Tensor k_sum, int query_map, int key_map, bool normalize, float scale) -> (Tensor out, Tensor kv, Tensor k_sum)");
  m.def("linear_attention_step_(" LINEAR_INPUTS "Tensor(a!) kv, Tensor(b!) k_sum, int query_map, int key_map, bool normalize, float scale) -> Tensor");
  // rows (..., num_heads, seqlen, head_dim), table (..., 1, seqlen, rotary_dim) or without leading dimensions.
  m.def("rotate(Tensor rows, Tensor table, bool interleaved, bool transposed) -> Tensor");
  m.def("dropout_mask(Tensor seed, float dropout_p, SymInt batch, SymInt num_heads, SymInt seqlen_q, SymInt seqlen_kv, "
        "SymInt[] dropout_offsets) -> Tensor");
  m.def("_mask_dense(SymInt[] intervals, Tensor? key_lengths, Tensor? documents, Tensor? query_offset, SymInt batch, "
        "SymInt seqlen_q, SymInt seqlen_kv) -> Tensor");
  m.def("_blocks_dense(Tensor block_rows, Tensor block_tiles, Tensor block_bits, Tensor rows, SymInt seqlen_q, SymInt seqlen_kv) -> Tensor");
  m.def("_isa() -> str");
  m.def("_available_isas() -> str");
  m.def("_set_isa(str isa) -> ()");
  m.def("_peak(int dtype) -> float");
  m.def("_poison(bool on) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, CompositeExplicitAutograd, m) {
  m.impl("_isa", TORCH_BOX(&tiled_attention::isa_in_use));
  m.impl("_available_isas", TORCH_BOX(&tiled_attention::isa_names));
  m.impl("_set_isa", TORCH_BOX(&tiled_attention::set_isa));
  m.impl("_peak", TORCH_BOX(&tiled_attention::peak));
  m.impl("_poison", TORCH_BOX(&tiled_attention::poison));
}
