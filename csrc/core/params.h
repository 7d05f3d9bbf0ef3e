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

// What of the pairs a block list shows (block_list.h), beside MaskParams and bool masks.
constexpr int kListTile = 64;  // queries and keys of a tile
struct ListedTile {
  int32_t keys, bits;  // which tile of keys; where in BlockListParams::bits, negative: all of it is visible
};
struct BlockListParams {
  TensorView rows;                    // int32 (batch..., num_heads, tiles of queries, 2): [begin, end) in `tiles`; absent: no list
  const ListedTile* tiles = nullptr;  // increasing tiles of keys in each range
  const uint64_t* bits = nullptr;     // [partial tiles][kListTile]
  int64_t num_tiles = 0, num_bits = 0;  // entries, partial tiles
};

// Philox counters are absolute: a shard, a piece or a decode step adds where it starts.
struct DropoutParams {
  double p = 0;  // in [0, 1]
  const int64_t* seed = nullptr;  // read by the kernel; not null when p > 0
  int64_t batch_offset = 0, head_offset = 0, query_offset = 0, key_offset = 0;
};

// "Real" below is double for kFloat64 and float otherwise.

// Rotary positions: the pairs (a, b) of a row's first `rotary_dim` columns become (a cos - b sin, b cos + a sin); the other columns stay. Pair k
// is columns k and k + rotary_dim / 2, or 2 k and 2 k + 1 where interleaved. Tables hold a row per row: Real, adjacent columns, rotary_dim / 2 of
// cos, then as many of sin; they may broadcast along all but the columns.
struct RotaryParams {
  TensorView query_table, key_table;  // for rows of query and of key; may be absent: those rows stay as they are
  int64_t rotary_dim = 0;
  bool interleaved = false;
};

struct AttentionParams {
  DType dtype = DType::kFloat32;
  int num_batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};  // their product is `batch`
  int64_t batch = 1, num_heads = 0, num_heads_kv = 0, seqlen_q = 0, seqlen_kv = 0, head_dim = 0, head_dim_v = 0;
  // Packed sequences: item b is the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of query and of what is like it, and as much of key and value by
  // cu_seqlens_kv; no batch dimensions, and seqlen_q and seqlen_kv are the most that an item may have. Null: not packed. See core/packed.h.
  const int64_t *cu_seqlens_q = nullptr, *cu_seqlens_kv = nullptr;  // [batch + 1]
  int64_t total_q = 0, total_kv = 0;                                // rows of query, and of key
  int64_t lse_head_stride = 0;  // of lse and what is laid out like it, [num_heads][total_q]; 0: not packed
  double scale = 1;    // multiplies q . k
  double softcap = 0;  // 0: none
  bool allow_tf32 = false;  // float32 on CUDA: products from operands rounded to tf32
  MaskParams mask;
  DropoutParams dropout;
  TensorView query, key, value;
  RotaryParams rotary;  // turns query and key before their product; only the CPU's exact attention does it
  BlockListParams blocks;
  TensorView bool_mask;        // bytes, 0 = masked; broadcast dimensions have stride 0; may be absent
  TensorView bias;             // Real, kBFloat16 or kFloat16; may be absent. By distance (is_by_distance): data is where i = j = 0 lies
  const void* alibi_slopes = nullptr;  // Real [num_heads], may be null
  const void* sinks = nullptr;         // Real [num_heads], may be null
  TensorView out;              // dtype
  TensorView residual;         // dtype 16 bit only: what rounding took from out; may be absent
  void* lse = nullptr;         // Real [batch][num_heads][seqlen_q] or by lse_head_stride, natural log; may be null in forward
};

struct AttentionBackwardParams {
  AttentionParams forward;          // out, residual and lse are inputs here
  TensorView grad_out;              // dtype
  const void* grad_lse = nullptr;   // Real, laid out like lse; may be null
  TensorView grad_query, grad_key, grad_value;  // dtype; absent ones are not computed. By rows before `rotary` turned them
  TensorView grad_bias;             // Real, contiguous, summed over what it broadcasts along (strides 0) or is the same at; may be absent
  void *grad_alibi_slopes = nullptr, *grad_sinks = nullptr;  // Real [num_heads], may be null
  int64_t plan_heads = 0;  // KV heads of the call that this one is a part of, which decide how queries are cut; 0: all of its own
};

