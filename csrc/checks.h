#pragma once
// The checks that operators share. Each names the argument, what was expected and what came; what passes is safe to read
// by strides and offsets alone.

#include <cmath>

#include "core/block_list.h"
#include "core/params.h"
#include "tensor.h"

namespace tiled_attention {

// Leaves room above every position for a tile that ends beyond it.
constexpr int64_t kMaxLength = (int64_t(1) << 31) - (int64_t(1) << 12);
// A tile of rows of this size has fewer than 2^31 elements.
constexpr int64_t kMaxHeadDim = int64_t(1) << 20;

// dtype as Python writes it, for messages.
struct DTypeName {
  int32_t code;
  friend std::ostream& operator<<(std::ostream& stream, const DTypeName& dtype) {
    const std::pair<int32_t, const char*> names[] = {
        {codes.float32, "float32"},
        {codes.float64, "float64"},
        {codes.bfloat16, "bfloat16"},
        {codes.float16, "float16"},
        {codes.int64, "int64"},
        {codes.int32, "int32"},
        {codes.boolean, "bool"},
        {codes.uint8, "uint8"},
        {aoti_torch_dtype_int8(), "int8"},
        {aoti_torch_dtype_int16(), "int16"},
        {aoti_torch_dtype_int32(), "int32"},
        {aoti_torch_dtype_complex64(), "complex64"},
        {aoti_torch_dtype_complex128(), "complex128"},
    };
    for (const auto& [code, name] : names) {
      if (code == dtype.code) return stream << name;
    }
    return stream << "torch dtype number " << dtype.code;
  }
};

// Dtype of scores, lse and accumulators.
inline int32_t real_dtype(int32_t dtype) { return dtype == codes.float64 ? codes.float64 : codes.float32; }
inline bool is_16_bit(int32_t dtype) { return dtype == codes.bfloat16 || dtype == codes.float16; }

inline DType dtype_of(const Tensor& tensor) {
  if (tensor.dtype == codes.float32) return DType::kFloat32;
  if (tensor.dtype == codes.bfloat16) return DType::kBFloat16;
  if (tensor.dtype == codes.float16) return DType::kFloat16;
  if (tensor.dtype == codes.float64) return DType::kFloat64;
  fail(tensor.name, " must be float32, float64, bfloat16 or float16, got ", DTypeName{tensor.dtype});
}

inline void check_dtype(const Tensor& tensor, int32_t expected) {
  if (tensor.dtype != expected) fail(tensor.name, " must be ", DTypeName{expected}, ", got ", DTypeName{tensor.dtype});
}

inline void check_same_dtype(const Tensor& tensor, const Tensor& query) {
  if (tensor.dtype == query.dtype) return;
  fail(tensor.name, " must have the dtype of query (", DTypeName{query.dtype}, "), got ", DTypeName{tensor.dtype});
}

inline void check_shape(const Tensor& tensor, const int64_t* expected, int64_t rank) {
  bool same = tensor.rank == rank;
  for (int64_t i = 0; same && i < rank; ++i) same = tensor.sizes[i] == expected[i];
  if (!same) fail(tensor.name, " must have shape ", Shape{expected, rank}, ", got ", tensor.shape());
}

inline void check_finite(const char* name, double value) {
  if (!std::isfinite(value)) fail(name, " must be finite, got ", value);
}

// Reads a one-dimensional argument of `count` elements, if it is given, and returns where they lie one after the other.
inline const void* check_array(Tensor* tensor, int32_t dtype, int64_t count) {
  if (!*tensor) return nullptr;
  read(tensor);
  check_dtype(*tensor, dtype);
  check_shape(*tensor, &count, 1);
  make_contiguous(tensor);
  return tensor->data;
}

// int64 (num_sequences + 1,), 0 at the start, never less than before, `total` at the end. On CUDA values are not read: kernels act as if they were
// limited to what they may be.
inline const int64_t* check_offsets(Tensor* offsets, int64_t total, const char* total_name) {
  read(offsets);
  check_dtype(*offsets, codes.int64);
  if (offsets->rank != 1 || offsets->size(0) < 1) fail(offsets->name, " must have shape (num_sequences + 1,), got ", offsets->shape());
  make_contiguous(offsets);
  const auto* values = static_cast<const int64_t*>(offsets->data);
  if (!device::kReadsValues) return values;
  const int64_t last = offsets->size(0) - 1;
  if (values[0] != 0) fail(offsets->name, " must start at 0, got ", values[0]);
  for (int64_t i = 0; i < last; ++i) {
    if (values[i + 1] < values[i]) fail(offsets->name, " must not decrease, got ", values[i], " before ", values[i + 1], " at ", i);
  }
  if (values[last] != total) fail(offsets->name, " must end at ", total_name, " (", total, "), got ", values[last]);
  return values;
}

// key or value: (..., num_heads_kv, seqlen_kv, any) with the leading dimensions of query.
inline void check_key_or_value(const Tensor& tensor, const Tensor& query) {
  check_same_dtype(tensor, query);
  bool fits = tensor.rank == query.rank;
  for (int64_t i = 0; fits && i < query.rank - 3; ++i) fits = tensor.size(i) == query.size(i);
  if (!fits) fail(tensor.name, " must have the leading dimensions of query, of shape ", query.shape(), ", got shape ", tensor.shape());
}

// Of the same dtype and shape as `like`, but for the last size.
inline void check_like(const Tensor& tensor, const Tensor& like, int64_t last_size) {
  check_same_dtype(tensor, like);
  int64_t expected[kMaxRank];
  std::memcpy(expected, like.sizes, static_cast<size_t>(like.rank) * sizeof(int64_t));
  expected[like.rank - 1] = last_size;
  check_shape(tensor, expected, like.rank);
}

// A tensor that broadcasts to `expected`, as a view whose batch strides are set by BatchDims.
inline void check_broadcastable(const Tensor& tensor, const int64_t* expected, int64_t rank) {
  bool fits = tensor.rank <= rank;
  for (int64_t i = 1; fits && i <= tensor.rank; ++i) fits = tensor.size(-i) == 1 || tensor.size(-i) == expected[rank - i];
  if (!fits) fail(tensor.name, " of shape ", tensor.shape(), " does not broadcast to ", Shape{expected, rank});
}

// 0 along the dimensions that `tensor` lacks or has with size 1.
inline int64_t broadcast_stride(const Tensor& tensor, int64_t from_end) {
  return from_end > tensor.rank || tensor.size(-from_end) == 1 ? 0 : tensor.stride(-from_end);
}

// Writes the batch dimensions of an operator's params: the leading dimensions of its tensors, those of size 1 dropped and
// neighbours merged as far as the strides of every tensor permit. The flattened batch index stays row-major.
class BatchDims {
 public:
  // `view` takes the memory and the strides of `tensor`, whose elements are of `dtype`; the batch strides by finish(). Of several tensors for one
  // view the last counts.
  void add(const Tensor& tensor, DType dtype, TensorView* view) {
    view->data = tensor.data;
    view->dtype = dtype;
    view->head_stride = broadcast_stride(tensor, 3);
    view->row_stride = broadcast_stride(tensor, 2);
    view->col_stride = broadcast_stride(tensor, 1);
    int at = 0;
    while (at < count_ && operands_[at].view != view) ++at;
    operands_[at] = {&tensor, view};
    if (at == count_) ++count_;
  }

