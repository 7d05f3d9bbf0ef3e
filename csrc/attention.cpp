// Exact attention, Tensor side: check, allocate, fill params by name, run the kernels.

#include "attention_checks.h"
#include "backend.h"
#include "rotary_checks.h"

namespace tiled_attention {
namespace {

// What every operator of this file takes. Absent tensors stay default-constructed.
struct AttentionArguments {
  Tensor query, key, value, mask, bias, alibi_slopes, sinks, key_lengths, documents, query_offset, dropout_seed, block_rows, block_tiles, block_bits;
  Tensor query_table, key_table;
  double scale = 1, softcap = 0, dropout_p = 0;
  IntList intervals, dropout_offsets;
  bool allow_tf32 = false, interleaved = false;
  Tensor turned_query, turned_key;  // scratch of finish_batch()
};

AttentionArguments take_attention_arguments(Arguments* stack) {
  // Members of a braced list are evaluated in order.
  return {stack->tensor("query"),
          stack->tensor("key"),
          stack->tensor("value"),
          stack->optional_tensor("mask"),
          stack->optional_tensor("bias"),
          stack->optional_tensor("alibi_slopes"),
          stack->optional_tensor("sinks"),
          stack->optional_tensor("key_lengths"),
          stack->optional_tensor("documents"),
          stack->optional_tensor("query_offset"),
          stack->optional_tensor("dropout_seed"),
          stack->optional_tensor("block_rows"),
          stack->optional_tensor("block_tiles"),
          stack->optional_tensor("block_bits"),
          stack->optional_tensor("query_table"),
          stack->optional_tensor("key_table"),
          stack->scalar<double>(),
          stack->scalar<double>(),
          stack->scalar<double>(),
          stack->ints(),
          stack->ints(),
          stack->scalar<bool>(),
          stack->scalar<bool>(),
          {},
          {}};
}

// A bias by distance: (..., num_heads or 1, 1, seqlen_q + seqlen_kv - 1), element t for the keys j of row i with j - i = t - (seqlen_q - 1).
// One row is not told apart from an ordinary bias, and means the same.
bool is_by_distance(const Tensor& bias, const AttentionParams& params) {
  return bias.rank >= 2 && params.seqlen_q > 1 && params.seqlen_kv > 0 && bias.size(-2) == 1 && bias.size(-1) == params.seqlen_q + params.seqlen_kv - 1;
}

// `tensor` is such a bias or its gradient: element (i, j) at data + j - i.
void view_by_distance(const Tensor& tensor, int64_t seqlen_q, TensorView* view) {
  const auto offset = (seqlen_q - 1) * tensor.stride(-1) * static_cast<int64_t>(aoti_torch_dtype_element_size(tensor.dtype));
  view->data = static_cast<char*>(view->data) + offset;
  view->row_stride = -view->col_stride;
}

void check_rotary(AttentionArguments* args, AttentionParams* params, BatchDims* batch_dims) {
  Tensor &query_table = args->query_table, &key_table = args->key_table;
  if (!check_tables(&query_table, &key_table, args->query, args->key)) return;
  check_table(&query_table, args->query);
  check_table(&key_table, args->key);
  if (!Backend::kTurnsRows) return;
  batch_dims->add(query_table, dtype_of(query_table), &params->rotary.query_table);
  batch_dims->add(key_table, dtype_of(key_table), &params->rotary.key_table);
  params->rotary.rotary_dim = query_table.size(-1), params->rotary.interleaved = args->interleaved;
}

// Checks all arguments, fills `params` but for results and batch dimensions, and adds the tensors to `batch_dims`.
ScoreShape check_attention(AttentionArguments* args, AttentionParams* params, BatchDims* batch_dims) {
  const Tensor& query = args->query;
  check_query_key_value(&args->query, &args->key, &args->value, params, batch_dims);
  const int32_t real = real_dtype(query.dtype);

  const ScoreShape scores(query, params->seqlen_kv);
  check_bool_mask(&args->mask, scores, params, batch_dims);
  check_blocks(&args->block_rows, &args->block_tiles, &args->block_bits, scores.sizes, scores.rank, params, batch_dims);
  if (args->bias) {
    read(&args->bias);
    if (args->bias.dtype != real && !is_16_bit(args->bias.dtype)) {
      fail("bias must be ", DTypeName{real}, ", bfloat16 or float16 beside a query of ", DTypeName{query.dtype}, ", got ", DTypeName{args->bias.dtype});
    }
    const bool by_distance = is_by_distance(args->bias, *params);
    ScoreShape expected = scores;
    if (by_distance) expected.sizes[scores.rank - 2] = 1, expected.sizes[scores.rank - 1] = args->bias.size(-1);
    check_broadcastable(args->bias, expected.sizes, scores.rank);
    batch_dims->add(args->bias, dtype_of(args->bias), &params->bias);
    if (by_distance) view_by_distance(args->bias, params->seqlen_q, &params->bias);
  }
  params->alibi_slopes = check_array(&args->alibi_slopes, real, params->num_heads);
  params->sinks = check_array(&args->sinks, real, params->num_heads);
  check_scale_and_softcap(args->scale, args->softcap, params);
  params->allow_tf32 = args->allow_tf32;
  check_dropout(args->dropout_p, &args->dropout_seed, args->dropout_offsets, &params->dropout);
  check_intervals(args->intervals, &params->mask);
  check_rotary(args, params, batch_dims);
  return scores;
}

// What needs the number of batch items: after all tensors are added. Query and key are turned to scratch where kernels do not turn them themselves.
void finish_batch(const Backend& backend, const ScoreShape& scores, BatchDims* batch_dims, AttentionArguments* args, AttentionParams* params) {
  if (args->query_table && !Backend::kTurnsRows) {
    const auto turn = [&](const Tensor& rows, const Tensor& table, Tensor* turned, TensorView* view) {
      *turned = empty_in_order_of(rows, rows.name, rows.dtype, rows.size(-1));
      rotate_rows(backend, rows, table, args->interleaved, false, *turned);
      batch_dims->add(*turned, params->dtype, view);
    };
    turn(args->query, args->query_table, &args->turned_query, &params->query);
    turn(args->key, args->key_table, &args->turned_key, &params->key);
  }
  batch_dims->finish(scores.sizes, scores.leading(), params);
  check_mask_arrays(&args->key_lengths, &args->query_offset, &args->documents, params->batch, &params->mask);
}

// attention_fwd and attention: (out, lse, residual).
void attention_fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionArguments args = take_attention_arguments(&arguments);
  const bool with_residual = arguments.scalar<bool>();
  const Backend backend("attention_fwd", arguments.device());

