// Masks as tensors: what dropout keeps and what intervals or lists let through, one thread per element.

#include "../../core/mask.h"
#include "../address.cuh"
#include "../block_list.cuh"
#include "../dropout.cuh"
#include "../kernels.h"

namespace tiled_attention {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 20;

// keep[batch][num_heads][seqlen_q][seqlen_kv]
__global__ void __launch_bounds__(kThreads)
    dropout_mask_kernel(const __grid_constant__ DropoutParams p, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, int64_t count, bool* keep) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t key = i % seqlen_kv, row = i / seqlen_kv, query = row % seqlen_q, head = row / seqlen_q;
    const Dropout dropout(p, head / num_heads, head % num_heads);
    keep[i] = !dropout.active || dropout.keeps(query, key);
  }
}

// visible[batch][seqlen_q][seqlen_kv]
__global__ void __launch_bounds__(kThreads)
    mask_dense_kernel(const __grid_constant__ MaskParams p, int64_t seqlen_q, int64_t seqlen_kv, int64_t count, bool* visible) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t key = i % seqlen_kv, row = i / seqlen_kv;
    const RowMask rule(p, row / seqlen_q, seqlen_q, seqlen_kv);
    visible[i] = contains(rule.row(row % seqlen_q), int(key));
  }
}

// visible[num_heads][num_rows][seqlen_kv]
__global__ void __launch_bounds__(kThreads)
    blocks_dense_kernel(const __grid_constant__ AttentionParams p, const int64_t* rows, int64_t num_rows, int64_t count, bool* visible) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t key = i % p.seqlen_kv, row = i / p.seqlen_kv, query = rows[row % num_rows];
    visible[i] = query >= 0 && query < p.seqlen_q && HeadList(p, 0, row / num_rows).sees(query, key);
  }
}

unsigned blocks_for(int64_t count) { return unsigned(min_of((count + kThreads - 1) / kThreads, kMaxBlocks)); }

}  // namespace

const char* dropout_mask(const DropoutParams& p, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, bool* keep, Stream stream) {
  const int64_t count = batch * num_heads * seqlen_q * seqlen_kv;
  SIMT_LAUNCH(dropout_mask_kernel, blocks_for(count), kThreads, 0, stream, p, num_heads, seqlen_q, seqlen_kv, count, keep);
  return nullptr;
}

const char* mask_dense(const MaskParams& p, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible, Stream stream) {
  const int64_t count = batch * seqlen_q * seqlen_kv;
  SIMT_LAUNCH(mask_dense_kernel, blocks_for(count), kThreads, 0, stream, p, seqlen_q, seqlen_kv, count, visible);
  return nullptr;
}

const char* blocks_dense(const AttentionParams& p, const int64_t* rows, int64_t num_rows, bool* visible, Stream stream) {
  const int64_t count = p.num_heads * num_rows * p.seqlen_kv;
  SIMT_LAUNCH(blocks_dense_kernel, blocks_for(count), kThreads, 0, stream, p, rows, num_rows, count, visible);
  return nullptr;
}

}  // namespace cuda
}  // namespace tiled_attention
