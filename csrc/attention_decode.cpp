// Attention over a key-value cache, Tensor side: check, allocate, fill params by name, run the kernels.

#include "attention_checks.h"
#include "backend.h"
#include "core/kv_cache.h"

namespace tiled_attention {
namespace {

// A cache or what is appended to it: (batch or pages, num_heads_kv, slots, any).
struct CacheArguments {
  Tensor key_cache, value_cache, cache_seqlens, page_table;
};

TensorView view_of(const Tensor& tensor, DType dtype) {
  TensorView view;
  view.data = tensor.data;
  view.dtype = dtype;
  view.batch_strides[0] = tensor.stride(0);
  view.head_stride = tensor.stride(1), view.row_stride = tensor.stride(2), view.col_stride = tensor.stride(3);
  return view;
}

void check_rank_4(const Tensor& tensor, const char* shape) {
  if (tensor.rank != 4) fail(tensor.name, " must have shape ", shape, ", got ", tensor.shape());
}

// int32 or int64 (batch,), made contiguous.
void check_seqlens(Tensor* seqlens, int64_t batch, CacheParams* cache) {
  read(seqlens);
  cache->seqlens_are_64_bit = seqlens->dtype == codes.int64;
  if (!cache->seqlens_are_64_bit && seqlens->dtype != aoti_torch_dtype_int32()) {
    fail("cache_seqlens must be int32 or int64, got ", DTypeName{seqlens->dtype});
  }
  check_shape(*seqlens, &batch, 1);
  make_contiguous(seqlens);
  cache->cache_seqlens = seqlens->data;
}

// Everything of a cache but the values of the lengths and pages. `batch`: of the query or of the new keys.
void check_cache(CacheArguments* args, const Tensor& like, int64_t pinned, CacheParams* cache) {
  Tensor &key = args->key_cache, &value = args->value_cache;
  read(&key);
  read(&value);
  const bool paged = bool(args->page_table);
  const char* shape = paged ? "(num_pages, num_heads_kv, page_size, head_dim)" : "(batch, num_heads_kv, capacity, head_dim)";
  check_rank_4(key, shape);
  check_rank_4(value, shape);
  for (const Tensor* tensor : {&key, &value}) {
    if (tensor->dtype != like.dtype) {
      fail(tensor->name, " must have the dtype of ", like.name, " (", DTypeName{like.dtype}, "), got ", DTypeName{tensor->dtype});
    }
  }
  for (int i = 0; i < 3; ++i) {
    if (value.size(i) != key.size(i)) fail("value_cache must be like key_cache, of shape ", key.shape(), ", but for the last size, got ", value.shape());
  }
  const int64_t batch = like.size(0);
  cache->slots = key.size(2);
  if (paged) {
    Tensor& table = args->page_table;
    read(&table);
    check_dtype(table, aoti_torch_dtype_int32());
    if (table.rank != 2 || table.size(0) != batch) fail("page_table must have shape (", batch, ", pages), got ", table.shape());
    make_contiguous(&table);
    cache->page_table = static_cast<const int32_t*>(table.data);
    cache->table_pages = table.size(1), cache->num_pages = key.size(0), cache->page_size = key.size(2);
    if (__builtin_mul_overflow(cache->table_pages, cache->page_size, &cache->slots)) fail("page_table of shape ", table.shape(), " has more than 2^63 slots");
  } else if (key.size(0) != batch) {
    fail("key_cache must have the batch of ", like.name, " (", batch, "), got shape ", key.shape());
  }
  check_length("the capacity of key_cache", cache->slots);
  cache->pinned = pinned;
  if (pinned < -1 || (pinned >= 0 && pinned >= cache->slots)) fail("pinned must be -1 or in [0, slots = ", cache->slots, "), got ", pinned);
  check_seqlens(&args->cache_seqlens, batch, cache);
}

// Values, where they may be read: lengths with the new keys within the cache.
void check_length_values(const CacheParams& cache, int64_t batch) {
  for (int64_t b = 0; device::kReadsValues && b < batch; ++b) {
    const int64_t length = cache.seqlens_are_64_bit ? static_cast<const int64_t*>(cache.cache_seqlens)[b] : static_cast<const int32_t*>(cache.cache_seqlens)[b];
    const int64_t most = (cache.pinned < 0 ? cache.slots : kMaxLength - 1) - cache.num_new;
    if (length >= 0 && length <= most) continue;
    if (cache.pinned >= 0) fail("cache_seqlens must be in [0, ", most, "], got ", length, " at ", b);
    fail("cache_seqlens must be in [0, capacity - new keys = ", cache.slots, " - ", cache.num_new, "], got ", length, " at ", b);
  }
}

// The pages of the keys [begin, end) of a batch item.
void check_pages(const CacheItem& item, int64_t batch, Interval keys) {
  if (!item.pages || is_empty(keys)) return;
  const int64_t page_size = item.cache.page_size;
  for (int64_t key = keys.begin; key < keys.end;) {
    const int64_t slot = item.slot(key), entry = slot / page_size;
    if (item.page(slot) < 0) {
      fail("page_table must hold pages in [0, num_pages = ", item.cache.num_pages, ") for the keys that are used, got ", item.pages[entry], " at (", batch,
           ", ", entry, ")");
    }
    key += min_of(page_size - slot % page_size, item.cache.pinned < 0 ? page_size : item.cache.slots - slot);
  }
}

void check_heads_and_dims(const AttentionParams& params, const Tensor& key) {
  if (key.size(-1) != params.head_dim) fail("key_cache must have the head_dim of query (", params.head_dim, "), got shape ", key.shape());
  if (params.num_heads_kv == 0 ? params.num_heads != 0 : params.num_heads % params.num_heads_kv != 0) {
    fail("num_heads of query must be a multiple of num_heads_kv of key_cache, got ", params.num_heads, " and ", params.num_heads_kv);
  }
  check_length("seqlen_q of query", params.seqlen_q);
  check_length("num_heads of query", params.num_heads);
  check_head_dim("head_dim of query", params.head_dim);
  check_head_dim("head_dim_v of value_cache", params.head_dim_v);
}

// (out, lse)
void attention_decode(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor query = arguments.tensor("query");
  CacheArguments args;
  args.key_cache = arguments.tensor("key_cache");
  args.value_cache = arguments.tensor("value_cache");
  args.cache_seqlens = arguments.tensor("cache_seqlens");
  args.page_table = arguments.optional_tensor("page_table");
  Tensor alibi_slopes = arguments.optional_tensor("alibi_slopes");
  Tensor sinks = arguments.optional_tensor("sinks");
  Tensor key_lengths = arguments.optional_tensor("key_lengths");
  Tensor documents = arguments.optional_tensor("documents");
  const double scale = arguments.scalar<double>(), softcap = arguments.scalar<double>();
  const IntList intervals = arguments.ints();
  const int64_t num_new = arguments.scalar<int64_t>(), pinned = arguments.scalar<int64_t>();
  const Backend backend("attention_decode", arguments.device());

  AttentionDecodeParams decode;
  AttentionParams& params = decode.attention;
  CacheParams& cache = decode.cache;
  read(&query);
  check_rank_4(query, "(batch, num_heads, seqlen_q, head_dim)");
  params.dtype = dtype_of(query);
  const int32_t real = real_dtype(query.dtype);
  check_length("num_new", num_new);
  cache.num_new = num_new;
  check_cache(&args, query, pinned, &cache);
  params.num_batch_dims = 1;
  params.batch = params.batch_sizes[0] = query.size(0);
  params.num_heads = query.size(1), params.seqlen_q = query.size(2), params.head_dim = query.size(3);
  params.num_heads_kv = args.key_cache.size(1), params.seqlen_kv = cache.slots, params.head_dim_v = args.value_cache.size(3);
  check_heads_and_dims(params, args.key_cache);
  params.query = view_of(query, params.dtype);
  params.key = view_of(args.key_cache, params.dtype), params.value = view_of(args.value_cache, params.dtype);
  params.alibi_slopes = check_array(&alibi_slopes, real, params.num_heads);
  params.sinks = check_array(&sinks, real, params.num_heads);
  check_scale_and_softcap(scale, softcap, &params);
  check_intervals(intervals, &params.mask);
  Tensor no_offsets;
  check_mask_arrays(&key_lengths, &no_offsets, &documents, params.batch, &params.mask);
  check_length_values(cache, params.batch);
  for (int64_t b = 0; device::kReadsValues && cache.page_table && b < params.batch; ++b) {
    const CacheItem item(cache, b);
    const RowMask mask(params.mask, b, params.seqlen_q, item.length);
    CacheKeys keys;
    for (int64_t i = 0; i < params.seqlen_q; ++i) keys.add(item, mask.row(i));
    check_pages(item, b, keys.low);
    check_pages(item, b, keys.high);
  }

  Tensor out = empty_in_order_of(query, "out", query.dtype, params.head_dim_v);
  Tensor lse = empty_contiguous("lse", real, query.device, 3, query.sizes);
  params.out = view_of(out, params.dtype);
  params.lse = lse.data;
  if (params.batch != 0 && params.num_heads != 0 && params.seqlen_q != 0) backend.attention_decode(decode);
  stack[0] = out.release();
  stack[1] = lse.release();
}

// ()
void cache_append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  CacheArguments args;
  args.key_cache = arguments.tensor("key_cache");
  args.value_cache = arguments.tensor("value_cache");
  Tensor new_key = arguments.tensor("new_key");
  Tensor new_value = arguments.tensor("new_value");
  args.cache_seqlens = arguments.tensor("cache_seqlens");
  args.page_table = arguments.optional_tensor("page_table");
  const int64_t pinned = arguments.scalar<int64_t>();
  const Backend backend("cache_append_", arguments.device());

