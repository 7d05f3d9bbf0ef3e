#pragma once
// The states of linear attention at the boundaries of chunks, and in the backward the gradients of states: what each chunk adds, all chunks
// at once, then one pass over the chunks in order, all elements at once.
//
//   S_(c+1) = through_c S_c + sum over tokens j of c of (out_j b_j) v_j^T        z_(c+1) = through_c z_c + sum_j out_j b_j
//   dS_c = through_c dS_(c+1) + sum over tokens i of c of (in_i a_i) (w_i do_i)^T     dz_c = through_c dz_(c+1) - sum_i t_i w_i in_i a_i
//
// in_i = exp(g_0 + .. + g_i), out_j = exp(g_(j+1) + .. + g_last), through = in_last, counted from the start of a chunk, per token or per
// feature. No sum of decays is ever subtracted from another: -inf resets exactly, and -3e37 does not swallow its neighbours.
// z is one more column of S with a value of 1: it takes the same steps, so that values of 1 give exactly 1.

#include "../core/mask.h"
#include "../core/scratch.h"
#include "kernels.h"
#include "linear_packed.cuh"

namespace tiled_attention {
namespace cuda {

enum class Decay { None, Token, Feature };

// Thread blocks of a kernel that the registers of a multiprocessor hold: as many as there are without spills.
template <class R, Decay kDecay> constexpr int kContributionBlocks = kDecay == Decay::Feature ? (sizeof(R) == 8 ? 1 : 2) : (sizeof(R) == 8 ? 2 : 3);
template <class R, Decay kDecay> constexpr int kOutBlocks = sizeof(R) == 8 ? 1 : kDecay == Decay::Feature ? 2 : 3;
template <class R, Decay kDecay> constexpr int kQueryGradBlocks = sizeof(R) == 8 ? 1 : 2;
template <class R, Decay kDecay> constexpr int kKeyGradBlocks = sizeof(R) == 8 ? 1 : kDecay == Decay::Feature ? 2 : 3;

// A run of chunks of `span` tokens, of all heads, whose states are in memory at a time. Without causality span is any multiple of kTile.
struct Segment {
  int64_t first_chunk = 0, chunks = 0, span = kTile;
  int64_t state_size = 0;  // S [head_dim][head_dim_v], z [head_dim], rounded up
  int64_t kept_tokens = 0;  // rows of what is kept per token and head, of all segments; 0: those of the chunks
  int64_t all_chunks = 0;   // of all segments
  PackedChunks packed;
  HOST_DEVICE int64_t tokens() const { return kept_tokens ? kept_tokens : chunks * span; }
};

// The tokens of one chunk: rows [begin, begin + count) of the tensors, rows [local, local + count) of what is kept for a segment.
struct ChunkRows {
  int64_t begin, local, sequence;  // packed: which one
  int count;                       // packed: 0 where the chunk is not used
  SIMT_DEVICE ChunkRows(const Segment& s, int64_t chunk, int64_t seqlen) : local(((s.kept_tokens ? s.first_chunk : 0) + chunk) * s.span) {
    if (s.packed.chunks) {
      const PackedChunk packed = s.packed.chunks[s.first_chunk + chunk];
      begin = packed.begin, count = packed.count, sequence = packed.sequence;
    } else {
      begin = (s.first_chunk + chunk) * s.span, count = int(min_of(s.span, seqlen - begin)), sequence = 0;
    }
  }
};
// Where the state before a chunk lies, or the gradient of the one behind it; batch_head counts the heads that have states.
SIMT_DEVICE int64_t state_of(const LinearAttentionParams& p, const Segment& s, int64_t batch_head, int64_t chunk, const ChunkRows& rows) {
  if (p.causal) return batch_head * s.chunks + chunk;
  return s.packed.chunks ? rows.sequence * p.num_heads_kv + batch_head : batch_head;
}

// Of the tokens of a segment, [batch * num_heads_kv][tokens][columns]; through [..][chunks][columns]. One column or head_dim.
template <class R> struct Decays {
  R *in = nullptr, *out = nullptr, *through = nullptr;
  int64_t columns = 0;
};

// Which token block, and of which head, a thread block computes.
struct BlockIndex {
  int64_t part, chunk, head, batch, batch_head;  // batch_head counts heads over the batch
  // blockIdx.x = (batch_head * chunks + chunk) * parts + part
  SIMT_DEVICE BlockIndex(int64_t parts, int64_t chunks, int64_t heads) {
    int64_t index = blockIdx.x;
    part = index % parts, index /= parts;
    chunk = index % chunks, batch_head = index / chunks;
    head = batch_head % heads, batch = batch_head / heads;
  }
};

SIMT_DEVICE bool is_visible(const Rows<const uint8_t>& mask, int64_t token) { return !mask.data || *mask.at(0, token); }

template <class Params> struct IsForward {
  static constexpr bool value = false;
};
template <> struct IsForward<LinearAttentionParams> {
  static constexpr bool value = true;
};
HOST_DEVICE const LinearAttentionParams& forward_of(const LinearAttentionParams& p) { return p; }
HOST_DEVICE const LinearAttentionParams& forward_of(const LinearAttentionBackwardParams& p) { return p.forward; }
// The factors of a state, and of the gradient of a state.
template <class T> SIMT_DEVICE Rows<const T> left_rows(const LinearAttentionParams& p, int64_t batch, int64_t head) {
  return rows_of<const T>(p, p.key, batch, head);
}
template <class T> SIMT_DEVICE Rows<const T> right_rows(const LinearAttentionParams& p, int64_t batch, int64_t head) {
  return rows_of<const T>(p, p.value, batch, head);
}
template <class T> SIMT_DEVICE Rows<const T> left_rows(const LinearAttentionBackwardParams& p, int64_t batch, int64_t head) {
  return rows_of<const T>(p.forward, p.forward.query, batch, head);
}
template <class T> SIMT_DEVICE Rows<const T> right_rows(const LinearAttentionBackwardParams& p, int64_t batch, int64_t head) {
  return rows_of<const T>(p.forward, p.grad_out, batch, head);
}

namespace {

constexpr int kScanThreads = 128;

// How many sequences are scanned at a time.
HOST_DEVICE int64_t scanned(const LinearAttentionParams& p, const Segment& s) {
  return s.packed.chunks ? min_of(p.num_sequences, max_of(s.chunks, int64_t(1))) : p.batch;
}

template <class R> __global__ void __launch_bounds__(kScanThreads, 4) linear_decay_kernel(LinearAttentionParams p, Segment s, Decays<R> decays) {
  const int64_t index = int64_t(blockIdx.x) * kScanThreads + threadIdx.x;
  if (index >= p.batch * p.num_heads_kv * s.chunks * decays.columns) return;
  const int64_t col = index % decays.columns, chunk = index / decays.columns % s.chunks, batch_head = index / decays.columns / s.chunks;
  const Rows<const R> g = rows_of<const R>(p, p.log_decay, batch_head / p.num_heads_kv, batch_head % p.num_heads_kv);
  const ChunkRows rows(s, chunk, p.seqlen_kv);
  const int64_t begin = rows.begin, count = rows.count;
  const int64_t at = (batch_head * s.tokens() + rows.local) * decays.columns + col;
  R sum = 0;
  for (int64_t i = 0; i < count; i++) decays.in[at + i * decays.columns] = exp_of(sum += *g.at(begin + i, col));
  decays.through[(batch_head * s.chunks + chunk) * decays.columns + col] = exp_of(sum);
  sum = 0;
  for (int64_t j = count - 1; j >= 0; j--) {
    decays.out[at + j * decays.columns] = exp_of(sum);
    sum += *g.at(begin + j, col);
  }
}

// What a chunk adds to the state, or in the backward to the gradient of the state, for 64 features and 64 value columns.
// weights, deltas: w_i and t_i, [batch * num_heads][tokens of the segment].
template <class T, Decay kDecay, class Params>
__global__ void __launch_bounds__(Shape<Real<T>>::kThreads, kContributionBlocks<Real<T>, kDecay>)
    linear_contribution_kernel(Params params, Segment s, Decays<Real<T>> decays, const Real<T>* weights, const Real<T>* deltas, Real<T>* states) {
  using R = Real<T>;
  constexpr bool kBackward = !IsForward<Params>::value;
  const LinearAttentionParams& p = forward_of(params);
  constexpr int kThreads = Shape<R>::kThreads;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carver(shared);
  R* const left = carver.take<R>(kStep * kTile);
  R* const right = carver.take<R>(kStep * kTile);
  int* const not_finite = carver.take<int>(1);

  const int64_t value_blocks = max_of(int64_t(1), blocks_of(p.head_dim_v)), feature_blocks = blocks_of(p.head_dim);
  const BlockIndex at(feature_blocks * value_blocks, s.chunks, p.num_heads_kv);
  const int64_t first_feature = at.part / value_blocks * kTile, first_col = at.part % value_blocks * kTile;
  const int64_t seqlen = kBackward ? p.seqlen_q : p.seqlen_kv, group = kBackward ? p.num_heads / p.num_heads_kv : 1;
  const ChunkRows rows(s, at.chunk, seqlen);
  if (rows.count == 0) return;
  const int64_t begin = rows.begin, end = begin + rows.count, first_token = begin - rows.local;
  const Rows<const uint8_t> mask = kBackward ? Rows<const uint8_t>() : rows_of<const uint8_t>(p, p.key_mask, at.batch, at.head);
  // The decay from a token to the end of its chunk, or from the start of the chunk to the token.
  const R* const decay = (kBackward ? decays.in : decays.out) + at.batch_head * s.tokens() * decays.columns;
  const FeatureMap map = kBackward ? p.query_map : p.key_map;
  if (kDecay == Decay::Feature) {
    if (threadIdx.x == 0) *not_finite = 0;
    __syncthreads();
  }

  Block<R> acc;
  clear<R>(acc);
  R sum = 0;  // of one feature
  for (int64_t h = 0; h < group; h++) {
    const int64_t head = at.head * group + h, query_head = at.batch * p.num_heads + head;
    const Rows<const T> keys = left_rows<T>(params, at.batch, head), values = right_rows<T>(params, at.batch, head);
    const R *const w = kBackward ? weights + query_head * s.tokens() : nullptr, *const t = kBackward ? deltas + query_head * s.tokens() : nullptr;
    for (int64_t token = begin; token < end; token += kStep) {
      const int64_t local = token - first_token;
      // A token that counts for nothing is not read.
      const auto keep = [&](int row) {
        if (token + row >= end || (!kBackward && !is_visible(mask, token + row))) return false;
        if (kBackward && w[local + row] == 0) return false;
        return kDecay != Decay::Token || decay[local + row] != 0;
      };
      bool bad = false;
      load_tile<kStep, kTile, kThreads>(keys, token, end, first_feature, p.head_dim, keep, [&](int row, int col, R(&x)[kVec<T>]) {
        const bool kept = token + row < end && keep(row);
        const R factor = kDecay == Decay::Token && kept ? decay[local + row] : R(1);
#pragma unroll
        for (int k = 0; k < kVec<T>; k++) {
          x[k] = kept && first_feature + col + k < p.head_dim ? feature(map, x[k]) : R(0);
          if (kDecay == Decay::Token) x[k] *= factor;
          if (kDecay == Decay::Feature && kept && first_feature + col + k < p.head_dim)
            x[k] = decayed(x[k], decay[(local + row) * p.head_dim + first_feature + col + k]);
        }
        put<kTile, T>(left, row, col, x);
      });
      load_tile<kStep, kTile, kThreads>(values, token, end, first_col, p.head_dim_v, keep, [&](int row, int col, R(&x)[kVec<T>]) {
        const R factor = kBackward && token + row < end ? w[local + row] : R(1);
#pragma unroll
        for (int k = 0; k < kVec<T>; k++) {
          if (kBackward) x[k] *= factor;
          bad |= !is_finite(x[k]);
        }
        put<kTile, T>(right, row, col, x);
      });
      if (kDecay == Decay::Feature && bad) atomicAdd(not_finite, 1);
      __syncthreads();
      const int depth = depth_of(end - token);
      if constexpr (kDecay == Decay::Feature)
        multiply<Lies::Down, kTile, Lies::Down, kTile>(acc, left, 0, right, depth, *not_finite != 0, [&](int row, int k) {
          return token + k < end && first_feature + row < p.head_dim && decay[(local + k) * p.head_dim + first_feature + row] != 0;
        });
      else multiply<Lies::Down, kTile, Lies::Down, kTile>(acc, left, 0, right, depth);
      if (first_col == 0 && threadIdx.x < kTile)
        for (int k = 0; k < depth; k++) {
          R one = 1;
          if (kBackward) one = token + k < end && w[local + k] != 0 ? -t[local + k] * w[local + k] : R(0);
          sum = multiply_add(element<kTile>(left, k, int(threadIdx.x)), one, sum);
        }
      __syncthreads();
    }
  }
  R* const state = states + (at.batch_head * s.chunks + at.chunk) * s.state_size;
  store_block<R>(Rows<R>(state, p.head_dim_v, 1), first_feature, p.head_dim, first_col, p.head_dim_v, acc);
  if (first_col == 0 && threadIdx.x < kTile && first_feature + threadIdx.x < p.head_dim) state[p.head_dim * p.head_dim_v + first_feature + threadIdx.x] = sum;
}

// One state, or gradient of a state, per head of each sequence: as the caller has it, and [heads][state_size].
template <class R> struct StateEnd {
  R *kv = nullptr, *k_sum = nullptr;  // each may be null
  R* whole = nullptr;                 // may be null
};
// The state where a segment meets its neighbours, [heads_kv][state_size]; not the same memory, for a sequence may end where another one begins.
template <class R> struct Carry {
  const R* in = nullptr;
  R* out = nullptr;  // may be null
};

// In place of what each chunk adds the state before it; with kReverse what each adds to the gradient of the state becomes the gradient of the
// state behind it. first: where a sequence starts, zeros if null. last: where to leave its end.
template <class R, bool kReverse>
__global__ void __launch_bounds__(kScanThreads)
    linear_scan_kernel(LinearAttentionParams p, Segment s, Decays<R> decays, StateEnd<const R> first, R* states, StateEnd<R> last, Carry<R> carry) {
  constexpr int kAhead = 4;
  const int64_t kv_size = p.head_dim * p.head_dim_v, size = kv_size + p.head_dim, index = int64_t(blockIdx.x) * kScanThreads + threadIdx.x;
  const int64_t item = index / size, x = index % size, feature = x < kv_size ? x / p.head_dim_v : x - kv_size;
  const bool packed = s.packed.chunks != nullptr;
  const int64_t together = scanned(p, s), sequences = packed ? p.num_sequences : p.batch, first_head = item % p.num_heads_kv;
  int64_t sequence = item / p.num_heads_kv;
  if (sequence >= together) return;
  const int64_t kept_head = packed ? first_head : item, begin_segment = s.first_chunk, end_segment = s.first_chunk + s.chunks;
  const int64_t column = decays.columns > 1 ? feature : 0, step = kReverse ? -s.state_size : s.state_size;
  const int64_t through_step = kReverse ? -decays.columns : decays.columns;
  // Packed: every so many sequences from the first one of the segment on. Those without tokens belong to where they stand.
  if (packed && begin_segment > 0) sequence += s.packed.chunks[begin_segment].sequence;
  for (; sequence < sequences; sequence += together) {
    int64_t begin = 0, end = s.all_chunks;
    if (packed) {
      begin = s.packed.first[sequence], end = s.packed.first[sequence + 1];
      if (begin > end_segment) return;
      if (begin == end_segment && end > begin) continue;
    }
    const bool begins = begin >= begin_segment, ends = end <= end_segment;
    begin = max_of(begin, begin_segment), end = min_of(end, end_segment);
    const int64_t head = sequence * p.num_heads_kv + first_head, first_chunk = kept_head * s.chunks + (kReverse ? end - 1 : begin) - begin_segment;
    R* at = states + first_chunk * s.state_size + x;
    const R* through = decays.through + first_chunk * decays.columns + column;
    R state = 0;
    if (!(kReverse ? ends : begins)) state = carry.in[kept_head * s.state_size + x];
    else if (x < kv_size && first.kv) state = first.kv[head * kv_size + x];
    else if (x >= kv_size && first.k_sum) state = first.k_sum[head * p.head_dim + feature];
    for (int64_t left = end - begin; left > 0; left -= kAhead, at += kAhead * step, through += kAhead * through_step) {
      R added[kAhead], factor[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; k++) {
        added[k] = k < left ? at[k * step] : R(0);
        factor[k] = k < left && decays.columns ? through[k * through_step] : R(1);
      }
#pragma unroll
      for (int k = 0; k < kAhead; k++) {
        if (k >= left) break;
        at[k * step] = state;
        state = factor[k] == 0 ? added[k] : multiply_add(state, factor[k], added[k]);
      }
    }
    if (!(kReverse ? begins : ends)) {
      if (carry.out) carry.out[kept_head * s.state_size + x] = state;
      continue;
    }
    if (last.whole) last.whole[head * s.state_size + x] = state;
    if (x < kv_size && last.kv) last.kv[head * kv_size + x] = state;
    if (x >= kv_size && last.k_sum) last.k_sum[head * p.head_dim + feature] = state;
  }
}

}  // namespace

// ---- launches ----

inline unsigned scan_blocks(int64_t count) { return unsigned((count + kScanThreads - 1) / kScanThreads); }

template <class T> size_t contribution_bytes() { return 2 * kStep * kTile * sizeof(Real<T>) + sizeof(int); }

template <class R> void launch_decays(const LinearAttentionParams& p, const Segment& s, const Decays<R>& decays, Stream stream) {
  const int64_t count = p.batch * p.num_heads_kv * s.chunks * decays.columns;
  if (count == 0) return;
  constexpr auto kernel = &linear_decay_kernel<R>;
  SIMT_LAUNCH(kernel, scan_blocks(count), kScanThreads, 0, stream, p, s, decays);
}

// weights and deltas: w_i and t_i, in the backward.
template <class T, Decay kDecay, class Params>
void launch_contributions(const Params& params, const Segment& s, const Decays<Real<T>>& decays, const Real<T>* weights, const Real<T>* deltas, Real<T>* states,
                          Stream stream) {
  const LinearAttentionParams& p = forward_of(params);
  const int64_t parts = blocks_of(p.head_dim) * max_of(int64_t(1), blocks_of(p.head_dim_v));
  const int64_t blocks = p.batch * p.num_heads_kv * s.chunks * parts;
  if (blocks == 0) return;
  constexpr auto kernel = &linear_contribution_kernel<T, kDecay, Params>;
  SIMT_LAUNCH(kernel, unsigned(blocks), Shape<Real<T>>::kThreads, contribution_bytes<T>(), stream, params, s, decays, weights, deltas, states);
}

template <class R, bool kReverse>
void launch_scan(const LinearAttentionParams& p, const Segment& s, const Decays<R>& decays, const StateEnd<const R>& first, R* states, const StateEnd<R>& last,
                 const Carry<R>& carry, Stream stream) {
  const int64_t count = scanned(p, s) * p.num_heads_kv * (p.head_dim * p.head_dim_v + p.head_dim);
  if (count == 0) return;
  constexpr auto kernel = &linear_scan_kernel<R, kReverse>;
  SIMT_LAUNCH(kernel, scan_blocks(count), kScanThreads, 0, stream, p, s, decays, first, states, last, carry);
}

}  // namespace cuda
}  // namespace tiled_attention
