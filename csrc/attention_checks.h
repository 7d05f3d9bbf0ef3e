#pragma once
// What the operators with a softmax check and allocate alike: the shape of their scores, lse, results, and what the backward gets and returns.

#include "checks.h"

namespace tiled_attention {

// (..., num_heads, seqlen_q, seqlen_kv)
struct ScoreShape {
  int64_t rank = 0;
  int64_t sizes[kMaxRank];

  ScoreShape(const Tensor& query, int64_t seqlen_kv) : rank(query.rank) {
    std::memcpy(sizes, query.sizes, static_cast<size_t>(rank - 1) * sizeof(int64_t));
    sizes[rank - 1] = seqlen_kv;
  }
  int64_t leading() const { return rank - 3; }
};

inline bool has_rows(const AttentionParams& params) { return params.batch != 0 && params.num_heads != 0 && params.seqlen_q != 0; }

inline void check_bool_mask(Tensor* mask, const ScoreShape& scores, AttentionParams* params, BatchDims* batch_dims) {
  if (!*mask) return;
  read(mask);
  check_dtype(*mask, codes.boolean);
  check_broadcastable(*mask, scores.sizes, scores.rank);
  batch_dims->add(*mask, DType::kFloat32, &params->bool_mask);
}

inline void check_scale_and_softcap(double scale, double softcap, AttentionParams* params) {
  check_finite("scale", scale);
  check_finite("softcap", softcap);
  if (softcap < 0) fail("softcap must be positive, or 0 for none, got ", softcap);
  params->scale = scale, params->softcap = softcap;
}

// lse or its gradient: Real, made contiguous.
inline void* check_lse(Tensor* lse, int32_t real, const int64_t* sizes, int64_t rank) {
  read(lse);
  check_dtype(*lse, real);
  check_shape(*lse, sizes, rank);
  make_contiguous(lse);
  return lse->data;
}

// What a forward operator returns, allocated. add(tensor, dtype, view) makes a view of a tensor.
struct ForwardResults {
  Tensor out, lse, residual;

  template <class Add>
  ForwardResults(const Tensor& query, const int64_t* lse_sizes, int64_t lse_rank, bool with_residual, AttentionParams* params, const Add& add) {
    const int32_t dtype = query.dtype;
    out = empty_in_order_of(query, "out", dtype, params->head_dim_v);
    lse = empty_contiguous("lse", real_dtype(dtype), query.device, lse_rank, lse_sizes);
    const bool keeps_residual = with_residual && is_16_bit(dtype);
    residual = keeps_residual ? empty_in_order_of(query, "residual", dtype, params->head_dim_v) : empty_nothing(dtype, query.device);
    add(out, params->dtype, &params->out);
    if (keeps_residual) add(residual, params->dtype, &params->residual);
    params->lse = lse.data;
  }
  void release(StableIValue* stack) {
    stack[0] = out.release();
    stack[1] = lse.release();
    stack[2] = residual.release();
  }
};

// Bit i of `wanted`: the i-th gradient is asked for.
inline void check_wanted(int64_t wanted, int count) {
  if (wanted < 0 || wanted >> count) fail("gradients must be in [0, ", 1 << count, "), got ", wanted);
}

// Results of the forward as arguments: views by add(tensor, dtype, view).
template <class Add>
void check_results(const Tensor& query, Tensor* out, Tensor* residual, AttentionParams* forward, const Add& add) {
  read(out);
  check_like(*out, query, forward->head_dim_v);
  add(*out, forward->dtype, &forward->out);
  read(residual);
  if (residual->rank != 1 || residual->size(0) != 0) {
    check_like(*residual, query, forward->head_dim_v);
    if (!is_16_bit(query.dtype)) fail("residual must have shape (0,) beside a query of ", DTypeName{query.dtype}, ", got ", residual->shape());
    add(*residual, forward->dtype, &forward->residual);
  }
}

// What a backward operator gets beside the arguments of the forward: views by add(tensor, dtype, view), and lse.
template <class Add>
void check_backward(const Tensor& query, Tensor* grad_out, Tensor* grad_lse, Tensor* out, Tensor* lse, Tensor* residual, const int64_t* lse_sizes,
                    int64_t lse_rank, AttentionBackwardParams* params, const Add& add) {
  AttentionParams& forward = params->forward;
  read(grad_out);
  check_like(*grad_out, query, forward.head_dim_v);
  add(*grad_out, forward.dtype, &params->grad_out);
  check_results(query, out, residual, &forward, add);
  const int32_t real = real_dtype(query.dtype);
  forward.lse = check_lse(lse, real, lse_sizes, lse_rank);
  if (*grad_lse) params->grad_lse = check_lse(grad_lse, real, lse_sizes, lse_rank);
}

// The gradients of query, key and value that bits 0 to 2 of `wanted` ask for, allocated and viewed.
template <class Add>
void allocate_input_gradients(const Tensor* const* inputs, const char* const* names, int64_t wanted, Tensor* grads, AttentionBackwardParams* params,
                              const Add& add) {
  TensorView* const views[] = {&params->grad_query, &params->grad_key, &params->grad_value};
  for (int i = 0; i < 3; ++i) {
    if (!(wanted >> i & 1)) continue;
    grads[i] = empty_in_order_of(*inputs[i], names[i], inputs[i]->dtype, inputs[i]->size(-1));
    add(grads[i], params->forward.dtype, views[i]);
  }
}

inline void clear_gradients(const Tensor* grads, int count) {
  for (int i = 0; i < count; ++i) {
    if (grads[i]) fill_bytes(grads[i], 0);
  }
}

// To the stack; shape (0,), of the dtype of the input or of `real` without one, for what was not asked for.
inline void release_gradients(Tensor* grads, const Tensor* const* inputs, int count, int32_t real, int32_t device, StableIValue* stack) {
  for (int i = 0; i < count; ++i) {
    if (!grads[i]) grads[i] = empty_nothing(*inputs[i] ? inputs[i]->dtype : real, device);
    stack[i] = grads[i].release();
  }
}

}  // namespace tiled_attention
