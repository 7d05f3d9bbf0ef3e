// Prints the launch configurations of all kernels: the host side of csrc/cuda runs here over a list of problems, linked with a CUDA runtime
// that notes launches instead of making them. One line per kernel, block size and shared memory: "symbol threads shared_bytes".
// Device pointers are numbers that nobody follows. Links with the objects of csrc/cuda/instances, compiled by nvcc for any target.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <tuple>

#include "../csrc/cuda/kernels.h"
#include "../csrc/cuda/runtime.h"

namespace {

struct Dim3 {
  unsigned x, y, z;
};

// Kernels are registered before main, from the constructors of other files.
std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> found;
  return found;
}
std::set<std::tuple<std::string, unsigned long, size_t>> launches;
Dim3 pushed_grid, pushed_block;
size_t pushed_shared;
void* pushed_stream;
int failures = 0;

void note(const void* kernel, Dim3 grid, Dim3 block, size_t shared) {
  const unsigned long threads = static_cast<unsigned long>(block.x) * block.y * block.z;
  if (!names().count(kernel)) names()[kernel] = "unregistered";
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y != 1 || grid.z != 1 || threads == 0 || threads > 1024) {
    std::fprintf(stderr, "%s: grid (%u, %u, %u), block (%u, %u, %u)\n", names()[kernel].c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z);
    ++failures;
  }
  launches.emplace(names()[kernel], threads, shared);
}

}  // namespace

// What code compiled by nvcc asks of the CUDA runtime.
extern "C" {
void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* device, int, void*, void*, void*, void*, int*) { names()[host] = device; }
int __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return 0;
}
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
  pushed_grid = grid, pushed_block = block, pushed_shared = shared, pushed_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void* stream) {
  *grid = pushed_grid, *block = pushed_block, *shared = pushed_shared, *static_cast<void**>(stream) = pushed_stream;
  return 0;
}
int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t shared, void*) {
  note(kernel, grid, block, shared);
  return 0;
}
int cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void**, size_t shared, void*) {
  note(kernel, grid, block, shared);
  return 0;
}
int cudaFuncSetAttribute(const void*, int, int) { return 0; }
int cudaMemsetAsync(void*, int, size_t, void*) { return 0; }
int cudaMemcpyAsync(void*, const void*, size_t, int, void*) { return 0; }
int cudaGetLastError() { return 0; }
int cudaPeekAtLastError() { return 0; }
const char* cudaGetErrorString(int) { return ""; }
const char* cudaGetErrorName(int) { return ""; }
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaDeviceGetAttribute(int* value, int, int) {
  *value = 132;  // multiprocessors, the one attribute that a schedule may ask for
  return 0;
}
}

namespace {

using namespace tiled_attention;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

// `aligned`: to 16 bytes; otherwise to one element of 8 bytes.
void* pointer(bool aligned = true) {
  static uintptr_t next = uintptr_t(1) << 40;
  next += uintptr_t(1) << 32;
  return reinterpret_cast<void*>(next + (aligned ? 0 : 8));
}

TensorView view(DType dtype, int64_t heads, int64_t rows, int64_t cols, bool aligned = true) {
  TensorView tensor;
  tensor.data = pointer(aligned);
  tensor.dtype = dtype;
  tensor.batch_strides[0] = heads * rows * cols;
  tensor.head_stride = rows * cols;
  tensor.row_stride = cols;
  tensor.col_stride = 1;
  return tensor;
}

const char* running = "";
bool finished = false;

void expect(const char* error) {
  if (!error) return;
  std::fprintf(stderr, "%s: %s\n", running, error);
  ++failures;
}

#define RUN(function, ...) (running = #function, expect(cuda::function(__VA_ARGS__)))

// nvcc gives a __device__ function a host body that exits. It does not refuse every call of one from the host: not from a template.
void at_exit() {
  if (!finished) std::fprintf(stderr, "%s: the host side calls a __device__ function\n", running);
}

struct Sizes {
  int64_t batch, num_heads, num_heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v;
};

// bit 0 bool mask (and of exact attention a block list), 1 bias, 2 ALiBi, 3 sinks, 4 softcap, 5 dropout, 6 causal, 7 key lengths and documents, 8 tf32
AttentionParams exact(DType dtype, const Sizes& s, int options, bool aligned) {
  AttentionParams p;
  const DType real = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  p.dtype = dtype;
  p.num_batch_dims = 1;
  p.batch_sizes[0] = p.batch = s.batch;
  p.num_heads = s.num_heads;
  p.num_heads_kv = s.num_heads_kv;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_kv = s.seqlen_kv;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.query = view(dtype, s.num_heads, s.seqlen_q, s.head_dim, aligned);
  p.key = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim, aligned);
  p.value = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim_v, aligned);
  p.out = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  p.lse = pointer();
  if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) p.residual = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  if (options & 1) p.bool_mask = view(DType::kFloat32, s.num_heads, s.seqlen_q, s.seqlen_kv, aligned);
  if (options & 2) p.bias = view(real, s.num_heads, s.seqlen_q, s.seqlen_kv, aligned);
  if (options & 4) p.alibi_slopes = pointer();
  if (options & 8) p.sinks = pointer();
  if (options & 16) p.softcap = 30;
  if (options & 32) p.dropout.p = 0.1, p.dropout.seed = static_cast<const int64_t*>(pointer());
  if (options & 64) p.mask.window_right = 0;
  p.allow_tf32 = options & 256;
  if (options & 128) {
    p.mask.key_lengths = static_cast<const int64_t*>(pointer());
    p.mask.documents = static_cast<const int64_t*>(pointer());
    p.mask.num_documents = 3;
  }
  return p;
}

