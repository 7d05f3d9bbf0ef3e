// Linear attention, Tensor side: check, allocate, fill params by name, run the kernels.

#include "backend.h"
#include "checks.h"

namespace tiled_attention {
namespace {

// Absent tensors stay default-constructed.
struct LinearArguments {
  Tensor query, key, value, key_mask, log_decay, kv, k_sum, cu_seqlens;
  int64_t query_map = 0, key_map = 0;
  bool causal = true, normalize = true;
  double scale = 1;
};

FeatureMap check_map(const char* name, int64_t map) {
  if (map < 0 || map > 3) fail(name, " must be 0 (identity), 1 (elu), 2 (relu) or 3 (exp), got ", map);
  return static_cast<FeatureMap>(map);
}

// (..., num_heads_kv, head_dim, head_dim_v) and (..., num_heads_kv, head_dim); packed, of num_sequences in place of the batch.
struct StateShape {
  int64_t rank = 0;  // of kv
  int64_t kv[kMaxRank], k_sum[kMaxRank];
};

// Reads one tensor of a state, Real and contiguous, and returns where it lies.
void* check_state(Tensor* tensor, int32_t real, const int64_t* sizes, int64_t rank) {
  read(tensor);
  check_dtype(*tensor, real);
  check_shape(*tensor, sizes, rank);
  make_contiguous(tensor);
  return tensor->data;
}

// Sequences one after the other in tensors of batch 1.
void check_packed(LinearArguments* args, LinearAttentionParams* params) {
  const Tensor& query = args->query;
  if (query.rank != 4 || query.size(0) != 1) fail("query must have shape (1, num_heads, total, head_dim) with cu_seqlens, got ", query.shape());
  if (params->seqlen_q != params->seqlen_kv) {
    fail("key must have the total length of query (", params->seqlen_q, ") with cu_seqlens, got shape ", args->key.shape());
  }
  params->cu_seqlens = check_offsets(&args->cu_seqlens, params->seqlen_q, "the total length");
  params->num_sequences = args->cu_seqlens.size(0) - 1;
}

// Nothing to compute: no heads or no rows, or rows of no sequence, which CUDA does not refuse.
bool is_empty(const LinearAttentionParams& params) {
  return params.batch * params.num_heads_kv == 0 || params.seqlen_kv == 0 || (params.cu_seqlens && params.num_sequences == 0);
}

// Checks all arguments but the state, fills `params` but for results and batch dimensions, and adds the tensors to `batch_dims`.
StateShape check_linear(LinearArguments* args, LinearAttentionParams* params, BatchDims* batch_dims) {
  const Tensor &query = args->query, &key = args->key;
  check_query_key_value(&args->query, &args->key, &args->value, params, batch_dims);
  params->query_map = check_map("query_map", args->query_map);
  params->key_map = check_map("key_map", args->key_map);
  check_finite("scale", args->scale);
  params->causal = args->causal, params->normalize = args->normalize, params->scale = args->scale;
  if (args->causal && params->seqlen_q != params->seqlen_kv) {
    fail("key must have the seqlen of query (", params->seqlen_q, ") when causal, got shape ", key.shape());
  }
  if (args->key_mask) {
    read(&args->key_mask);
    check_dtype(args->key_mask, codes.boolean);
    int64_t sizes[kMaxRank];
    std::memcpy(sizes, key.sizes, static_cast<size_t>(key.rank) * sizeof(int64_t));
    sizes[key.rank - 2] = 1, sizes[key.rank - 1] = params->seqlen_kv;
    check_broadcastable(args->key_mask, sizes, key.rank);
    batch_dims->add(args->key_mask, DType::kFloat32, &params->key_mask);
  }
  if (args->log_decay) {
    Tensor& decay = args->log_decay;
    read(&decay);
    check_dtype(decay, real_dtype(query.dtype));
    if (!args->causal) fail("log_decay needs causal, got causal = False");
    bool fits = decay.rank == key.rank && (decay.size(-1) == 1 || decay.size(-1) == params->head_dim);
    for (int64_t i = 0; fits && i < key.rank - 1; ++i) fits = decay.size(i) == key.size(i);
    if (!fits) fail("log_decay must have the shape of key, ", key.shape(), ", or that with a last size of 1, got ", decay.shape());
    params->decay_per_feature = decay.size(-1) != 1;
    batch_dims->add(decay, params->dtype, &params->log_decay);
  }
  StateShape state;
  state.rank = query.rank;
  std::memcpy(state.kv, key.sizes, static_cast<size_t>(key.rank) * sizeof(int64_t));
  std::memcpy(state.k_sum, key.sizes, static_cast<size_t>(key.rank) * sizeof(int64_t));
  state.kv[state.rank - 2] = params->head_dim, state.kv[state.rank - 1] = params->head_dim_v;
  state.k_sum[state.rank - 2] = params->head_dim;
  if (args->cu_seqlens) {
    check_packed(args, params);
    state.kv[0] = state.k_sum[0] = params->num_sequences;
  }
  return state;
}

void check_initial_state(const StateShape& state, int32_t real, LinearArguments* args, LinearAttentionParams* params) {
  if (bool(args->kv) != bool(args->k_sum)) fail("initial_kv and initial_k_sum must be given together, got only one of them");
  if (!args->kv) return;
  if (!args->causal) fail("initial_kv needs causal, got causal = False");
  params->initial_kv = check_state(&args->kv, real, state.kv, state.rank);
  params->initial_k_sum = check_state(&args->k_sum, real, state.k_sum, state.rank - 1);
}

LinearArguments take_linear_arguments(Arguments* stack) {
  // Members of a braced list are evaluated in order.
  return {stack->tensor("query"),
          stack->tensor("key"),
          stack->tensor("value"),
          stack->optional_tensor("key_mask"),
          stack->optional_tensor("log_decay"),
          stack->optional_tensor("initial_kv"),
          stack->optional_tensor("initial_k_sum"),
          stack->optional_tensor("cu_seqlens"),
          stack->scalar<int64_t>(),
          stack->scalar<int64_t>(),
          stack->scalar<bool>(),
          stack->scalar<bool>(),
          stack->scalar<double>()};
}

// Out without any key, and the state without any token.
void fill_without_tokens(const LinearAttentionParams& params, const Tensor& out, const Tensor& kv, const Tensor& k_sum) {
  fill_bytes(out, 0);
  if (!params.initial_kv) {
    fill_bytes(kv, 0);
    fill_bytes(k_sum, 0);
    return;
  }
  copy_bytes(kv, params.initial_kv);
  copy_bytes(k_sum, params.initial_k_sum);
}

// linear_attention_fwd and linear_attention: (out, kv, k_sum).
void linear_attention_fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  LinearArguments args = take_linear_arguments(&arguments);
  const Backend backend("linear_attention_fwd", arguments.device());

