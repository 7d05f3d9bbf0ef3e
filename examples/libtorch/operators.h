#pragma once
// The operators of tiled_attention from C++: arguments filled by name, put on the dispatcher's stack in the order of the schemas.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tiled_attention {

using OptionalTensor = std::optional<at::Tensor>;

// Which keys j row i of query sees; it stands at position p = i + query_offset.
struct Intervals {
  static constexpr int64_t kUnbounded = int64_t(1) << 40;
  int64_t query_offset = kUnbounded;                            // kUnbounded: seqlen_kv - seqlen_q, the bottom-right alignment
  int64_t window_left = kUnbounded, window_right = kUnbounded;  // p - window_left <= j <= p + window_right, or j < num_sinks
  int64_t limit_left = kUnbounded, limit_right = kUnbounded;    // p - limit_left <= j <= p + limit_right; causal is limit_right = 0
  int64_t prefix = -1;                                          // >= 0: j < max(prefix, p + 1)
  int64_t chunk = 0;                                            // > 0: floor(j / chunk) == floor(p / chunk)
  int64_t key_end = kUnbounded;                                 // j < key_end
  int64_t num_sinks = 0;
  int64_t top_left = 0;  // 1: j <= i

  std::vector<int64_t> list() const { return {query_offset, window_left, window_right, limit_left, limit_right, prefix, chunk, key_end, num_sinks, top_left}; }
};

// "Real" is float64 for float64 and float32 otherwise.
struct AttentionArguments {
  at::Tensor query;                                     // (..., num_heads, seqlen_q, head_dim)
  at::Tensor key;                                       // (..., num_heads_kv, seqlen_kv, head_dim)
  at::Tensor value;                                     // (..., num_heads_kv, seqlen_kv, head_dim_v)
  OptionalTensor mask;                                  // bool, broadcastable to (..., num_heads, seqlen_q, seqlen_kv), true = attend
  OptionalTensor bias;                                  // Real, bfloat16 or float16, broadcastable likewise
  OptionalTensor alibi_slopes, sinks;                   // Real (num_heads,)
  OptionalTensor key_lengths, documents, query_offset;  // int64 (batch,), (num_documents + 1,), (batch,)
  OptionalTensor dropout_seed;                          // int64 (), needed where dropout_p > 0
  OptionalTensor block_rows, block_tiles, block_bits;   // a block list, which Python makes of a pattern
  OptionalTensor query_table, key_table;                // rotary positions: Real (seqlen, rotary_dim), cosines and behind them sines
  std::optional<double> scale;                          // 1 / sqrt(head_dim)
  double softcap = 0, dropout_p = 0;                    // 0: none
  std::vector<int64_t> intervals = Intervals().list();
  std::array<int64_t, 4> dropout_offsets{};  // batch, head, query, key
  bool allow_tf32 = false, interleaved = false;
};

struct AttentionResults {
  at::Tensor out;       // like query, with head_dim_v
  at::Tensor lse;       // Real (..., num_heads, seqlen_q), natural logarithm
  at::Tensor residual;  // what rounding took from out, of 16-bit inputs where it was asked for; otherwise of shape (0,)
};

// Empty, of shape (0,), where not asked for.
struct AttentionGradients {
  at::Tensor query, key, value, bias, alibi_slopes, sinks;
};
enum : int64_t { kGradQuery = 1, kGradKey = 2, kGradValue = 4, kGradBias = 8, kGradAlibiSlopes = 16, kGradSinks = 32 };

enum class FeatureMap : int64_t { kIdentity, kEluPlusOne, kRelu, kExp };

struct LinearArguments {
  at::Tensor query, key, value;              // as in AttentionArguments
  OptionalTensor key_mask;                   // bool, broadcastable to (..., num_heads_kv, 1, seqlen_kv)
  OptionalTensor log_decay;                  // Real (..., num_heads_kv, seqlen_kv, 1 or head_dim), <= 0
  OptionalTensor initial_kv, initial_k_sum;  // Real (..., num_heads_kv, head_dim, head_dim_v) and (..., num_heads_kv, head_dim)
  OptionalTensor cu_seqlens;                 // int64 (num_sequences + 1,): packed, with a batch of 1
  FeatureMap query_map = FeatureMap::kEluPlusOne, key_map = FeatureMap::kEluPlusOne;
  bool causal = false, normalize = true;
  double scale = 1;
};

struct LinearResults {
  at::Tensor out, kv, k_sum;  // like query, and the last state
};