BlockListParams block_list(const Sizes& s) {
  BlockListParams list;
  list.rows = view(DType::kFloat32, s.num_heads, (s.seqlen_q + kListTile - 1) / kListTile, 2, true);
  list.tiles = static_cast<const ListedTile*>(pointer()), list.bits = static_cast<const uint64_t*>(pointer());
  list.num_tiles = 7, list.num_bits = 3;
  return list;
}

void run_exact(DType dtype, const Sizes& s, int options, bool aligned) {
  AttentionParams p = exact(dtype, s, options, aligned);
  if (options & 1) p.blocks = block_list(s);
  const DType real = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  cuda::attention_fwd_scratch(p);
  RUN(attention_fwd, p, pointer(), nullptr);

  AttentionBackwardParams b;
  b.forward = p;
  b.grad_out = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  b.grad_query = view(dtype, s.num_heads, s.seqlen_q, s.head_dim, aligned);
  b.grad_key = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim, aligned);
  b.grad_value = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim_v, aligned);
  for (const bool everything : {false, true}) {
    if (everything) {
      b.grad_lse = pointer();
      if (options & 2) b.grad_bias = view(real, s.num_heads, s.seqlen_q, s.seqlen_kv);
      if (options & 4) b.grad_alibi_slopes = pointer();
      if (options & 8) b.grad_sinks = pointer();
    }
    cuda::attention_bwd_scratch(b);
    RUN(attention_bwd, b, pointer(), nullptr);
  }

  // A bias shared by the batch and the heads, whose gradient is a sum.
  if (options & 2) {
    b.forward.bias.batch_strides[0] = b.forward.bias.head_stride = 0;
    b.grad_bias.batch_strides[0] = b.grad_bias.head_stride = 0;
    cuda::attention_bwd_scratch(b);
    RUN(attention_bwd, b, pointer(), nullptr);
    // And by the queries.
    b.forward.bias.row_stride = b.grad_bias.row_stride = 0;
    cuda::attention_bwd_scratch(b);
    RUN(attention_bwd, b, pointer(), nullptr);
    // By distance.
    b.forward.bias.row_stride = b.grad_bias.row_stride = -1;
    cuda::attention_bwd_scratch(b);
    RUN(attention_bwd, b, pointer(), nullptr);
  }

  // Packed sequences.
  if (!(options & 3)) {
    AttentionBackwardParams packed = b;
    packed.forward.cu_seqlens_q = packed.forward.cu_seqlens_kv = static_cast<const int64_t*>(pointer());
    packed.forward.total_q = s.batch * s.seqlen_q, packed.forward.total_kv = s.batch * s.seqlen_kv;
    packed.forward.lse_head_stride = packed.forward.total_q;
    cuda::attention_fwd_scratch(packed.forward);
    RUN(attention_fwd, packed.forward, pointer(), nullptr);
    cuda::attention_bwd_scratch(packed);
    RUN(attention_bwd, packed, pointer(), nullptr);
  }

  AttentionWeightsParams w;
  w.forward = p;
  for (const bool average : {false, true}) {
    w.average = average;
    w.rows = average ? static_cast<const int64_t*>(pointer()) : nullptr;
    w.num_rows = s.seqlen_q;
    w.weights = view(real, average ? 1 : s.num_heads, s.seqlen_q, s.seqlen_kv);
    cuda::attention_weights_scratch(w);
    RUN(attention_weights, w, pointer(), nullptr);
  }
}

