// Exact attention over packed sequences, Tensor side: check, allocate, fill params by name, run the kernels.

#include <algorithm>

#include "attention_checks.h"
#include "backend.h"
#include "rotary_checks.h"

namespace tiled_attention {
namespace {

// What both operators take. Absent tensors stay default-constructed.
struct VarlenArguments {
  Tensor query, key, value, cu_seqlens_q, cu_seqlens_kv, alibi_slopes, sinks, key_lengths, documents, query_offset, dropout_seed, query_table, key_table;
  int64_t max_seqlen_q = 0, max_seqlen_kv = 0;
  double scale = 1, softcap = 0, dropout_p = 0;
  IntList intervals, dropout_offsets;
  bool interleaved = false;
  Tensor turned_query, turned_key;  // scratch of turn_packed()
};

VarlenArguments take_varlen_arguments(Arguments* stack) {
  // Members of a braced list are evaluated in order.
  return {stack->tensor("query"),
          stack->tensor("key"),
          stack->tensor("value"),
          stack->tensor("cu_seqlens_q"),
          stack->tensor("cu_seqlens_kv"),
          stack->optional_tensor("alibi_slopes"),
          stack->optional_tensor("sinks"),
          stack->optional_tensor("key_lengths"),
          stack->optional_tensor("documents"),
          stack->optional_tensor("query_offset"),
          stack->optional_tensor("dropout_seed"),
          stack->optional_tensor("query_table"),
          stack->optional_tensor("key_table"),
          stack->scalar<int64_t>(),
          stack->scalar<int64_t>(),
          stack->scalar<double>(),
          stack->scalar<double>(),
          stack->scalar<double>(),
          stack->ints(),
          stack->ints(),
          stack->scalar<bool>(),
          {},
          {}};
}

// (rows, heads, dim) as a view.
void view_packed(const Tensor& tensor, DType dtype, TensorView* view) {
  view->data = tensor.data;
  view->dtype = dtype;
  view->row_stride = tensor.stride(0), view->head_stride = tensor.stride(1), view->col_stride = tensor.stride(2);
}

void check_packed(const Tensor& tensor, const Tensor& query) {
  check_same_dtype(tensor, query);
  if (tensor.rank != 3) fail(tensor.name, " must have shape (total, heads, dim), got ", tensor.shape());
}

// Offsets whose steps are at most `max_seqlen`; on CUDA that is not read either.
const int64_t* check_sequences(Tensor* offsets, int64_t num_sequences, int64_t total, int64_t max_seqlen, const char* total_name, const char* max_name) {
  read(offsets);
  if (offsets->rank == 1 && offsets->size(0) != num_sequences + 1) {
    fail(offsets->name, " must have shape (", num_sequences + 1, ",) as cu_seqlens_q has, got ", offsets->shape());
  }
  const int64_t* const values = check_offsets(offsets, total, total_name);
  check_length(max_name, max_seqlen);
  for (int64_t i = 0; device::kReadsValues && i < num_sequences; ++i) {
    if (values[i + 1] - values[i] > max_seqlen) {
      fail(max_name, " must be at least the length of every sequence, got ", max_seqlen, " and ", values[i + 1] - values[i], " rows in sequence ", i, " of ",
           offsets->name);
    }
  }
  return values;
}

// Tables of rotary positions: a row for each row of query and of key. Rows are turned to scratch where kernels do not turn them themselves.
void check_packed_rotary(const Backend& backend, VarlenArguments* args, AttentionParams* params) {
  if (!check_tables(&args->query_table, &args->key_table, args->query, args->key)) return;
  const auto take = [&](const Tensor& table, const Tensor& rows, Tensor* turned, TensorView* of_table, TensorView* of_rows) {
    if (table.rank != 2 || table.size(0) != rows.size(0)) fail(table.name, " must have shape (", rows.size(0), ", rotary_dim), got ", table.shape());
    if (Backend::kTurnsRows) {
      of_table->data = table.data, of_table->dtype = dtype_of(table);
      of_table->row_stride = table.stride(0), of_table->col_stride = 1;
      return;
    }
    *turned = empty_in_order_of(rows, rows.name, rows.dtype, rows.size(-1));
    rotate_packed(backend, rows, table, args->interleaved, false, *turned);
    view_packed(*turned, params->dtype, of_rows);
  };
  take(args->query_table, args->query, &args->turned_query, &params->rotary.query_table, &params->query);
  take(args->key_table, args->key, &args->turned_key, &params->rotary.key_table, &params->key);
  params->rotary.rotary_dim = args->query_table.size(-1), params->rotary.interleaved = args->interleaved;
}

// Checks all arguments and fills `params` but for results.
void check_varlen(const Backend& backend, VarlenArguments* args, AttentionParams* params) {
  Tensor &query = args->query, &key = args->key, &value = args->value;
  read(&query);
  read(&key);
  read(&value);
  params->dtype = dtype_of(query);
  if (query.rank != 3) fail("query must have shape (total_q, num_heads, head_dim), got ", query.shape());
  check_packed(key, query);
  check_packed(value, query);
  params->total_q = query.size(0), params->total_kv = key.size(0);
  params->num_heads = query.size(1), params->num_heads_kv = key.size(1);
  params->head_dim = query.size(2), params->head_dim_v = value.size(2);
  if (key.size(2) != params->head_dim) fail("key must have the head_dim of query (", params->head_dim, "), got shape ", key.shape());
  if (value.size(0) != params->total_kv || value.size(1) != params->num_heads_kv) {
    fail("value must have the total_kv and num_heads_kv of key, of shape ", key.shape(), ", got shape ", value.shape());
  }
  if (params->num_heads_kv == 0 ? params->num_heads != 0 : params->num_heads % params->num_heads_kv != 0) {
    fail("num_heads of query must be a multiple of num_heads_kv of key, got ", params->num_heads, " and ", params->num_heads_kv);
  }
  check_length("num_heads of query", params->num_heads);
  check_head_dim("head_dim of query", params->head_dim);
  check_head_dim("head_dim_v of value", params->head_dim_v);
  view_packed(query, params->dtype, &params->query);
  view_packed(key, params->dtype, &params->key);
  view_packed(value, params->dtype, &params->value);

  read(&args->cu_seqlens_q);
  params->batch = args->cu_seqlens_q.rank == 1 ? args->cu_seqlens_q.size(0) - 1 : 0;
  params->seqlen_q = args->max_seqlen_q, params->seqlen_kv = args->max_seqlen_kv;
  params->cu_seqlens_q = check_sequences(&args->cu_seqlens_q, params->batch, params->total_q, params->seqlen_q, "total_q", "max_seqlen_q");
  params->cu_seqlens_kv = check_sequences(&args->cu_seqlens_kv, params->batch, params->total_kv, params->seqlen_kv, "total_kv", "max_seqlen_kv");
  // Longer than the tensor is no sequence; grids of keys are not to be empty.
  params->seqlen_q = std::min(params->seqlen_q, params->total_q), params->seqlen_kv = std::max(int64_t(1), std::min(params->seqlen_kv, params->total_kv));
  params->lse_head_stride = params->total_q;

  const int32_t real = real_dtype(query.dtype);
  params->alibi_slopes = check_array(&args->alibi_slopes, real, params->num_heads);
  params->sinks = check_array(&args->sinks, real, params->num_heads);
  check_scale_and_softcap(args->scale, args->softcap, params);
  check_dropout(args->dropout_p, &args->dropout_seed, args->dropout_offsets, &params->dropout);
  check_intervals(args->intervals, &params->mask);
  check_mask_arrays(&args->key_lengths, &args->query_offset, &args->documents, params->batch, &params->mask);
  check_packed_rotary(backend, args, params);
}

// attention_varlen_fwd and attention_varlen: (out, lse, residual).
void attention_varlen_fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  VarlenArguments args = take_varlen_arguments(&arguments);
  const bool with_residual = arguments.scalar<bool>();
  const Backend backend("attention_varlen_fwd", arguments.device());