  template <class Params>
  void finish(const int64_t* leading_sizes, int64_t leading, Params* params) const {
    int dims = 0;
    params->batch = 1;
    for (int64_t i = 0; i < leading; ++i) {
      const int64_t size = leading_sizes[i], from_end = leading - i + 3;
      if (__builtin_mul_overflow(params->batch, size, &params->batch)) fail("query has more than 2^63 batch items");
      if (size == 1) continue;
      bool merges = dims > 0;
      for (int o = 0; merges && o < count_; ++o) {
        merges = operands_[o].view->batch_strides[dims - 1] == broadcast_stride(*operands_[o].tensor, from_end) * size;
      }
      if (!merges && dims == kMaxBatchDims) {
        fail("the leading dimensions of the arguments merge into no fewer than ", kMaxBatchDims + 1, " strided ones, at most ", kMaxBatchDims,
             " are supported: pass contiguous tensors");
      }
      const int at = merges ? dims - 1 : dims++;
      params->batch_sizes[at] = merges ? params->batch_sizes[at] * size : size;
      for (int o = 0; o < count_; ++o) operands_[o].view->batch_strides[at] = broadcast_stride(*operands_[o].tensor, from_end);
    }
    params->num_batch_dims = dims;
  }

 private:
  struct Operand {
    const Tensor* tensor;
    TensorView* view;
  };
  static constexpr int kMaxOperands = 15;
  Operand operands_[kMaxOperands];
  int count_ = 0;
};

// The 10 numbers of an interval mask, each in its range so that no sum of a few overflows.
inline void check_intervals(const IntList& list, MaskParams* mask) {
  if (list.count == 0) return;
  if (list.count != 10) fail("intervals must have 0 or 10 numbers, got ", list.count);
  struct Field {
    const char* name;
    int64_t* value;
    int64_t low;
  };
  int64_t top_left = 0;
  const Field fields[10] = {
      {"query_offset", &mask->query_offset, -kUnbounded},
      {"window_left", &mask->window_left, -kUnbounded},
      {"window_right", &mask->window_right, -kUnbounded},
      {"limit_left", &mask->limit_left, -kUnbounded},
      {"limit_right", &mask->limit_right, -kUnbounded},
      {"prefix", &mask->prefix, -1},
      {"chunk", &mask->chunk, 0},
      {"key_end", &mask->key_end, -kUnbounded},
      {"num_sinks", &mask->num_sinks, 0},
      {"top_left", &top_left, 0},
  };
  for (int i = 0; i < 10; ++i) {
    const int64_t high = i == 9 ? 1 : kUnbounded;
    if (list.values[i] < fields[i].low || list.values[i] > high) {
      fail("intervals[", i, "] (", fields[i].name, ") must be in [", fields[i].low, ", ", high, "], got ", list.values[i]);
    }
    *fields[i].value = list.values[i];
  }
  mask->top_left = top_left != 0;
}

// The tensors of an interval mask: int64 (batch,), (batch,) and (num_documents + 1,).
inline void check_mask_arrays(Tensor* key_lengths, Tensor* query_offset, Tensor* documents, int64_t batch, MaskParams* mask) {
  mask->key_lengths = static_cast<const int64_t*>(check_array(key_lengths, codes.int64, batch));
  mask->query_offsets = static_cast<const int64_t*>(check_array(query_offset, codes.int64, batch));
  for (int64_t b = 0; device::kReadsValues && mask->query_offsets && b < batch; ++b) {
    const int64_t offset = mask->query_offsets[b];
    if (offset < -kUnbounded || offset > kUnbounded) fail("query_offset must be within 2^40 of 0, got ", offset, " at ", b);
  }
  if (!*documents) return;
  read(documents);
  check_dtype(*documents, codes.int64);
  if (documents->rank != 1 || documents->size(0) < 1) {
    fail("documents must have shape (num_documents + 1,), got ", documents->shape());
  }
  make_contiguous(documents);
  const int64_t* boundaries = mask->documents = static_cast<const int64_t*>(documents->data);
  mask->num_documents = documents->size(0) - 1;
  if (!device::kReadsValues) return;
  if (boundaries[0] < 0) fail("documents must start at 0 or above, got ", boundaries[0]);
  for (int64_t i = 0; i < mask->num_documents; ++i) {
    if (boundaries[i + 1] < boundaries[i]) {
      fail("documents must not decrease, got ", boundaries[i], " before ", boundaries[i + 1], " at ", i);
    }
  }
}

inline void check_dropout(double p, Tensor* seed, const IntList& offsets, DropoutParams* dropout) {
  if (!(p >= 0 && p <= 1)) fail("dropout_p must be in [0, 1], got ", p);
  dropout->p = p;
  if (*seed) {
    read(seed);
    check_dtype(*seed, codes.int64);
    check_shape(*seed, nullptr, 0);
    dropout->seed = static_cast<const int64_t*>(seed->data);
  } else if (p > 0) {
    fail("dropout_seed must be given when dropout_p > 0, got None");
  }
  if (offsets.count == 0) return;
  if (offsets.count != 4) fail("dropout_offsets must have 0 or 4 numbers (batch, head, query, key), got ", offsets.count);
  for (int i = 0; i < 4; ++i) {
    // What Philox counts has 32 bits.
    if (offsets.values[i] < 0 || offsets.values[i] >> 32) {
      fail("dropout_offsets[", i, "] must be in [0, 2^32), got ", offsets.values[i]);
    }
  }
  dropout->batch_offset = offsets.values[0], dropout->head_offset = offsets.values[1];
  dropout->query_offset = offsets.values[2], dropout->key_offset = offsets.values[3];
}

inline void check_length(const char* name, int64_t length) {
  if (length < 0 || length >= kMaxLength) fail(name, " must be in [0, ", kMaxLength, "), got ", length);
}

inline void check_head_dim(const char* name, int64_t head_dim) {
  if (head_dim > kMaxHeadDim) fail(name, " must be at most ", kMaxHeadDim, ", got ", head_dim);
}

// Chosen query rows: int64 (num_rows,) in [0, seqlen_q).
inline void check_rows(Tensor* rows, int64_t seqlen_q) {
  read(rows);
  check_dtype(*rows, codes.int64);
  if (rows->rank != 1) fail("rows must have shape (num_rows,), got ", rows->shape());
  make_contiguous(rows);
  check_length("the number of rows", rows->size(0));
  const int64_t* values = static_cast<const int64_t*>(rows->data);
  for (int64_t i = 0; device::kReadsValues && i < rows->size(0); ++i) {
    if (values[i] < 0 || values[i] >= seqlen_q) fail("rows must be in [0, seqlen_q = ", seqlen_q, "), got ", values[i], " at ", i);
  }
}

// A block list beside scores of `sizes`: int32 (..., tiles of queries, 2) that broadcasts to (batch..., num_heads, ., .), int32 (entries, 2) and
// int64 (partial tiles, kListTile). All or none.
inline void check_blocks(Tensor* rows, Tensor* tiles, Tensor* bits, const int64_t* sizes, int64_t rank, AttentionParams* params, BatchDims* batch_dims) {
  if (!*rows && !*tiles && !*bits) return;
  for (const Tensor* tensor : {rows, tiles, bits}) {
    if (!*tensor) fail("block_rows, block_tiles and block_bits must be given together, got only some of them");
  }
  for (Tensor* tensor : {rows, tiles, bits}) {
    read(tensor);
    check_dtype(*tensor, tensor == bits ? codes.int64 : codes.int32);
  }
  int64_t expected[kMaxRank];
  std::memcpy(expected, sizes, static_cast<size_t>(rank) * sizeof(int64_t));
  expected[rank - 2] = (sizes[rank - 2] + kListTile - 1) / kListTile, expected[rank - 1] = 2;
  check_broadcastable(*rows, expected, rank);
  if (rows->rank < 2 || rows->size(-1) != 2 || rows->size(-2) != expected[rank - 2]) {
    fail("block_rows must have shape (..., ", expected[rank - 2], ", 2), got ", rows->shape());
  }
  const int64_t entry[2] = {tiles->rank > 0 ? tiles->size(0) : 0, 2}, words[2] = {bits->rank > 0 ? bits->size(0) : 0, kListTile};
  check_shape(*tiles, entry, 2);
  check_shape(*bits, words, 2);
  make_contiguous(rows);
  make_contiguous(tiles);
  make_contiguous(bits);
  params->blocks.tiles = static_cast<const ListedTile*>(tiles->data);
  params->blocks.bits = static_cast<const uint64_t*>(bits->data);
  if (entry[0] > INT32_MAX || words[0] > INT32_MAX) fail("block_tiles and block_bits must have less than 2^31 rows, got ", entry[0], " and ", words[0]);
  params->blocks.num_tiles = entry[0], params->blocks.num_bits = words[0];
  const int32_t* range = static_cast<const int32_t*>(rows->data);
  const int64_t tiles_kv = (sizes[rank - 1] + kListTile - 1) / kListTile;
  for (int64_t i = 0; device::kReadsValues && i < rows->numel(); i += 2) {
    if (range[i] < 0 || range[i + 1] < range[i] || range[i + 1] > entry[0]) {
      fail("block_rows must hold ranges in [0, ", entry[0], "], got [", range[i], ", ", range[i + 1], ") at ", i / 2);
    }
    for (int64_t e = range[i]; e < range[i + 1]; ++e) {
      const ListedTile& tile = params->blocks.tiles[e];
      const int64_t least = e > range[i] ? int64_t(params->blocks.tiles[e - 1].keys) + 1 : 0;
      if (tile.keys < least || tile.keys >= tiles_kv || tile.bits >= words[0]) {
        fail("block_tiles must hold increasing tiles of keys in [0, ", tiles_kv, ") and places in block_bits below ", words[0], ", got ", tile.keys, " and ",
             tile.bits, " at ", e);
      }
    }
  }
  batch_dims->add(*rows, DType::kFloat32, &params->blocks.rows);
}

inline void check_batch_size(const char* name, int64_t size) {
  if (size < 0) fail(name, " must not be negative, got ", size);
}

// Reads query (..., num_heads, seqlen_q, head_dim), key and, where it is given, value, fills in their dtype and sizes, and adds them to
// `batch_dims`.
template <class Params>
void check_query_key_value(Tensor* query, Tensor* key, Tensor* value, Params* params, BatchDims* batch_dims) {
  read(query);
  read(key);
  params->dtype = dtype_of(*query);
  if (query->rank < 3) fail("query must have shape (..., num_heads, seqlen_q, head_dim), got ", query->shape());
  check_key_or_value(*key, *query);
  params->num_heads = query->size(-3), params->num_heads_kv = key->size(-3);
  params->seqlen_q = query->size(-2), params->seqlen_kv = key->size(-2);
  params->head_dim = query->size(-1);
  if (key->size(-1) != params->head_dim) fail("key must have the head_dim of query (", params->head_dim, "), got shape ", key->shape());
  if (params->num_heads_kv == 0 ? params->num_heads != 0 : params->num_heads % params->num_heads_kv != 0) {
    fail("num_heads of query must be a multiple of num_heads_kv of key, got ", params->num_heads, " and ", params->num_heads_kv);
  }
  check_length("seqlen_q of query", params->seqlen_q);
  check_length("seqlen_kv of key", params->seqlen_kv);
  check_length("num_heads of query", params->num_heads);
  check_head_dim("head_dim of query", params->head_dim);
  batch_dims->add(*query, params->dtype, &params->query);
  batch_dims->add(*key, params->dtype, &params->key);
  if (!*value) return;
  read(value);
  check_key_or_value(*value, *query);
  if (value->size(-3) != params->num_heads_kv || value->size(-2) != params->seqlen_kv) {
    fail("value must have the num_heads_kv and seqlen_kv of key, of shape ", key->shape(), ", got shape ", value->shape());
  }
  params->head_dim_v = value->size(-1);
  check_head_dim("head_dim_v of value", params->head_dim_v);
  batch_dims->add(*value, params->dtype, &params->value);
}

}  // namespace tiled_attention