void run_additive(DType dtype, const Sizes& s, int options, bool aligned) {
  AdditiveAttentionParams p;
  p.attention = exact(dtype, s, options, aligned);
  p.score_weight = pointer();
  cuda::additive_attention_fwd_scratch(p);
  RUN(additive_attention_fwd, p, pointer(), nullptr);

  AdditiveAttentionBackwardParams b;
  b.attention.forward = p.attention;
  b.attention.grad_out = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  b.attention.grad_query = view(dtype, s.num_heads, s.seqlen_q, s.head_dim, aligned);
  b.attention.grad_key = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim, aligned);
  b.attention.grad_value = view(dtype, s.num_heads_kv, s.seqlen_kv, s.head_dim_v, aligned);
  b.score_weight = pointer(), b.grad_score_weight = pointer();
  cuda::additive_attention_bwd_scratch(b);
  RUN(additive_attention_bwd, b, pointer(), nullptr);

  AdditiveAttentionWeightsParams w;
  w.attention.forward = p.attention;
  w.attention.num_rows = s.seqlen_q;
  w.attention.weights = view(dtype == DType::kFloat64 ? dtype : DType::kFloat32, s.num_heads, s.seqlen_q, s.seqlen_kv);
  w.score_weight = pointer();
  cuda::additive_attention_weights_scratch(w);
  RUN(additive_attention_weights, w, pointer(), nullptr);
}

// bit 0 key mask, 1 decay, 2 decay per feature, 3 states in and out, 4 not causal
void run_linear(DType dtype, const Sizes& s, int options, bool aligned) {
  const bool causal = !(options & 16);
  if (!causal && (options & 14)) return;
  const DType real = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  LinearAttentionParams p;
  p.dtype = dtype;
  p.causal = causal;
  p.num_batch_dims = 1;
  p.batch_sizes[0] = p.batch = s.batch;
  p.num_heads = s.num_heads;
  p.num_heads_kv = s.num_heads_kv;
  p.seqlen_q = s.seqlen_q;
  p.seqlen_kv = causal ? s.seqlen_q : s.seqlen_kv;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.query = view(dtype, s.num_heads, s.seqlen_q, s.head_dim, aligned);
  p.key = view(dtype, s.num_heads_kv, p.seqlen_kv, s.head_dim, aligned);
  p.value = view(dtype, s.num_heads_kv, p.seqlen_kv, s.head_dim_v, aligned);
  p.out = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  if (options & 1) p.key_mask = view(DType::kFloat32, s.num_heads_kv, 1, p.seqlen_kv, aligned);
  p.decay_per_feature = options & 4;
  if (options & 2) p.log_decay = view(real, s.num_heads_kv, p.seqlen_kv, p.decay_per_feature ? s.head_dim : 1, aligned);
  if (options & 8) p.initial_kv = pointer(), p.initial_k_sum = pointer();
  p.final_kv = pointer();
  p.final_k_sum = pointer();
  cuda::linear_fwd_scratch(p);
  RUN(linear_fwd, p, pointer(), nullptr);

  LinearAttentionBackwardParams b;
  b.forward = p;
  b.grad_out = view(dtype, s.num_heads, s.seqlen_q, s.head_dim_v, aligned);
  b.grad_query = view(dtype, s.num_heads, s.seqlen_q, s.head_dim, aligned);
  b.grad_key = view(dtype, s.num_heads_kv, p.seqlen_kv, s.head_dim, aligned);
  b.grad_value = view(dtype, s.num_heads_kv, p.seqlen_kv, s.head_dim_v, aligned);
  if (options & 2) b.grad_log_decay = p.log_decay, b.grad_log_decay.data = pointer(aligned);
  if (options & 8) {
    b.grad_final_kv = pointer(), b.grad_final_k_sum = pointer();
    b.grad_initial_kv = pointer(), b.grad_initial_k_sum = pointer();
  }
  cuda::linear_bwd_scratch(b);
  RUN(linear_bwd, b, pointer(), nullptr);

  // Packed sequences.
  if (p.seqlen_q == p.seqlen_kv) {
    LinearAttentionBackwardParams packed = b;
    packed.forward.batch_sizes[0] = packed.forward.batch = 1;
    packed.forward.cu_seqlens = static_cast<const int64_t*>(pointer()), packed.forward.num_sequences = s.batch;
    cuda::linear_fwd_scratch(packed.forward);
    RUN(linear_fwd, packed.forward, pointer(), nullptr);
    cuda::linear_bwd_scratch(packed);
    RUN(linear_bwd, packed, pointer(), nullptr);
  }

  if (causal && s.seqlen_q == 1) {
    p.initial_kv = pointer(), p.initial_k_sum = pointer();
    RUN(linear_step, p, nullptr);
    p.final_kv = const_cast<void*>(p.initial_kv), p.final_k_sum = const_cast<void*>(p.initial_k_sum);
    RUN(linear_step, p, nullptr);
  }
}