  CacheAppendParams params;
  CacheParams& cache = params.cache;
  read(&new_key);
  read(&new_value);
  check_rank_4(new_key, "(batch, num_heads_kv, n_new, head_dim)");
  check_rank_4(new_value, "(batch, num_heads_kv, n_new, head_dim_v)");
  params.dtype = dtype_of(new_key);
  if (new_value.dtype != new_key.dtype) fail("new_value must have the dtype of new_key (", DTypeName{new_key.dtype}, "), got ", DTypeName{new_value.dtype});
  check_cache(&args, new_key, pinned, &cache);
  params.batch = new_key.size(0), params.num_heads_kv = new_key.size(1), cache.num_new = new_key.size(2);
  params.head_dim = args.key_cache.size(3), params.head_dim_v = args.value_cache.size(3);
  check_length("n_new of new_key", cache.num_new);
  const int64_t of_key[] = {params.batch, args.key_cache.size(1), cache.num_new, params.head_dim};
  const int64_t of_value[] = {params.batch, args.key_cache.size(1), cache.num_new, params.head_dim_v};
  check_shape(new_key, of_key, 4);
  check_shape(new_value, of_value, 4);
  check_head_dim("head_dim of key_cache", params.head_dim);
  check_head_dim("head_dim_v of value_cache", params.head_dim_v);
  params.key = view_of(args.key_cache, params.dtype), params.value = view_of(args.value_cache, params.dtype);
  params.new_key = view_of(new_key, params.dtype), params.new_value = view_of(new_value, params.dtype);
  check_length_values(cache, params.batch);
  for (int64_t b = 0; device::kReadsValues && cache.page_table && b < params.batch; ++b) {
    const CacheItem item(cache, b);
    const Interval added = {int(item.before), int(item.length)};
    check_pages(item, b, intersect(added, item.pinned.begin, item.pinned.end));
    check_pages(item, b, intersect(added, item.recent.begin, item.recent.end));
  }
  if (params.batch != 0 && params.num_heads_kv != 0 && cache.num_new != 0) backend.cache_append(params);
}

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, DISPATCH_KEY, m) {
  m.impl("attention_decode", &tiled_attention::attention_decode);
  m.impl("cache_append_", &tiled_attention::cache_append);
}
