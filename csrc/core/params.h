#pragma once
// What an operator hands to a kernel: plain data, filled by name, the same for every device and instruction set.

#include <stddef.h>
#include <stdint.h>

namespace tiled_attention {

enum class DType : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

// Larger than any position, small enough that a sum of a few of them stays inside int64.
constexpr int64_t kUnbounded = int64_t(1) << 40;
constexpr int kMaxBatchDims = 8;

// A (batch..., num_heads, rows, cols) tensor where it lies. Strides count elements and are 0 along broadcast dimensions.
struct TensorView {
  void* data = nullptr;  // nullptr: absent
  DType dtype = DType::kFloat32;
  int64_t batch_strides[kMaxBatchDims] = {};
  int64_t head_stride = 0, row_stride = 0, col_stride = 0;
};

// Which keys a query sees, apart from bool masks. Query row i stands at position p = i + query_offset.
//   band A:  p - window_left <= j <= p + window_right, or j < num_sinks
//   and      p - limit_left <= j <= p + limit_right
//   and      j < max(prefix, p + 1)                       unless prefix < 0
//   and      floor(j / chunk) == floor(p / chunk), p >= 0  unless chunk == 0
//   and      j <= i                                        if top_left
//   and      j < min(key_end, key_lengths[b])
//   and      p and j in the same segment of `documents`    unless null
struct MaskParams {
  int64_t query_offset = kUnbounded;  // kUnbounded: seqlen_kv - seqlen_q, the bottom-right alignment
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  int64_t limit_left = kUnbounded, limit_right = kUnbounded;
  int64_t prefix = -1, chunk = 0, key_end = kUnbounded, num_sinks = 0;
  bool top_left = false;
  const int64_t* key_lengths = nullptr;    // [batch], may be null
  const int64_t* query_offsets = nullptr;  // [batch], replaces query_offset, may be null
  const int64_t* documents = nullptr;      // [num_documents + 1] increasing boundaries, may be null
  int64_t num_documents = 0;
};

// Philox counters are absolute: a shard, a piece or a decode step adds where it starts.
struct DropoutParams {
  double p = 0;  // in [0, 1]
  const int64_t* seed = nullptr;  // read by the kernel; not null when p > 0
  int64_t batch_offset = 0, head_offset = 0, query_offset = 0, key_offset = 0;
};

// "Real" below is double for kFloat64 and float otherwise.
struct AttentionParams {
  DType dtype = DType::kFloat32;
  int num_batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};  // their product is `batch`
  int64_t batch = 1, num_heads = 0, num_heads_kv = 0, seqlen_q = 0, seqlen_kv = 0, head_dim = 0, head_dim_v = 0;
  double scale = 1;    // multiplies q . k
  double softcap = 0;  // 0: none
  bool allow_tf32 = false;  // float32 on CUDA: products from operands rounded to tf32
  MaskParams mask;
  DropoutParams dropout;
  TensorView query, key, value;
  TensorView bool_mask;        // bytes, 0 = masked; broadcast dimensions have stride 0; may be absent
  TensorView bias;             // Real, kBFloat16 or kFloat16; may be absent. By distance (is_by_distance): data is where i = j = 0 lies
  const void* alibi_slopes = nullptr;  // Real [num_heads], may be null
  const void* sinks = nullptr;         // Real [num_heads], may be null
  TensorView out;              // dtype
  TensorView residual;         // dtype 16 bit only: what rounding took from out; may be absent
  void* lse = nullptr;         // Real [batch][num_heads][seqlen_q], natural log; may be null in forward
};

struct AttentionBackwardParams {
  AttentionParams forward;          // out, residual and lse are inputs here
  TensorView grad_out;              // dtype
  const void* grad_lse = nullptr;   // Real, laid out like lse; may be null
  TensorView grad_query, grad_key, grad_value;  // dtype; absent ones are not computed
  TensorView grad_bias;             // Real, contiguous, summed over what it broadcasts along (strides 0) or is the same at; may be absent
  void *grad_alibi_slopes = nullptr, *grad_sinks = nullptr;  // Real [num_heads], may be null
};

// Weights of chosen rows, computed again from lse.
struct AttentionWeightsParams {
  AttentionParams forward;        // value, out and residual are not used; dropout and lse are
  const int64_t* rows = nullptr;  // [num_rows] in [0, seqlen_q), null: all rows in order
  int64_t num_rows = 0;
  bool average = false;  // mean over heads: weights is (batch..., 1, num_rows, seqlen_kv)
  TensorView weights;    // Real
};

// What a linear attention feature map does to each element.
enum class FeatureMap : int32_t { kIdentity, kEluPlusOne, kRelu, kExp };

// With a = query_map(query), b = key_map(key) and, per token or per feature, g = log_decay:
//   S_t = exp(g_t) S_(t-1) + b_t v_t^T     z_t = exp(g_t) z_(t-1) + b_t     out_t = a_t S_t / (a_t . z_t)
struct LinearAttentionParams {
  DType dtype = DType::kFloat32;
  FeatureMap query_map = FeatureMap::kEluPlusOne, key_map = FeatureMap::kEluPlusOne;
  bool causal = false;     // otherwise every query reads the last state; causal: seqlen_q == seqlen_kv
  bool normalize = true;   // otherwise out_t = scale a_t S_t
  double scale = 1;
  int num_batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};
  int64_t batch = 1, num_heads = 0, num_heads_kv = 0, seqlen_q = 0, seqlen_kv = 0, head_dim = 0, head_dim_v = 0;
  TensorView query, key, value, out;  // dtype
  TensorView key_mask;                // bytes, 0 = the key counts in neither sum; keys along the columns; may be absent
  TensorView log_decay;               // Real, <= 0, one column or head_dim columns; may be absent; causal only
  bool decay_per_feature = false;
  // Real, contiguous [batch][num_heads_kv][head_dim][head_dim_v] and [..][head_dim]. Initial: both null are zeros.
  const void *initial_kv = nullptr, *initial_k_sum = nullptr;
  void *final_kv = nullptr, *final_k_sum = nullptr;  // may be null in backward
};

// Rotary positions: the pairs (a, b) of a row's first `rotary_dim` columns become (a cos - b sin, b cos + a sin); the other columns are
// copied. Pair k is columns k and k + rotary_dim / 2, or 2 k and 2 k + 1 where interleaved.
struct RotateParams {
  DType dtype = DType::kFloat32;
  bool interleaved = false;
  bool transposed = false;  // by -sin: what carries gradients back
  int num_batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};
  int64_t batch = 1, num_heads = 0, seqlen = 0, head_dim = 0, rotary_dim = 0;
  TensorView rows, out;  // dtype, (batch..., num_heads, seqlen, head_dim)
  TensorView table;      // Real, adjacent columns: rotary_dim / 2 of cos, then as many of sin; may broadcast along all but them
};

struct LinearAttentionBackwardParams {
  LinearAttentionParams forward;  // out and the final state are not read
  TensorView grad_out;            // dtype
  const void *grad_final_kv = nullptr, *grad_final_k_sum = nullptr;  // like the state; may be null
  TensorView grad_query, grad_key, grad_value;                       // dtype
  TensorView grad_log_decay;                                         // Real, like log_decay; may be absent
  void *grad_initial_kv = nullptr, *grad_initial_k_sum = nullptr;    // like the state; may be null
};

}  // namespace tiled_attention
