#pragma once
// Attention of few queries over the keys of a cache: bound by reading them once. A warp takes 16 keys at a time, kLanes of its lanes the columns
// of one key, 16 bytes each, straight from global memory to registers; the rows of all query heads of the kv head pass over what is there.
// Warps go on without barriers, each with its own running softmax, and are merged in the end; so are the splits, by a second kernel.

#include "attention_decode_tile.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

// One row of the result from its maximum, sum and weighted values, with the sink: column k is factor * value.
template <class R>
SIMT_DEVICE R finish_row(const AttentionParams& p, int64_t head, R* max, R* sum) {
  const R sink = p.sinks ? ((const R*)p.sinks)[head] : minus_infinity(R()), top = larger_of(*max, sink), shrink = shrink_of(*max, top);
  *sum = *sum * shrink + shrink_of(sink, top);
  *max = top;
  return *sum == R(0) ? R(0) : shrink / *sum;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    attention_decode_kernel(const __grid_constant__ AttentionDecodeParams params, const __grid_constant__ DecodePlan plan, DecodeScratch partial) {
  using T = typename Tile::T;
  using R = typename Tile::R;
  constexpr int kRows = Tile::kRows, kVector = Tile::kVector, kUnroll = Tile::kUnroll;
  SIMT_DYNAMIC_SHARED(memory);
  DecodeShared<Tile>& shared = *reinterpret_cast<DecodeShared<Tile>*>(memory);

  const AttentionParams& p = params.attention;
  const unsigned block_of_rows = block_index() / unsigned(plan.splits), kv_head = block_of_rows / unsigned(plan.pieces * plan.tiles);
  const int64_t split = block_index() % unsigned(plan.splits), piece = block_of_rows % unsigned(plan.pieces);
  const int64_t batch = kv_head / unsigned(p.num_heads_kv), head_kv = kv_head % unsigned(p.num_heads_kv);
  const int64_t first_row = int64_t(block_of_rows / unsigned(plan.pieces) % unsigned(plan.tiles)) * kRows, group = p.num_heads / p.num_heads_kv;
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, slot = lane / Tile::kLanes;
  const int count = int(min_of(int64_t(kRows), group * p.seqlen_q - first_row));
  const CacheItem item(params.cache, batch);
  if (thread < kRows) {
    const RowMask mask(p.mask, batch, p.seqlen_q, item.length);
    const unsigned index = thread < count ? unsigned(first_row) + unsigned(thread) : 0;
    new (&shared.row(thread)) DecodeRow<R>(p, mask, batch, head_kv * group + index / unsigned(p.seqlen_q), index % unsigned(p.seqlen_q), thread < count);
  }
  __syncthreads();
  if (thread == 0) {
    CacheKeys seen;
    for (int r = 0; r < count; r++) seen.add(item, shared.row(r).keys);
    shared.seen = seen;
    shared.blocks = KeyBlocks(seen);
  }
  __syncthreads();
  const int shares = int(plan.splits), share = (shared.blocks.count() + shares - 1) / shares, begin = min_of(int(split) * share, shared.blocks.count()),
            end = min_of(begin + share, shared.blocks.count());

  const CacheMatrix<T> key(p.key, item, batch, head_kv), value(p.value, item, batch, head_kv);
  const int64_t lane_col = lane % Tile::kLanes * kVector, value_col = piece * Tile::kCols + lane_col;
  R query[kRows][kVector], acc[kRows][kVector];
  const auto load_query = [&](int64_t col) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      if (r < count && col < p.head_dim) {
        load_vec<T>(rows_of<const T>(p, p.query, batch, shared.row(r).head), shared.row(r).query, col, p.head_dim, query[r]);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; k++) query[r][k] = 0;
      }
    }
  };
  load_query(lane_col);
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int k = 0; k < kVector; k++) acc[r][k] = 0;

  // In the softmax a lane has one row and every kRowLanes-th key; of a single row half of the lanes have what the others have.
  const int row = lane % kRows, row_lane = lane / kRows % Tile::kRowLanes;
  const bool row_exists = row < count, row_counts = lane / kRows < Tile::kRowLanes;
  const DecodeRow<R>& of_row = shared.row(row);
  DecodeState<R> state;
  R* const scores = shared.scores[warp];
  int64_t *const key_at = shared.key_at[warp], *const value_at = shared.value_at[warp];

