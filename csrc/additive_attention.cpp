// Additive attention, Tensor side: check, allocate, fill params by name, run the kernels.

#include "attention_checks.h"
#include "backend.h"

namespace tiled_attention {
namespace {

// What every operator of this file takes. Absent tensors stay default-constructed.
struct AdditiveArguments {
  Tensor query, key, value, score_weight, mask, key_lengths, documents, query_offset, dropout_seed;
  double dropout_p = 0;
  IntList intervals, dropout_offsets;
};

void take_masks(Arguments* stack, AdditiveArguments* args) {
  args->mask = stack->optional_tensor("mask");
  args->key_lengths = stack->optional_tensor("key_lengths");
  args->documents = stack->optional_tensor("documents");
  args->query_offset = stack->optional_tensor("query_offset");
  args->dropout_seed = stack->optional_tensor("dropout_seed");
  args->dropout_p = stack->scalar<double>();
  args->intervals = stack->ints();
  args->dropout_offsets = stack->ints();
}

AdditiveArguments take_additive_arguments(Arguments* stack) {
  AdditiveArguments args;
  args.query = stack->tensor("query");
  args.key = stack->tensor("key");
  args.value = stack->tensor("value");
  args.score_weight = stack->tensor("score_weight");
  take_masks(stack, &args);
  return args;
}

// Checks all arguments, fills the params but for results and batch dimensions, and adds the tensors to `batch_dims`.
template <class Params>
ScoreShape check_additive(AdditiveArguments* args, AttentionParams* attention, Params* params, BatchDims* batch_dims) {
  check_query_key_value(&args->query, &args->key, &args->value, attention, batch_dims);
  const Tensor& query = args->query;
  const ScoreShape scores(query, attention->seqlen_kv);

  read(&args->score_weight);
  check_dtype(args->score_weight, real_dtype(query.dtype));
  const Tensor& weight = args->score_weight;
  const bool per_head = weight.rank == 2 && weight.size(0) == attention->num_heads;
  if (!(per_head || weight.rank == 1) || weight.size(-1) != attention->head_dim) {
    fail("score_weight must have shape (head_dim = ", attention->head_dim, ",) or (num_heads = ", attention->num_heads, ", head_dim), got ", weight.shape());
  }
  make_contiguous(&args->score_weight);
  params->score_weight = args->score_weight.data;
  params->weight_head_stride = per_head ? attention->head_dim : 0;

  check_bool_mask(&args->mask, scores, attention, batch_dims);
  check_dropout(args->dropout_p, &args->dropout_seed, args->dropout_offsets, &attention->dropout);
  check_intervals(args->intervals, &attention->mask);
  return scores;
}

// What needs the number of batch items: after all tensors are added.
void finish_batch(const ScoreShape& scores, const BatchDims& batch_dims, AdditiveArguments* args, AttentionParams* attention) {
  batch_dims.finish(scores.sizes, scores.leading(), attention);
  check_mask_arrays(&args->key_lengths, &args->query_offset, &args->documents, attention->batch, &attention->mask);
}

// additive_attention_fwd and additive_attention: (out, lse, residual).
void additive_attention_fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AdditiveArguments args = take_additive_arguments(&arguments);
  const bool with_residual = arguments.scalar<bool>();
  const Backend backend("additive_attention_fwd", arguments.device());

  AdditiveAttentionParams params;
  AttentionParams& attention = params.attention;
  BatchDims batch_dims;
  const ScoreShape scores = check_additive(&args, &attention, &params, &batch_dims);

  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  ForwardResults results(args.query, scores.sizes, scores.rank - 1, with_residual, &attention, add);
  finish_batch(scores, batch_dims, &args, &attention);