// One row of a kv head, a few and many; caches short and long, in one piece and in pages.
void run_decode(DType dtype, const Sizes& s, bool aligned) {
  for (const bool paged : {false, true}) {
    AttentionDecodeParams params;
    params.attention = exact(dtype, s, 0, aligned);
    CacheParams& cache = params.cache;
    cache.slots = s.seqlen_kv;
    cache.cache_seqlens = pointer();
    cache.num_new = 1;
    if (paged) {
      cache.page_table = static_cast<const int32_t*>(pointer());
      cache.page_size = 16, cache.table_pages = s.seqlen_kv / 16, cache.num_pages = s.batch * cache.table_pages;
    }
    cuda::attention_decode_scratch(params);
    RUN(attention_decode, params, pointer(), nullptr);

    CacheAppendParams append;
    append.dtype = dtype;
    append.batch = s.batch, append.num_heads_kv = s.num_heads_kv, append.head_dim = s.head_dim, append.head_dim_v = s.head_dim_v;
    append.cache = cache;
    append.key = params.attention.key, append.value = params.attention.value;
    append.new_key = view(dtype, s.num_heads_kv, 1, s.head_dim, aligned), append.new_value = view(dtype, s.num_heads_kv, 1, s.head_dim_v, aligned);
    RUN(cache_append, append, nullptr);
  }
}

// What has no keys, and what no problem above reaches.
void run_others() {
  DropoutParams dropout;
  dropout.p = 0.1;
  dropout.seed = static_cast<const int64_t*>(pointer());
  RUN(dropout_mask, dropout, 2, 4, 70000, 130, static_cast<bool*>(pointer()), nullptr);
  RUN(mask_dense, MaskParams{}, 2, 70000, 130, static_cast<bool*>(pointer()), nullptr);
  const Sizes sizes{2, 4, 4, 70000, 130, 64, 64};
  AttentionParams listed = exact(DType::kFloat32, sizes, 0, true);
  listed.blocks = block_list(sizes);
  RUN(blocks_dense, listed, static_cast<const int64_t*>(pointer()), 300, static_cast<bool*>(pointer()), nullptr);
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    RotateParams p;
    p.dtype = dtype;
    p.num_heads = 4, p.seqlen = 70000, p.head_dim = 80, p.rotary_dim = 64;
    p.rows = view(dtype, 4, 70000, 80, true), p.out = view(dtype, 4, 70000, 80, true);
    p.table = view(dtype == DType::kFloat64 ? dtype : DType::kFloat32, 1, 70000, 64, true);
    RUN(rotate, p, nullptr);
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    AttentionBackwardParams b;
    b.forward = exact(dtype, {2, 4, 2, 70, 0, 64, 64}, 8, true);
    b.grad_lse = pointer();
    b.grad_sinks = pointer();
    RUN(lse_without_keys, b.forward, nullptr);
    RUN(grad_sinks_without_keys, b, nullptr);
  }
}

}  // namespace

int main() {
  std::atexit(at_exit);
  constexpr int64_t kHeadDims[] = {0, 1, 8, 16, 32, 40, 64, 72, 80, 96, 112, 128, 136, 160, 192, 224, 256, 264, 512};
  for (const DType dtype : kDTypes) {
    for (const int64_t head_dim : kHeadDims) {
      for (const int64_t head_dim_v : {head_dim, int64_t(64), int64_t(256)}) {
        for (const int64_t seqlen : {1, 33, 4096}) {
          for (const bool aligned : {true, false}) {
            const Sizes s{2, 4, 2, seqlen, seqlen, head_dim, head_dim_v};
            // Every set of options for the usual sizes, none, each and all for the others.
            const bool usual = head_dim == 64 || head_dim == 128;
            for (int options = 0; options < (dtype == DType::kFloat32 ? 512 : 256); ++options) {
              const int others = options & 255;
              if (usual || (others & (others - 1)) == 0 || others == 255) run_exact(dtype, s, options, aligned);
            }
            for (int options = 0; options < 32; ++options) run_linear(dtype, s, options, aligned);
            for (const int options : {0, 1, 32, 64, 128}) run_additive(dtype, s, options, aligned);
            for (const int64_t heads : {2, 8, 16, 64}) run_decode(dtype, {2, heads, 2, 1, seqlen, head_dim, head_dim_v}, aligned);
          }
        }
      }
    }
  }
  // The one-dimensional grid of (batch, head, tile) with more heads than the other two dimensions of a grid could count.
  run_exact(DType::kBFloat16, {70000, 1, 1, 130, 130, 64, 64}, 0, true);
  run_linear(DType::kBFloat16, {70000, 1, 1, 130, 130, 64, 64}, 0, true);
  run_decode(DType::kBFloat16, {70000, 8, 1, 130, 130, 64, 64}, true);
  run_others();
  for (const auto& [name, threads, shared] : launches) std::printf("%s %lu %zu\n", name.c_str(), threads, shared);
  finished = true;
  return failures ? 1 : 0;
}