#pragma unroll 1
  for (int block = begin; block < end; block++) {
    const int first_key = shared.blocks[block] * kDecodeBlockKeys + warp * Tile::kWarpKeys;
    __syncwarp();
    bool read = false;
    if (lane < Tile::kWarpKeys) {
      const int at = first_key + lane;
      int64_t page = -1, place_row = 0;
      if ((contains(shared.seen.low, at) || contains(shared.seen.high, at)) && item.holds(at)) {
        const KeyPlace place(item, at);
        page = place.page, place_row = place.row;
      }
      read = page >= 0;
      key_at[lane] = read ? key.at(page, place_row) : -1;
      value_at[lane] = read ? value.at(page, place_row) : -1;
    }
    const unsigned readable = __ballot_sync(0xffffffffu, read);
    if (readable == 0) continue;
    __syncwarp();

#pragma unroll 1
    for (int step = 0; step < Tile::kSteps; step += kUnroll) {
      R sums[kUnroll * kRows];
#pragma unroll
      for (int i = 0; i < kUnroll * kRows; i++) sums[i] = 0;
#pragma unroll 1
      for (int64_t col = 0; col < max_of(p.head_dim, int64_t(1)); col += Tile::kCols) {
        uint4 bits[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) bits[u] = load_raw(key, key_at[(step + u) * Tile::kSlots + slot], col + lane_col, p.head_dim);
        if (p.head_dim > Tile::kCols) load_query(col + lane_col);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
          R x[kVector];
          unpack<T>(bits[u], x);
#pragma unroll
          for (int r = 0; r < kRows; r++)
#pragma unroll
            for (int k = 0; k < kVector; k++) sums[u * kRows + r] += query[r][k] * x[k];
        }
      }
      constexpr int kLeft = kUnroll * kRows > Tile::kLanes ? kUnroll * kRows / Tile::kLanes : 1;
      const int first = fold_lanes<Tile::kLanes, kUnroll * kRows>(sums, lane);
      if (first >= 0) store_adjacent<kLeft>(sums, scores + slot * Tile::kSlotStride + step * kRows + first);
    }
    __syncwarp();

    // Scores become weights; a hidden one is -1.
    R x[Tile::kRowKeys], top = state.max;
    bool hides = false;
#pragma unroll
    for (int i = 0; i < Tile::kRowKeys; i++) {
      const int place = row_lane + i * Tile::kRowLanes, at = place % Tile::kSteps * Tile::kSlots + place / Tile::kSteps;
      const bool sees = contains(of_row.keys, first_key + at) && (readable >> at & 1);
      x[i] = minus_infinity(R());
      if (sees) x[i] = of_row.score(scores[place / Tile::kSteps * Tile::kSlotStride + place % Tile::kSteps * kRows + row], of_row.query, first_key + at);
      hides |= !sees;
      top = larger_of(top, x[i]);
    }