// Weights of chosen rows, computed again from lse.
struct AttentionWeightsParams {
  AttentionParams forward;        // value, out and residual are not used; dropout and lse are
  const int64_t* rows = nullptr;  // [num_rows] in [0, seqlen_q), null: all rows in order
  int64_t num_rows = 0;
  bool average = false;  // mean over heads: weights is (batch..., 1, num_rows, seqlen_kv)
  TensorView weights;    // Real
};

// Additive attention: the score is score_weight . tanh(q + k), with the masks and the dropout of exact attention (scale is 1, softcap 0, no bias,
// no slopes, no sinks).
struct AdditiveAttentionParams {
  AttentionParams attention;
  const void* score_weight = nullptr;  // Real [head_dim], or [num_heads][head_dim]
  int64_t weight_head_stride = 0;      // 0: all heads share one
};

struct AdditiveAttentionBackwardParams {
  AttentionBackwardParams attention;
  const void* score_weight = nullptr;
  int64_t weight_head_stride = 0;
  void* grad_score_weight = nullptr;  // Real, laid out like score_weight; may be null
};

struct AdditiveAttentionWeightsParams {
  AttentionWeightsParams attention;
  const void* score_weight = nullptr;
  int64_t weight_head_stride = 0;
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
  // Packed: batch is 1, seqlen_q and seqlen_kv are the total, and states are [num_sequences][num_heads_kv].. Sequence b holds the rows from
  // cu_seqlens[b] to cu_seqlens[b + 1] and is a call of its own.
  const int64_t* cu_seqlens = nullptr;  // [num_sequences + 1], null: not packed
  int64_t num_sequences = 0;
};

// Rows turned as RotaryParams says.
struct RotateParams {
  DType dtype = DType::kFloat32;
  bool interleaved = false;
  bool transposed = false;  // by -sin: what carries gradients back
  int num_batch_dims = 0;
  int64_t batch_sizes[kMaxBatchDims] = {};
  int64_t batch = 1, num_heads = 0, seqlen = 0, head_dim = 0, rotary_dim = 0;
  TensorView rows, out;  // dtype, (batch..., num_heads, seqlen, head_dim)
  TensorView table;      // Real, as in RotaryParams
};

struct LinearAttentionBackwardParams {
  LinearAttentionParams forward;  // out and the final state are not read
  TensorView grad_out;            // dtype
  const void *grad_final_kv = nullptr, *grad_final_k_sum = nullptr;  // like the state; may be null
  TensorView grad_query, grad_key, grad_value;                       // dtype
  TensorView grad_log_decay;                                         // Real, like log_decay; may be absent
  void *grad_initial_kv = nullptr, *grad_initial_k_sum = nullptr;    // like the state; may be null
  int calls = 1;  // on the CPU: how many calls like this one keep their states at a time
};

// A key-value cache. Key j of a batch item stands in its slot j, or where the cache is a ring, from slot `pinned` on, in turns.
struct CacheParams {
  int64_t slots = 0;                     // of a batch item: the capacity, or table_pages * page_size
  int64_t pinned = -1;                   // a ring that never overwrites the first `pinned` keys, < slots; -1: no ring
  const int32_t* page_table = nullptr;   // [batch][table_pages] in [0, num_pages), null: one run of slots per batch item
  int64_t table_pages = 0, num_pages = 0, page_size = 0;
  const void* cache_seqlens = nullptr;   // int64 or int32 [batch]: keys before the `num_new` last ones
  bool seqlens_are_64_bit = true;
  int64_t num_new = 0;
};

// Few queries over the keys of a cache: query row i of batch item b stands at position length_b - seqlen_q + i.
struct AttentionDecodeParams {
  AttentionParams attention;  // key and value: the cache, one batch dimension, which counts pages where there is a page table; seqlen_kv: slots
  CacheParams cache;
};

// Writes the last `num_new` keys and values to their slots.
struct CacheAppendParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0, num_heads_kv = 0, head_dim = 0, head_dim_v = 0;
  CacheParams cache;
  TensorView key, value;          // the cache
  TensorView new_key, new_value;  // (batch, num_heads_kv, num_new, head_dim or head_dim_v)
};

}  // namespace tiled_attention