struct LinearGradients {
  at::Tensor query, key, value, log_decay, initial_kv, initial_k_sum;
};
enum : int64_t { kGradLogDecay = 8, kGradInitialKv = 16, kGradInitialKSum = 32 };  // beside the first three of exact attention

using Stack = torch::jit::Stack;

// Looks the operator up and calls it: its results replace its arguments. An operator that no library has registered is an error.
inline void call(const char* name, Stack* stack) { c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack); }

inline void push(Stack* stack, const AttentionArguments& a) {
  const double scale = a.scale.value_or(1 / std::sqrt(static_cast<double>(a.query.size(-1))));
  torch::jit::push(*stack, a.query, a.key, a.value, a.mask, a.bias, a.alibi_slopes, a.sinks, a.key_lengths, a.documents, a.query_offset);
  torch::jit::push(*stack, a.dropout_seed, a.block_rows, a.block_tiles, a.block_bits, a.query_table, a.key_table, scale, a.softcap, a.dropout_p);
  const std::vector<int64_t> offsets(a.dropout_offsets.begin(), a.dropout_offsets.end());
  torch::jit::push(*stack, a.intervals, offsets, a.allow_tf32, a.interleaved);
}

inline void push(Stack* stack, const LinearArguments& a) {
  torch::jit::push(*stack, a.query, a.key, a.value, a.key_mask, a.log_decay, a.initial_kv, a.initial_k_sum, a.cu_seqlens);
  torch::jit::push(*stack, static_cast<int64_t>(a.query_map), static_cast<int64_t>(a.key_map), a.causal, a.normalize, a.scale);
}

// `with_residual`: a call of attention_bwd follows.
inline AttentionResults attention_fwd(const AttentionArguments& arguments, bool with_residual) {
  Stack stack;
  push(&stack, arguments);
  torch::jit::push(stack, with_residual);
  call("tiled_attention::attention_fwd", &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// `results` are those of attention_fwd(arguments, true); `gradients` is a sum of kGrad...
inline AttentionGradients attention_bwd(const at::Tensor& grad_out, const OptionalTensor& grad_lse, const AttentionArguments& arguments,
                                        const AttentionResults& results, int64_t gradients) {
  Stack stack;
  torch::jit::push(stack, grad_out, grad_lse);
  push(&stack, arguments);
  torch::jit::push(stack, results.out, results.lse, results.residual, gradients);
  call("tiled_attention::attention_bwd", &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor(), stack[4].toTensor(), stack[5].toTensor()};
}

inline LinearResults linear_attention_fwd(const LinearArguments& arguments) {
  Stack stack;
  push(&stack, arguments);
  call("tiled_attention::linear_attention_fwd", &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

inline LinearGradients linear_attention_bwd(const at::Tensor& grad_out, const OptionalTensor& grad_kv, const OptionalTensor& grad_k_sum,
                                            const LinearArguments& arguments, int64_t gradients) {
  Stack stack;
  torch::jit::push(stack, grad_out, grad_kv, grad_k_sum);
  push(&stack, arguments);
  torch::jit::push(stack, gradients);
  call("tiled_attention::linear_attention_bwd", &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor(), stack[4].toTensor(), stack[5].toTensor()};
}

// The instruction set that the CPU kernels run on.
inline std::string instruction_set() {
  Stack stack;
  call("tiled_attention::_isa", &stack);
  return stack[0].toStringRef();
}

// The two operators as one function that C++'s autograd knows, once differentiable in query, key and value.
struct DifferentiableAttention : torch::autograd::Function<DifferentiableAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const std::vector<int64_t>& intervals) {
    AttentionArguments arguments{query, key, value};
    arguments.intervals = intervals;
    const AttentionResults results = attention_fwd(arguments, true);
    context->save_for_backward({query, key, value, results.out, results.lse, results.residual});
    context->saved_data["intervals"] = intervals;
    return results.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    int64_t wanted = 0;
    for (size_t i = 0; i < 3; ++i) wanted |= int64_t(context->needs_input_grad(i)) << i;
    AttentionArguments arguments{saved[0], saved[1], saved[2]};
    arguments.intervals = context->saved_data["intervals"].toIntVector();
    const AttentionGradients by = attention_bwd(grads[0], std::nullopt, arguments, {saved[3], saved[4], saved[5]}, wanted);
    const auto given = [&](int64_t bit, const at::Tensor& gradient) { return wanted & bit ? gradient : at::Tensor(); };
    return {given(kGradQuery, by.query), given(kGradKey, by.key), given(kGradValue, by.value), at::Tensor()};
  }
};

}  // namespace tiled_attention