#pragma unroll
    for (int other = kRows; other < kRows * Tile::kRowLanes; other *= 2) top = larger_of(top, __shfl_xor_sync(0xffffffffu, top, other));
    const R base = top == minus_infinity(R()) ? R(0) : top, shrink = state.max == top ? R(1) : shrink_of(state.max, top);
    state.max = top;
    state.sum *= shrink;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Tile::kRowKeys; i++) {
      const int place = row_lane + i * Tile::kRowLanes, at = place % Tile::kSteps * Tile::kSlots + place / Tile::kSteps;
      const bool sees = contains(of_row.keys, first_key + at) && (readable >> at & 1);
      const R weight = sees ? exp(x[i] - base) : R(-1);
      if (sees) state.sum += weight;
      if (row_counts) scores[place / Tile::kSteps * Tile::kSlotStride + place % Tile::kSteps * kRows + row] = weight;
    }
    if (row_counts && row_lane == 0) shared.shrink[warp][row] = shrink;
    const bool rescales = __ballot_sync(0xffffffffu, row_counts && shrink != R(1)) != 0, selects = __ballot_sync(0xffffffffu, row_exists && hides) != 0;
    __syncwarp();
    if (rescales) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const R factor = shared.shrink[warp][r];
#pragma unroll
        for (int k = 0; k < kVector; k++) acc[r][k] *= factor;
      }
    }
    if (selects) add_values<Tile, true, T>(acc, value, value_at, scores, value_col, p.head_dim_v, slot);
    else add_values<Tile, false, T>(acc, value, value_at, scores, value_col, p.head_dim_v, slot);
  }

  // The slots of a warp, then the warps in their order.
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int k = 0; k < kVector; k++)
#pragma unroll
      for (int other = Tile::kLanes; other < 32; other *= 2) acc[r][k] += __shfl_xor_sync(0xffffffffu, acc[r][k], other);
  R sum = state.sum;
#pragma unroll
  for (int other = kRows; other < kRows * Tile::kRowLanes; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (row_counts && row_lane == 0) shared.max[warp][row] = state.max, shared.sum[warp][row] = sum;
  __syncthreads();
#pragma unroll 1
  for (int w = 0; w < Tile::kWarps; w++) {
    if (warp == w && slot == 0) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        R top = shared.max[0][r];
        for (int i = 1; i < Tile::kWarps; i++) top = larger_of(top, shared.max[i][r]);
        const R factor = shrink_of(shared.max[w][r], top);
#pragma unroll
        for (int k = 0; k < kVector; k++) {
          const R part = factor == R(0) ? R(0) : acc[r][k] * factor;
          shared.out[r][lane_col + k] = w == 0 ? part : shared.out[r][lane_col + k] + part;
        }
      }
    }
    __syncthreads();
  }

#pragma unroll 1
  for (int r = warp; r < count; r += Tile::kWarps) {
    R top = shared.max[0][r], total = 0;
    for (int w = 1; w < Tile::kWarps; w++) top = larger_of(top, shared.max[w][r]);
    for (int w = 0; w < Tile::kWarps; w++) total += shared.sum[w][r] * shrink_of(shared.max[w][r], top);
    const int64_t out_head = shared.row(r).head, out_query = shared.row(r).query, out_row = (batch * p.num_heads + out_head) * p.seqlen_q + out_query;
    if (plan.splits > 1) {
      const int64_t at = out_row * plan.splits + split;
      if (lane == 0 && piece == 0) ((R*)partial.max)[at] = top, ((R*)partial.sum)[at] = total;
      for (int c = lane; c < Tile::kCols; c += 32)
        if (piece * Tile::kCols + c < p.head_dim_v) ((R*)partial.out)[at * p.head_dim_v + piece * Tile::kCols + c] = shared.out[r][c];
      continue;
    }
    const R factor = finish_row<R>(p, out_head, &top, &total);
    if (lane == 0 && piece == 0) ((R*)p.lse)[out_row] = log_sum(top, total);
    const Matrix<T> out = matrix<T>(p, p.out, batch, out_head);
    for (int c = lane; c < Tile::kCols; c += 32) {
      const int64_t col = piece * Tile::kCols + c;
      if (col < p.head_dim_v) out.row(out_query)[col * out.col_stride] = from_real<T>(total == R(0) ? R(0) : shared.out[r][c] * factor);
    }
  }
}

constexpr int kMergeThreads = 128;