  if (has_rows(attention) && attention.seqlen_kv == 0) {
    fill_bytes(results.out, 0);
    fill_bytes(results.residual, 0);
    backend.lse_without_keys(attention);
  } else if (has_rows(attention)) {
    backend.additive_attention_fwd(params);
  }
  results.release(stack);
}

// (grad_query, grad_key, grad_value, grad_score_weight)
void additive_attention_bwd(StableIValue* stack, uint64_t, uint64_t) {
  enum { kQuery, kKey, kValue, kScoreWeight, kNumGradients };
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor("grad_out");
  Tensor grad_lse = arguments.optional_tensor("grad_lse");
  AdditiveArguments args = take_additive_arguments(&arguments);
  Tensor out = arguments.tensor("out");
  Tensor lse = arguments.tensor("lse");
  Tensor residual = arguments.tensor("residual");
  const int64_t wanted = arguments.scalar<int64_t>();
  const Backend backend("additive_attention_bwd", arguments.device());

  AdditiveAttentionBackwardParams params;
  AttentionBackwardParams& backward = params.attention;
  AttentionParams& forward = backward.forward;
  BatchDims batch_dims;
  const ScoreShape scores = check_additive(&args, &forward, &params, &batch_dims);
  const int32_t real = real_dtype(args.query.dtype);
  check_wanted(wanted, kNumGradients);

  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  check_backward(args.query, &grad_out, &grad_lse, &out, &lse, &residual, scores.sizes, scores.rank - 1, &backward, add);

  const Tensor* const inputs[kNumGradients] = {&args.query, &args.key, &args.value, &args.score_weight};
  const char* const names[kNumGradients] = {"grad_query", "grad_key", "grad_value", "grad_score_weight"};
  Tensor grads[kNumGradients];
  allocate_input_gradients(inputs, names, wanted, grads, &backward, add);
  if (wanted >> kScoreWeight & 1) {
    grads[kScoreWeight] = empty_contiguous(names[kScoreWeight], real, args.query.device, args.score_weight.rank, args.score_weight.sizes);
    params.grad_score_weight = grads[kScoreWeight].data;
  }
  finish_batch(scores, batch_dims, &args, &forward);

  if (has_rows(forward) && forward.seqlen_kv != 0) {
    backend.additive_attention_bwd(params);
  } else {
    clear_gradients(grads, kNumGradients);
  }
  release_gradients(grads, inputs, kNumGradients, real, args.query.device, stack);
}

// Real (..., num_heads, num_rows, seqlen_kv)
void additive_attention_weights(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AdditiveArguments args;
  args.query = arguments.tensor("query");
  args.key = arguments.tensor("key");
  args.score_weight = arguments.tensor("score_weight");
  take_masks(&arguments, &args);
  Tensor lse = arguments.tensor("lse");
  Tensor rows = arguments.optional_tensor("rows");
  const Backend backend("additive_attention_weights", arguments.device());

  AdditiveAttentionWeightsParams params;
  AttentionWeightsParams& chosen = params.attention;
  AttentionParams& forward = chosen.forward;
  BatchDims batch_dims;
  ScoreShape scores = check_additive(&args, &forward, &params, &batch_dims);
  const int32_t real = real_dtype(args.query.dtype);
  forward.lse = check_lse(&lse, real, scores.sizes, scores.rank - 1);
  chosen.num_rows = forward.seqlen_q;
  if (rows) {
    check_rows(&rows, forward.seqlen_q);
    chosen.num_rows = rows.size(0);
    chosen.rows = static_cast<const int64_t*>(rows.data);
  }
  scores.sizes[scores.rank - 2] = chosen.num_rows;
  Tensor weights = empty_contiguous("weights", real, args.query.device, scores.rank, scores.sizes);
  batch_dims.add(weights, real == codes.float64 ? DType::kFloat64 : DType::kFloat32, &chosen.weights);
  finish_batch(scores, batch_dims, &args, &forward);
  if (weights.numel() != 0) backend.additive_attention_weights(params);
  stack[0] = weights.release();
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) {
  m.impl("additive_attention_fwd", &tiled_attention::additive_attention_fwd);
  m.impl("additive_attention", &tiled_attention::additive_attention_fwd);
  m.impl("additive_attention_bwd", &tiled_attention::additive_attention_bwd);
  m.impl("additive_attention_weights", &tiled_attention::additive_attention_weights);
}