  LinearAttentionParams params;
  BatchDims batch_dims;
  const StateShape state = check_linear(&args, &params, &batch_dims);
  const int32_t dtype = args.query.dtype, real = real_dtype(dtype);
  check_initial_state(state, real, &args, &params);
  Tensor out = empty_in_order_of(args.query, "out", dtype, params.head_dim_v);
  Tensor kv = empty_contiguous("kv", real, args.query.device, state.rank, state.kv);
  Tensor k_sum = empty_contiguous("k_sum", real, args.query.device, state.rank - 1, state.k_sum);
  batch_dims.add(out, params.dtype, &params.out);
  params.final_kv = kv.data, params.final_k_sum = k_sum.data;
  batch_dims.finish(args.query.sizes, args.query.rank - 3, &params);
  if (is_empty(params)) {
    fill_without_tokens(params, out, kv, k_sum);
  } else if (params.cu_seqlens) {
    backend.linear_varlen_fwd(params);
  } else {
    backend.linear_fwd(params);
  }
  stack[0] = out.release();
  stack[1] = kv.release();
  stack[2] = k_sum.release();
}

// (grad_query, grad_key, grad_value, grad_log_decay, grad_initial_kv, grad_initial_k_sum)
void linear_attention_bwd(StableIValue* stack, uint64_t, uint64_t) {
  enum { kQuery, kKey, kValue, kLogDecay, kInitialKv, kInitialKSum, kNumGradients };
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor("grad_out");
  Tensor grad_kv = arguments.optional_tensor("grad_kv");
  Tensor grad_k_sum = arguments.optional_tensor("grad_k_sum");
  LinearArguments args = take_linear_arguments(&arguments);
  const int64_t wanted = arguments.scalar<int64_t>();
  const Backend backend("linear_attention_bwd", arguments.device());

  LinearAttentionBackwardParams params;
  LinearAttentionParams& forward = params.forward;
  BatchDims batch_dims;
  const StateShape state = check_linear(&args, &forward, &batch_dims);
  const int32_t dtype = args.query.dtype, real = real_dtype(dtype);
  check_initial_state(state, real, &args, &forward);

  if (wanted < 0 || wanted >> kNumGradients) fail("gradients must be in [0, ", 1 << kNumGradients, "), got ", wanted);
  const Tensor* const inputs[kNumGradients] = {&args.query, &args.key, &args.value, &args.log_decay, &args.kv, &args.k_sum};
  const char* const names[kNumGradients] = {"grad_query", "grad_key", "grad_value", "grad_log_decay", "grad_initial_kv", "grad_initial_k_sum"};
  const auto wants = [&](int i) { return (wanted >> i & 1) != 0; };
  for (int i = kLogDecay; i < kNumGradients; ++i) {
    if (wants(i) && !*inputs[i]) fail("gradients asks for ", names[i], ", which needs ", inputs[i]->name, ", got None");
  }
  read(&grad_out);
  check_like(grad_out, args.query, forward.head_dim_v);
  batch_dims.add(grad_out, forward.dtype, &params.grad_out);
  if (grad_kv) params.grad_final_kv = check_state(&grad_kv, real, state.kv, state.rank);
  if (grad_k_sum) params.grad_final_k_sum = check_state(&grad_k_sum, real, state.k_sum, state.rank - 1);

  Tensor grads[kNumGradients];
  TensorView* const views[] = {&params.grad_query, &params.grad_key, &params.grad_value};
  for (int i = kQuery; i <= kValue; ++i) {
    if (!wants(i)) continue;
    grads[i] = empty_in_order_of(*inputs[i], names[i], dtype, inputs[i]->size(-1));
    batch_dims.add(grads[i], forward.dtype, views[i]);
  }
  if (wants(kLogDecay)) {
    grads[kLogDecay] = empty_contiguous(names[kLogDecay], real, args.query.device, args.log_decay.rank, args.log_decay.sizes);
    batch_dims.add(grads[kLogDecay], forward.dtype, &params.grad_log_decay);
  }
  if (wants(kInitialKv)) grads[kInitialKv] = empty_contiguous(names[kInitialKv], real, args.query.device, state.rank, state.kv);
  if (wants(kInitialKSum)) grads[kInitialKSum] = empty_contiguous(names[kInitialKSum], real, args.query.device, state.rank - 1, state.k_sum);
  params.grad_initial_kv = grads[kInitialKv].data, params.grad_initial_k_sum = grads[kInitialKSum].data;
  batch_dims.finish(args.query.sizes, args.query.rank - 3, &forward);
  if (is_empty(forward)) {
    for (const Tensor& grad : grads) {
      if (grad) fill_bytes(grad, 0);
    }
    // Without tokens the state passes through.
    if (grads[kInitialKv] && grad_kv) copy_bytes(grads[kInitialKv], params.grad_final_kv);
    if (grads[kInitialKSum] && grad_k_sum) copy_bytes(grads[kInitialKSum], params.grad_final_k_sum);
  } else if (forward.cu_seqlens) {
    backend.linear_varlen_bwd(params);
  } else {
    backend.linear_bwd(params);
  }
  for (int i = 0; i < kNumGradients; ++i) {
    if (!grads[i]) grads[i] = empty_nothing(i < kLogDecay ? dtype : real, args.query.device);
    stack[i] = grads[i].release();
  }
}

LinearArguments take_step_arguments(Arguments* stack) {
  LinearArguments args;
  args.query = stack->tensor("query");
  args.key = stack->tensor("key");
  args.value = stack->tensor("value");
  args.key_mask = stack->optional_tensor("key_mask");
  args.log_decay = stack->optional_tensor("log_decay");
  args.kv = stack->tensor("kv");
  args.k_sum = stack->tensor("k_sum");
  args.query_map = stack->scalar<int64_t>();
  args.key_map = stack->scalar<int64_t>();
  args.normalize = stack->scalar<bool>();
  args.scale = stack->scalar<double>();
  return args;
}

// Runs one token from the state in `args` to the one in `kv` and `k_sum`, which may be the same memory; returns out.
Tensor run_step(const Backend& backend, LinearArguments* args, const StateShape& state, LinearAttentionParams* params, BatchDims* batch_dims, void* kv,
                void* k_sum) {
  Tensor out = empty_in_order_of(args->query, "out", args->query.dtype, params->head_dim_v);
  batch_dims->add(out, params->dtype, &params->out);
  params->final_kv = kv, params->final_k_sum = k_sum;
  batch_dims->finish(args->query.sizes, state.rank - 3, params);
  if (params->batch * params->num_heads_kv != 0) backend.linear_step(*params);
  return out;
}

StateShape check_step(LinearArguments* args, LinearAttentionParams* params, BatchDims* batch_dims) {
  const StateShape state = check_linear(args, params, batch_dims);
  if (params->seqlen_q != 1) fail("query must have seqlen_q = 1, got shape ", args->query.shape());
  return state;
}

// (out, kv, k_sum)
void linear_attention_step(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  LinearArguments args = take_step_arguments(&arguments);
  const Backend backend("linear_attention_step", arguments.device());
  LinearAttentionParams params;
  BatchDims batch_dims;
  const StateShape state = check_step(&args, &params, &batch_dims);
  const int32_t real = real_dtype(args.query.dtype);
  check_initial_state(state, real, &args, &params);
  Tensor kv = empty_contiguous("kv", real, args.query.device, state.rank, state.kv);
  Tensor k_sum = empty_contiguous("k_sum", real, args.query.device, state.rank - 1, state.k_sum);
  Tensor out = run_step(backend, &args, state, &params, &batch_dims, kv.data, k_sum.data);
  stack[0] = out.release();
  stack[1] = kv.release();
  stack[2] = k_sum.release();
}

// out; the state is replaced.
void linear_attention_step_inplace(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  LinearArguments args = take_step_arguments(&arguments);
  const Backend backend("linear_attention_step_", arguments.device());
  LinearAttentionParams params;
  BatchDims batch_dims;
  const StateShape state = check_step(&args, &params, &batch_dims);
  for (Tensor* tensor : {&args.kv, &args.k_sum}) {
    read(tensor);
    if (!tensor->is_contiguous()) fail(tensor->name, " must be contiguous to be replaced in place");
  }
  check_initial_state(state, real_dtype(args.query.dtype), &args, &params);
  stack[0] = run_step(backend, &args, state, &params, &batch_dims, args.kv.data, args.k_sum.data).release();
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) {
  m.impl("linear_attention_fwd", &tiled_attention::linear_attention_fwd);
  m.impl("linear_attention", &tiled_attention::linear_attention_fwd);
  m.impl("linear_attention_bwd", &tiled_attention::linear_attention_bwd);
  m.impl("linear_attention_step", &tiled_attention::linear_attention_step);
  m.impl("linear_attention_step_", &tiled_attention::linear_attention_step_inplace);
}