// A block per row: the splits in their order.
template <class T>
__global__ void __launch_bounds__(kMergeThreads, 8) decode_merge_kernel(const __grid_constant__ AttentionParams p, int64_t splits, DecodeScratch partial) {
  using R = Real<T>;
  const unsigned head_of_batch = block_index() / unsigned(p.seqlen_q);
  const int64_t row = block_index(), query = block_index() % unsigned(p.seqlen_q), head = head_of_batch % unsigned(p.num_heads),
                batch = head_of_batch / unsigned(p.num_heads);
  const R *const max = (const R*)partial.max + row * splits, *const sum = (const R*)partial.sum + row * splits;
  const R* const out = (const R*)partial.out + row * splits * p.head_dim_v;
  R top = max[0], total = 0;
  for (int64_t s = 1; s < splits; s++) top = larger_of(top, max[s]);
  for (int64_t s = 0; s < splits; s++) total += sum[s] * shrink_of(max[s], top);
  const R all = top;
  const R factor = finish_row<R>(p, head, &top, &total);
  if (threadIdx.x == 0) ((R*)p.lse)[row] = log_sum(top, total);
  const Matrix<T> to = matrix<T>(p, p.out, batch, head);
  for (int64_t c = threadIdx.x; c < p.head_dim_v; c += kMergeThreads) {
    R x = 0;
    for (int64_t s = 0; s < splits; s++) {
      const R shrink = shrink_of(max[s], all);
      if (shrink != R(0)) x += out[s * p.head_dim_v + c] * shrink;
    }
    to.row(query)[c * to.col_stride] = from_real<T>(total == R(0) ? R(0) : x * factor);
  }
}

constexpr int kAppendThreads = 128;

// One row of a cache, by all threads.
template <class T>
SIMT_DEVICE void append_row(T* target, int64_t target_stride, const T* source, int64_t source_stride, int cols) {
  const bool wide = target_stride == 1 && source_stride == 1 && (reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target)) % 16 == 0;
  const int whole = wide ? cols / kVec<T> : 0;
  for (int c = int(threadIdx.x); c < whole; c += kAppendThreads) reinterpret_cast<uint4*>(target)[c] = reinterpret_cast<const uint4*>(source)[c];
  for (int c = whole * kVec<T> + int(threadIdx.x); c < cols; c += kAppendThreads) target[c * target_stride] = source[c * source_stride];
}

// A block per (batch item, kv head, new key).
template <class T>
__global__ void __launch_bounds__(kAppendThreads, 8) cache_append_kernel(const __grid_constant__ CacheAppendParams p) {
  const unsigned n = unsigned(p.cache.num_new), kv_head = block_index() / n;
  const int64_t index = block_index() % n, head = kv_head % unsigned(p.num_heads_kv), batch = kv_head / unsigned(p.num_heads_kv);
  const CacheItem item(p.cache, batch);
  const int64_t key = item.before + index;
  if (key >= item.length || !item.holds(int(key))) return;
  const KeyPlace place(item, key);
  if (place.page < 0) return;
  const int64_t page = item.pages ? place.page : batch;
  append_row<T>((T*)p.key.data + page * p.key.batch_strides[0] + head * p.key.head_stride + place.row * p.key.row_stride, p.key.col_stride,
                (const T*)p.new_key.data + batch * p.new_key.batch_strides[0] + head * p.new_key.head_stride + index * p.new_key.row_stride,
                p.new_key.col_stride, int(p.head_dim));
  append_row<T>((T*)p.value.data + page * p.value.batch_strides[0] + head * p.value.head_stride + place.row * p.value.row_stride, p.value.col_stride,
                (const T*)p.new_value.data + batch * p.new_value.batch_strides[0] + head * p.new_value.head_stride + index * p.new_value.row_stride,
                p.new_value.col_stride, int(p.head_dim_v));
}

