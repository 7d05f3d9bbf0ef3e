// Additive attention, Tensor side: check, allocate, fill params by name, run the kernels.

#include "backend.h"
#include "checks.h"

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

// The shape of the scores: (..., num_heads, seqlen_q, seqlen_kv).
struct ScoreShape {
  int64_t rank = 0;
  int64_t sizes[kMaxRank];
};

// Checks all arguments, fills the params but for results and batch dimensions, and adds the tensors to `batch_dims`.
template <class Params>
ScoreShape check_additive(AdditiveArguments* args, AttentionParams* attention, Params* params, BatchDims* batch_dims) {
  check_query_key_value(&args->query, &args->key, &args->value, attention, batch_dims);
  const Tensor& query = args->query;
  ScoreShape scores;
  scores.rank = query.rank;
  std::memcpy(scores.sizes, query.sizes, static_cast<size_t>(query.rank - 1) * sizeof(int64_t));
  scores.sizes[scores.rank - 1] = attention->seqlen_kv;

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

  if (args->mask) {
    read(&args->mask);
    check_dtype(args->mask, codes.boolean);
    check_broadcastable(args->mask, scores.sizes, scores.rank);
    batch_dims->add(args->mask, DType::kFloat32, &attention->bool_mask);
  }
  check_dropout(args->dropout_p, &args->dropout_seed, args->dropout_offsets, &attention->dropout);
  check_intervals(args->intervals, &attention->mask);
  return scores;
}

// What needs the number of batch items: after all tensors are added.
void finish_batch(const ScoreShape& scores, const BatchDims& batch_dims, AdditiveArguments* args, AttentionParams* attention) {
  batch_dims.finish(scores.sizes, scores.rank - 3, attention);
  check_mask_arrays(&args->key_lengths, &args->query_offset, &args->documents, attention->batch, &attention->mask);
}

bool has_rows(const AttentionParams& attention) { return attention.batch != 0 && attention.num_heads != 0 && attention.seqlen_q != 0; }

// lse or its gradient: Real (..., num_heads, seqlen_q), made contiguous.
void* check_lse(Tensor* lse, int32_t real, const ScoreShape& scores) {
  read(lse);
  check_dtype(*lse, real);
  check_shape(*lse, scores.sizes, scores.rank - 1);
  make_contiguous(lse);
  return lse->data;
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

  // lse and 16-bit residuals come with out.
  const int32_t dtype = args.query.dtype;
  Tensor out = empty_in_order_of(args.query, "out", dtype, attention.head_dim_v);
  Tensor lse = empty_contiguous("lse", real_dtype(dtype), args.query.device, scores.rank - 1, scores.sizes);
  const bool keeps_residual = with_residual && is_16_bit(dtype);
  Tensor residual = keeps_residual ? empty_in_order_of(args.query, "residual", dtype, attention.head_dim_v) : empty_nothing(dtype, args.query.device);
  batch_dims.add(out, attention.dtype, &attention.out);
  if (keeps_residual) batch_dims.add(residual, attention.dtype, &attention.residual);
  attention.lse = lse.data;
  finish_batch(scores, batch_dims, &args, &attention);

  if (has_rows(attention) && attention.seqlen_kv == 0) {
    fill_bytes(out, 0);
    fill_bytes(residual, 0);
    backend.lse_without_keys(attention);
  } else if (has_rows(attention)) {
    backend.additive_attention_fwd(params);
  }
  stack[0] = out.release();
  stack[1] = lse.release();
  stack[2] = residual.release();
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
  const int32_t dtype = args.query.dtype, real = real_dtype(dtype);
  if (wanted < 0 || wanted >> kNumGradients) fail("gradients must be in [0, ", 1 << kNumGradients, "), got ", wanted);
  const auto wants = [&](int i) { return (wanted >> i & 1) != 0; };

  read(&grad_out);
  check_like(grad_out, args.query, forward.head_dim_v);
  batch_dims.add(grad_out, forward.dtype, &backward.grad_out);
  read(&out);
  check_like(out, args.query, forward.head_dim_v);
  batch_dims.add(out, forward.dtype, &forward.out);
  read(&residual);
  if (residual.rank != 1 || residual.size(0) != 0) {
    check_like(residual, args.query, forward.head_dim_v);
    if (!is_16_bit(dtype)) fail("residual must have shape (0,) beside a query of ", DTypeName{dtype}, ", got ", residual.shape());
    batch_dims.add(residual, forward.dtype, &forward.residual);
  }
  forward.lse = check_lse(&lse, real, scores);
  if (grad_lse) backward.grad_lse = check_lse(&grad_lse, real, scores);

  const Tensor* const inputs[kNumGradients] = {&args.query, &args.key, &args.value, &args.score_weight};
  const char* const names[kNumGradients] = {"grad_query", "grad_key", "grad_value", "grad_score_weight"};
  Tensor grads[kNumGradients];
  TensorView* const views[] = {&backward.grad_query, &backward.grad_key, &backward.grad_value};
  for (int i = kQuery; i <= kValue; ++i) {
    if (!wants(i)) continue;
    grads[i] = empty_in_order_of(*inputs[i], names[i], dtype, inputs[i]->size(-1));
    batch_dims.add(grads[i], forward.dtype, views[i]);
  }
  if (wants(kScoreWeight)) {
    grads[kScoreWeight] = empty_contiguous(names[kScoreWeight], real, args.query.device, args.score_weight.rank, args.score_weight.sizes);
    params.grad_score_weight = grads[kScoreWeight].data;
  }
  finish_batch(scores, batch_dims, &args, &forward);

  if (has_rows(forward) && forward.seqlen_kv != 0) {
    backend.additive_attention_bwd(params);
  } else {
    for (const Tensor& grad : grads) {
      if (grad) fill_bytes(grad, 0);
    }
  }
  for (int i = 0; i < kNumGradients; ++i) {
    if (!grads[i]) grads[i] = empty_nothing(inputs[i]->dtype, args.query.device);
    stack[i] = grads[i].release();
  }
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
  forward.lse = check_lse(&lse, real, scores);
  chosen.num_rows = forward.seqlen_q;
  if (rows) {
    read(&rows);
    check_dtype(rows, codes.int64);
    if (rows.rank != 1) fail("rows must have shape (num_rows,), got ", rows.shape());
    make_contiguous(&rows);
    chosen.num_rows = rows.size(0);
    check_length("the number of rows", chosen.num_rows);
    chosen.rows = static_cast<const int64_t*>(rows.data);
    for (int64_t i = 0; device::kReadsValues && i < chosen.num_rows; ++i) {
      if (chosen.rows[i] < 0 || chosen.rows[i] >= forward.seqlen_q) {
        fail("rows must be in [0, seqlen_q = ", forward.seqlen_q, "), got ", chosen.rows[i], " at ", i);
      }
    }
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