  AttentionParams params;
  BatchDims batch_dims;
  const ScoreShape scores = check_attention(&args, &params, &batch_dims);

  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  ForwardResults results(args.query, scores.sizes, scores.rank - 1, with_residual, &params, add);
  finish_batch(backend, scores, &batch_dims, &args, &params);

  if (has_rows(params) && params.seqlen_kv == 0) {
    fill_bytes(results.out, 0);
    fill_bytes(results.residual, 0);
    backend.lse_without_keys(params);
  } else if (has_rows(params)) {
    backend.attention_fwd(params);
  }
  results.release(stack);
}

// (grad_query, grad_key, grad_value, grad_bias, grad_alibi_slopes, grad_sinks)
void attention_bwd(StableIValue* stack, uint64_t, uint64_t) {
  enum { kQuery, kKey, kValue, kBias, kAlibiSlopes, kSinks, kNumGradients };
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor("grad_out");
  Tensor grad_lse = arguments.optional_tensor("grad_lse");
  AttentionArguments args = take_attention_arguments(&arguments);
  Tensor out = arguments.tensor("out");
  Tensor lse = arguments.tensor("lse");
  Tensor residual = arguments.tensor("residual");
  const int64_t wanted = arguments.scalar<int64_t>();
  const Backend backend("attention_bwd", arguments.device());

  AttentionBackwardParams params;
  AttentionParams& forward = params.forward;
  BatchDims batch_dims;
  const ScoreShape scores = check_attention(&args, &forward, &batch_dims);
  const int32_t real = real_dtype(args.query.dtype);

  check_wanted(wanted, kNumGradients);
  const Tensor* const inputs[kNumGradients] = {&args.query, &args.key, &args.value, &args.bias, &args.alibi_slopes, &args.sinks};
  const char* const names[kNumGradients] = {"grad_query", "grad_key", "grad_value", "grad_bias", "grad_alibi_slopes", "grad_sinks"};
  const auto wants = [&](int i) { return (wanted >> i & 1) != 0; };
  for (int i = kBias; i < kNumGradients; ++i) {
    if (wants(i) && !*inputs[i]) fail("gradients asks for ", names[i], ", which needs ", inputs[i]->name, ", got None");
  }
  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  check_backward(args.query, &grad_out, &grad_lse, &out, &lse, &residual, scores.sizes, scores.rank - 1, &params, add);

  // Those of query, key and value have its dtype, the others are Real.
  Tensor grads[kNumGradients];
  allocate_input_gradients(inputs, names, wanted, grads, &params, add);
  if (wants(kBias)) {
    grads[kBias] = empty_contiguous(names[kBias], real, args.bias.device, args.bias.rank, args.bias.sizes);
    batch_dims.add(grads[kBias], real == codes.float64 ? DType::kFloat64 : DType::kFloat32, &params.grad_bias);
    if (is_by_distance(args.bias, forward)) view_by_distance(grads[kBias], forward.seqlen_q, &params.grad_bias);
  }
  for (int i : {kAlibiSlopes, kSinks}) {
    if (wants(i)) grads[i] = empty_contiguous(names[i], real, args.query.device, 1, &forward.num_heads);
  }
  params.grad_alibi_slopes = grads[kAlibiSlopes].data;
  params.grad_sinks = grads[kSinks].data;
  finish_batch(backend, scores, &batch_dims, &args, &forward);

  if (has_rows(forward) && forward.seqlen_kv != 0) {
    backend.attention_bwd(params);
    const Tensor* const tables[] = {&args.query_table, &args.key_table};
    for (int i : {kQuery, kKey}) {
      if (*tables[i] && grads[i] && !Backend::kTurnsRows) rotate_rows(backend, grads[i], *tables[i], args.interleaved, true, grads[i]);
    }
  } else {
    clear_gradients(grads, kNumGradients);
    if (has_rows(forward) && grads[kSinks] && grad_lse) backend.grad_sinks_without_keys(params);
  }
  if (grads[kBias] && args.bias.dtype != real) {
    Tensor rounded = empty_contiguous(names[kBias], args.bias.dtype, args.bias.device, args.bias.rank, args.bias.sizes);
    if (aoti_torch_copy_(rounded.get(), grads[kBias].get(), 0)) fail("cannot round grad_bias to ", DTypeName{args.bias.dtype});
    grads[kBias] = std::move(rounded);
  }
  release_gradients(grads, inputs, kNumGradients, real, args.query.device, stack);
}

#ifdef TILED_ATTENTION_BACKEND_CPU
// (). lse is float64: parts are joined without rounding it.
void attention_fwd_add(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionArguments args = take_attention_arguments(&arguments);
  Tensor out = arguments.tensor("out");
  Tensor lse = arguments.tensor("lse");
  Tensor residual = arguments.tensor("residual");
  const Backend backend("_attention_fwd_add_", arguments.device());

  AttentionParams params;
  BatchDims batch_dims;
  const ScoreShape scores = check_attention(&args, &params, &batch_dims);
  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  check_results(args.query, &out, &residual, &params, add);
  read(&lse);
  if (!lse.is_contiguous()) fail("lse must be contiguous");
  params.lse = check_lse(&lse, codes.float64, scores.sizes, scores.rank - 1);
  finish_batch(backend, scores, &batch_dims, &args, &params);
  if (has_rows(params) && params.seqlen_kv != 0) backend.attention_fwd_add(params);
}

// ()
void attention_bwd_add(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor grad_out = arguments.tensor("grad_out");
  Tensor grad_lse = arguments.optional_tensor("grad_lse");
  AttentionArguments args = take_attention_arguments(&arguments);
  Tensor out = arguments.tensor("out");
  Tensor lse = arguments.tensor("lse");
  Tensor residual = arguments.tensor("residual");
  Tensor grads[] = {arguments.optional_tensor("grad_query"), arguments.optional_tensor("grad_key"), arguments.optional_tensor("grad_value"),
                    arguments.optional_tensor("grad_alibi_slopes")};
  const Backend backend("_attention_bwd_add_", arguments.device());

  AttentionBackwardParams params;
  AttentionParams& forward = params.forward;
  BatchDims batch_dims;
  const ScoreShape scores = check_attention(&args, &forward, &batch_dims);
  const auto add = [&](const Tensor& tensor, DType type, TensorView* view) { batch_dims.add(tensor, type, view); };
  check_backward(args.query, &grad_out, &grad_lse, &out, &lse, &residual, scores.sizes, scores.rank - 1, &params, add);
  const Tensor* const inputs[] = {&args.query, &args.key, &args.value};
  TensorView* const views[] = {&params.grad_query, &params.grad_key, &params.grad_value};
  for (int i = 0; i < 3; ++i) {
    if (!grads[i]) continue;
    read(&grads[i]);
    check_dtype(grads[i], args.query.dtype);
    check_shape(grads[i], inputs[i]->sizes, inputs[i]->rank);
    add(grads[i], forward.dtype, views[i]);
  }
  if (grads[3]) {
    check_array(&grads[3], real_dtype(args.query.dtype), forward.num_heads);
    params.grad_alibi_slopes = grads[3].data;
  }
  finish_batch(backend, scores, &batch_dims, &args, &forward);
  if (has_rows(forward) && forward.seqlen_kv != 0) backend.attention_bwd_add(params);
}
#endif

// Real (..., num_heads or 1, num_rows, seqlen_kv)
void attention_weights(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  AttentionArguments args;
  args.query = arguments.tensor("query");
  args.key = arguments.tensor("key");
  args.mask = arguments.optional_tensor("mask");
  args.bias = arguments.optional_tensor("bias");
  args.alibi_slopes = arguments.optional_tensor("alibi_slopes");
  args.key_lengths = arguments.optional_tensor("key_lengths");
  args.documents = arguments.optional_tensor("documents");
  args.query_offset = arguments.optional_tensor("query_offset");
  args.dropout_seed = arguments.optional_tensor("dropout_seed");
  args.block_rows = arguments.optional_tensor("block_rows");
  args.block_tiles = arguments.optional_tensor("block_tiles");
  args.block_bits = arguments.optional_tensor("block_bits");
  args.query_table = arguments.optional_tensor("query_table");
  args.key_table = arguments.optional_tensor("key_table");
  args.scale = arguments.scalar<double>();
  args.softcap = arguments.scalar<double>();
  args.dropout_p = arguments.scalar<double>();
  args.intervals = arguments.ints();
  args.dropout_offsets = arguments.ints();
  args.allow_tf32 = arguments.scalar<bool>();
  args.interleaved = arguments.scalar<bool>();
  Tensor lse = arguments.tensor("lse");
  Tensor rows = arguments.optional_tensor("rows");
  const bool average = arguments.scalar<bool>();
  const Backend backend("attention_weights", arguments.device());

  AttentionWeightsParams params;
  AttentionParams& forward = params.forward;
  BatchDims batch_dims;
  ScoreShape scores = check_attention(&args, &forward, &batch_dims);
  const int32_t real = real_dtype(args.query.dtype);
  forward.lse = check_lse(&lse, real, scores.sizes, scores.rank - 1);
  params.average = average;
  params.num_rows = forward.seqlen_q;
  if (rows) {
    check_rows(&rows, forward.seqlen_q);
    params.num_rows = rows.size(0);
    params.rows = static_cast<const int64_t*>(rows.data);
  }
  int64_t sizes[kMaxRank];
  std::memcpy(sizes, scores.sizes, sizeof(sizes));
  if (average) sizes[scores.rank - 3] = 1;
  sizes[scores.rank - 2] = params.num_rows;
  Tensor weights = empty_contiguous("weights", real, args.query.device, scores.rank, sizes);
  batch_dims.add(weights, real == codes.float64 ? DType::kFloat64 : DType::kFloat32, &params.weights);
  finish_batch(backend, scores, &batch_dims, &args, &forward);
  if (has_rows(forward) && params.num_rows != 0 && forward.seqlen_kv != 0) {
    backend.attention_weights(params);
  } else {
    // Only a mean over no heads has elements here.
    fill_bytes(weights, 0xff);
  }
  stack[0] = weights.release();
}

// bool (batch, num_heads, seqlen_q, seqlen_kv), True = kept
void dropout_mask(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor seed = arguments.tensor("seed");
  const double dropout_p = arguments.scalar<double>();
  int64_t sizes[4];
  for (int64_t& size : sizes) size = arguments.scalar<int64_t>();
  const IntList offsets = arguments.ints();
  const Backend backend("dropout_mask", arguments.device());

  DropoutParams params;
  check_dropout(dropout_p, &seed, offsets, &params);
  check_batch_size("batch", sizes[0]);
  check_batch_size("num_heads", sizes[1]);
  check_length("seqlen_q", sizes[2]);
  check_length("seqlen_kv", sizes[3]);
  Tensor keep = empty_contiguous("the dropout mask", codes.boolean, seed.device, 4, sizes);
  if (keep.numel() != 0) backend.dropout_mask(params, sizes, keep.data);
  stack[0] = keep.release();
}

// bool (..., num_rows, seqlen_kv): what a block list shows some rows, (...) those of block_rows.
void blocks_dense(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor block_rows = arguments.tensor("block_rows");
  Tensor block_tiles = arguments.tensor("block_tiles");
  Tensor block_bits = arguments.tensor("block_bits");
  Tensor rows = arguments.tensor("rows");
  const int64_t seqlen_q = arguments.scalar<int64_t>(), seqlen_kv = arguments.scalar<int64_t>();
  const Backend backend("_blocks_dense", arguments.device());

  check_length("seqlen_q", seqlen_q);
  check_length("seqlen_kv", seqlen_kv);
  read(&block_rows);
  // The leading dimensions as one of heads.
  make_contiguous(&block_rows);
  if (block_rows.rank < 2) fail("block_rows must have shape (..., tiles of queries, 2), got ", block_rows.shape());
  int64_t sizes[kMaxRank], lists = 1;
  for (int64_t i = 0; i < block_rows.rank - 2; ++i) lists *= sizes[i] = block_rows.size(i);
  sizes[block_rows.rank - 2] = seqlen_q, sizes[block_rows.rank - 1] = seqlen_kv;
  AttentionParams params;
  BatchDims batch_dims;
  check_blocks(&block_rows, &block_tiles, &block_bits, sizes, block_rows.rank, &params, &batch_dims);
  params.blocks.rows.head_stride = (seqlen_q + kListTile - 1) / kListTile * 2;
  params.num_heads = lists, params.seqlen_q = seqlen_q, params.seqlen_kv = seqlen_kv;
  check_rows(&rows, seqlen_q);
  sizes[block_rows.rank - 2] = rows.size(0);
  Tensor visible = empty_contiguous("the mask", codes.boolean, block_rows.device, block_rows.rank, sizes);
  if (visible.numel() != 0) backend.blocks_dense(params, static_cast<const int64_t*>(rows.data), rows.size(0), static_cast<bool*>(visible.data));
  stack[0] = visible.release();
}

// bool (batch, seqlen_q, seqlen_kv)
void mask_dense(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const IntList intervals = arguments.ints();
  Tensor key_lengths = arguments.optional_tensor("key_lengths");
  Tensor documents = arguments.optional_tensor("documents");
  Tensor query_offset = arguments.optional_tensor("query_offset");
  int64_t sizes[3];
  for (int64_t& size : sizes) size = arguments.scalar<int64_t>();
  // Where no argument is a tensor, on the first device.
  const int32_t device = arguments.device() < 0 ? 0 : arguments.device();
  const Backend backend("_mask_dense", device);

  MaskParams params;
  check_batch_size("batch", sizes[0]);
  check_length("seqlen_q", sizes[1]);
  check_length("seqlen_kv", sizes[2]);
  check_intervals(intervals, &params);
  check_mask_arrays(&key_lengths, &query_offset, &documents, sizes[0], &params);
  Tensor visible = empty_contiguous("the mask", codes.boolean, device, 3, sizes);
  if (visible.numel() != 0) backend.mask_dense(params, sizes, visible.data);
  stack[0] = visible.release();
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) {
  m.impl("attention_fwd", &tiled_attention::attention_fwd);
  m.impl("attention", &tiled_attention::attention_fwd);
  m.impl("attention_bwd", &tiled_attention::attention_bwd);
  m.impl("attention_weights", &tiled_attention::attention_weights);
  m.impl("dropout_mask", &tiled_attention::dropout_mask);
  m.impl("_blocks_dense", &tiled_attention::blocks_dense);
#ifdef TILED_ATTENTION_BACKEND_CPU
  m.impl("_attention_fwd_add_", &tiled_attention::attention_fwd_add);
  m.impl("_attention_bwd_add_", &tiled_attention::attention_bwd_add);
#endif
}

// No argument need be a tensor: on the CPU no backend key may be there to choose by.
STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY_WITHOUT_TENSORS, m) { m.impl("_mask_dense", &tiled_attention::mask_dense); }