  AttentionParams params;
  check_varlen(backend, &args, &params);
  const int64_t lse_sizes[2] = {params.num_heads, params.total_q};
  ForwardResults results(args.query, lse_sizes, 2, with_residual, &params, view_packed);
  // Without a row results have no elements, or belong to no sequence.
  if (has_rows(params)) backend.attention_varlen_fwd(params);
  results.release(stack);
}

// (grad_query, grad_key, grad_value, grad_alibi_slopes, grad_sinks)
void attention_varlen_bwd(StableIValue* stack, uint64_t, uint64_t) {
  enum { kQuery, kKey, kValue, kAlibiSlopes, kSinks, kNumGradients };
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor("grad_out");
  Tensor grad_lse = arguments.optional_tensor("grad_lse");
  VarlenArguments args = take_varlen_arguments(&arguments);
  Tensor out = arguments.tensor("out");
  Tensor lse = arguments.tensor("lse");
  Tensor residual = arguments.tensor("residual");
  const int64_t wanted = arguments.scalar<int64_t>();
  const Backend backend("attention_varlen_bwd", arguments.device());

  AttentionBackwardParams params;
  AttentionParams& forward = params.forward;
  check_varlen(backend, &args, &forward);
  const int32_t real = real_dtype(args.query.dtype);
  check_wanted(wanted, kNumGradients);
  const Tensor* const inputs[kNumGradients] = {&args.query, &args.key, &args.value, &args.alibi_slopes, &args.sinks};
  const char* const names[kNumGradients] = {"grad_query", "grad_key", "grad_value", "grad_alibi_slopes", "grad_sinks"};
  const auto wants = [&](int i) { return (wanted >> i & 1) != 0; };
  for (int i = kAlibiSlopes; i < kNumGradients; ++i) {
    if (wants(i) && !*inputs[i]) fail("gradients asks for ", names[i], ", which needs ", inputs[i]->name, ", got None");
  }
  const int64_t lse_sizes[2] = {forward.num_heads, forward.total_q};
  check_backward(args.query, &grad_out, &grad_lse, &out, &lse, &residual, lse_sizes, 2, &params, view_packed);

  // Those of query, key and value have its dtype, the others are Real.
  Tensor grads[kNumGradients];
  allocate_input_gradients(inputs, names, wanted, grads, &params, view_packed);
  for (int i : {kAlibiSlopes, kSinks}) {
    if (wants(i)) grads[i] = empty_contiguous(names[i], real, args.query.device, 1, &forward.num_heads);
  }
  params.grad_alibi_slopes = grads[kAlibiSlopes].data;
  params.grad_sinks = grads[kSinks].data;
  if (has_rows(forward)) {
    backend.attention_varlen_bwd(params);
    const Tensor* const tables[] = {&args.query_table, &args.key_table};
    for (int i : {kQuery, kKey}) {
      if (*tables[i] && grads[i] && !Backend::kTurnsRows) rotate_packed(backend, grads[i], *tables[i], args.interleaved, true, grads[i]);
    }
  } else {
    clear_gradients(grads, kNumGradients);
  }
  release_gradients(grads, inputs, kNumGradients, real, args.query.device, stack);
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) {
  m.impl("attention_varlen_fwd", &tiled_attention::attention_varlen_fwd);
  m.impl("attention_varlen", &tiled_attention::attention_varlen_fwd);
  m.impl("attention_varlen_bwd", &tiled_attention::attention_varlen_bwd);
}