#if SIMT_EMULATED
inline int multiprocessors() { return 8; }
#else
inline int multiprocessors() {
  int device = 0, count = 0;
  return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}
#endif

// The fewest lanes whose columns hold a row, at most a warp.
template <class T>
int decode_lanes(const AttentionParams& p) {
  const int64_t cols = max_of(p.head_dim, p.head_dim_v);
  return cols <= 8 * kVec<T> ? 8 : cols <= 16 * kVec<T> ? 16 : 32;
}
inline int decode_rows(const AttentionParams& p) {
  const int64_t rows = p.num_heads / p.num_heads_kv * p.seqlen_q;
  return rows == 1 ? 1 : rows <= 4 ? 4 : kDecodeMaxRows;
}

template <class T, int kLanes, int kRows>
void launch_decode_tile(const AttentionDecodeParams& params, const DecodePlan& plan, const DecodeScratch& partial, Stream stream) {
  using Tile = DecodeTile<T, kLanes, kRows>;
  constexpr auto kernel = &attention_decode_kernel<Tile>;
  SIMT_LAUNCH(kernel, unsigned(plan.blocks(params.attention)), Tile::kThreads, sizeof(DecodeShared<Tile>), stream, params, plan, partial);
}
template <class T, int kLanes>
void launch_decode_lanes(const AttentionDecodeParams& params, const DecodePlan& plan, const DecodeScratch& partial, Stream stream) {
  switch (decode_rows(params.attention)) {
    case 1: return launch_decode_tile<T, kLanes, 1>(params, plan, partial, stream);
    case 4: return launch_decode_tile<T, kLanes, 4>(params, plan, partial, stream);
    default: return launch_decode_tile<T, kLanes, kDecodeMaxRows>(params, plan, partial, stream);
  }
}

}  // namespace

// Four blocks for each multiprocessor, shares of at least 256 slots, and of at most 8192: sums of more terms would lose precision.
template <class T>
DecodePlan decode_plan_of(const AttentionDecodeParams& params) {
  const AttentionParams& p = params.attention;
  const int64_t rows = p.num_heads / p.num_heads_kv * p.seqlen_q, tile = decode_rows(p), cols = decode_lanes<T>(p) * kVec<T>;
  DecodePlan plan;
  plan.tiles = (rows + tile - 1) / tile;
  plan.pieces = max_of(int64_t(1), (p.head_dim_v + cols - 1) / cols);
  plan.rows = p.batch * p.num_heads * p.seqlen_q;
  const int64_t others = p.batch * p.num_heads_kv * plan.tiles * plan.pieces, slots = params.cache.slots;
  plan.splits = max_of(int64_t(1), min_of((4 * multiprocessors() + others - 1) / others, (slots + 255) / 256));
  plan.splits = max_of(plan.splits, (slots + 8191) / 8192);
  return plan;
}

template <class T>
void launch_decode(const AttentionDecodeParams& params, const DecodePlan& plan, void* memory, Stream stream) {
  const AttentionParams& p = params.attention;
  Scratch scratch(memory);
  const DecodeScratch partial(p, plan, &scratch);
  switch (decode_lanes<T>(p)) {
    case 8: launch_decode_lanes<T, 8>(params, plan, partial, stream); break;
    case 16: launch_decode_lanes<T, 16>(params, plan, partial, stream); break;
    default: launch_decode_lanes<T, 32>(params, plan, partial, stream); break;
  }
  if (plan.splits > 1) SIMT_LAUNCH(decode_merge_kernel<T>, unsigned(plan.rows), kMergeThreads, 0, stream, p, plan.splits, partial);
}

template <class T>
void launch_cache_append(const CacheAppendParams& p, Stream stream) {
  SIMT_LAUNCH(cache_append_kernel<T>, unsigned(p.batch * p.num_heads_kv * p.cache.num_new), kAppendThreads, 0, stream, p);
}

}  // namespace cuda
}  // namespace tiled_attention
