#pragma once
// The pairs of one chunk of causal linear attention: W_ij = sum over features of a_i b_j exp(g_(j+1) + .. + g_i) for j <= i.
//
// One decay per token is a factor P_ij of the product a b^T; its exponents are built term by term. A decay per feature stands inside of the
// sum: a thread takes a key and some of its features through the queries behind it, one gate at a time.

#include "linear_states.cuh"

namespace tiled_attention {
namespace cuda {

// Shared memory of a kernel that works on the pairs of a chunk. left and right are the halves of stage.
template <class R, Decay kDecay, int kVectors> struct PairShared {
  R *tile, *stage, *left, *right;  // [kTile][kTile] each; [kTile][kStep] or [kStep][kTile]
  R* gates;                        // [kTile][kStep], per feature
  R* vectors;                      // [kVectors][kTile]
  int *first, *not_finite;         // [kTile], [1]
  SIMT_DEVICE explicit PairShared(unsigned char* memory) {
    simt::Carver carver(memory);
    tile = carver.take<R>(kTile * kTile);
    stage = carver.take<R>(kTile * kTile);
    left = stage, right = stage + kTile * kStep;
    gates = carver.take<R>(kDecay == Decay::Feature ? kTile * kStep : 0);
    vectors = carver.take<R>(kVectors * kTile);
    first = carver.take<int>(kTile);
    not_finite = carver.take<int>(1);
  }
  static size_t bytes() {
    return (2 * kTile * kTile + (kDecay == Decay::Feature ? kTile * kStep : 0) + kVectors * kTile) * sizeof(R) + (kTile + 1) * sizeof(int);
  }
  SIMT_DEVICE R* vector(int i) const { return vectors + i * kTile; }
};

// Rows of features, kWidth columns of them from first_col on, zeros where keep(row) is false. Returns whether a kept one is not finite.
template <int kRows, int kWidth, class T, class Keep>
SIMT_DEVICE bool load_features(const Rows<const T>& from, FeatureMap map, int64_t begin, int64_t end, int64_t first_col, int64_t cols, const Keep& keep,
                               Real<T>* to) {
  bool bad = false;
  load_tile<kRows, kWidth, Shape<Real<T>>::kThreads>(from, begin, end, first_col, cols, keep, [&](int row, int col, Real<T>(&x)[kVec<T>]) {
    const bool kept = begin + row < end && keep(row);
#pragma unroll
    for (int k = 0; k < kVec<T>; k++) {
      x[k] = kept && first_col + col + k < cols ? feature(map, x[k]) : Real<T>(0);
      bad |= !is_finite(x[k]);
    }
    put<kWidth, T>(to, row, col, x);
  });
  return bad;
}

// pairs[i][j] = P_ij for j <= i; g holds the decays of the chunk, zeros behind its last token.
template <class R> SIMT_DEVICE void fill_pair_decays(const R* g, R* pairs) {
  constexpr int kParts = Shape<R>::kThreads / kTile, kRows = kTile / kParts;
  const int j = int(threadIdx.x) % kTile, begin = int(threadIdx.x) / kTile * kRows;
  R sum = 0;
  for (int i = j; i < begin + kRows; i++) {
    if (i > j) sum += g[i];
    if (i >= begin) element<kTile>(pairs, i, j) = exp_of(sum);
  }
}

// first[i]: the first key of the chunk that has not been forgotten entirely when query i comes.
template <Decay kDecay, class T>
SIMT_DEVICE void find_first(const LinearAttentionParams& p, const Rows<const Real<T>>& log_decay, const ChunkRows& rows, int* first) {
  using R = Real<T>;
  if (threadIdx.x < kTile) {
    int j = int(threadIdx.x);
    if (kDecay == Decay::None || j >= rows.count) j = 0;
    R sum = 0;
    for (; j > 0; j--) {
      if (kDecay == Decay::Token) {
        sum += *log_decay.at(rows.begin + j, 0);
        if (exp_of(sum) == 0) break;
      } else {
        bool all = true;
        for (int64_t d = 0; d < p.head_dim && all; d++) all = exp_of(*log_decay.at(rows.begin + j, d)) == 0;
        if (all) break;
      }
    }
    first[threadIdx.x] = j;
  }
  __syncthreads();
}

// W over the features in left (a), right (b) and gates (exp(g)): with kAdd to what is in `pairs`. kForget: b may be what is not finite.
template <bool kForget, class R> SIMT_DEVICE void run_pairs(const R* left, const R* right, const R* gates, bool add, R* pairs) {
  constexpr int kV = Shape<R>::kV, kSlices = Shape<R>::kThreads / kTile, kWidth = kStep / kSlices;
  const int j = int(threadIdx.x) / kSlices, slice = int(threadIdx.x) % kSlices, first_group = slice * (kWidth / kV);
  R run[kWidth];
#pragma unroll
  for (int g = 0; g < kWidth / kV; g++) {
    const Vec16<R> v = vec_at<kStep>(right, j, first_group + g);
#pragma unroll
    for (int i = 0; i < kV; i++) run[g * kV + i] = v.x[i];
  }
  // All lanes of a warp go the same way.
  for (int i = int(threadIdx.x) / 32 * 32 / kSlices; i < kTile; i++) {
    R sum = 0;
#pragma unroll
    for (int g = 0; g < kWidth / kV; g++) {
      const Vec16<R> a = vec_at<kStep>(left, i, first_group + g), gate = vec_at<kStep>(gates, i, first_group + g);
#pragma unroll
      for (int e = 0; e < kV; e++) {
        R& x = run[g * kV + e];
        if (i > j) x = kForget ? decayed(x, gate.x[e]) : x * gate.x[e];
        sum = multiply_add(a.x[e], x, sum);
      }
    }
#pragma unroll
    for (int width = kSlices / 2; width; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    if (slice == 0) {
      R& to = element<kTile>(pairs, i, j);
      to = i < j ? R(0) : add ? to + sum : sum;
    }
  }
}

// W into the blocks of the threads, 0 where a query does not see a key. With a decay per token P is left in shared.tile. Ends with a barrier.
template <class T, Decay kDecay, class Shared>
SIMT_DEVICE void pair_weights(const LinearAttentionParams& p, const Rows<const T>& query, const Rows<const T>& key, const Rows<const uint8_t>& mask,
                              const Rows<const Real<T>>& log_decay, const ChunkRows& rows, const Shared& shared, Block<Real<T>>& w) {
  using R = Real<T>;
  constexpr int kThreads = Shape<R>::kThreads;
  const int64_t end = rows.begin + rows.count;
  const auto visible = [&](int row) { return is_visible(mask, rows.begin + row); };
  if (kDecay == Decay::Token) {
    R* const g = shared.vector(0);
    if (threadIdx.x < kTile) g[threadIdx.x] = int(threadIdx.x) < rows.count ? *log_decay.at(rows.begin + threadIdx.x, 0) : R(0);
    __syncthreads();
    fill_pair_decays<R>(g, shared.tile);
    if (p.head_dim == 0) __syncthreads();  // no step follows
  }
  clear<R>(w);
  for (int64_t d = 0; d < p.head_dim; d += kStep) {
    load_features<kTile, kStep>(query, p.query_map, rows.begin, end, d, p.head_dim, KeepAll(), shared.left);
    const bool bad = load_features<kTile, kStep>(key, p.key_map, rows.begin, end, d, p.head_dim, visible, shared.right);
    if (kDecay == Decay::Feature) {
      load_tile<kTile, kStep, kThreads>(log_decay, rows.begin, end, d, p.head_dim, KeepAll(), [&](int row, int col, R(&x)[kVec<R>]) {
#pragma unroll
        for (int k = 0; k < kVec<R>; k++) x[k] = exp_of(x[k]);
        put<kStep, R>(shared.gates, row, col, x);
      });
    }
    if (bad) atomicAdd(shared.not_finite, 1);
    __syncthreads();
    if constexpr (kDecay != Decay::Feature) multiply<Lies::Along, kStep, Lies::Along, kStep>(w, shared.left, 0, shared.right, depth_of(p.head_dim - d));
    else if (*shared.not_finite) run_pairs<true>(shared.left, shared.right, shared.gates, d > 0, shared.tile);
    else run_pairs<false>(shared.left, shared.right, shared.gates, d > 0, shared.tile);
    __syncthreads();
  }
  for_block<R>([&](int r, int c) {
    const int i = row_of<R>(r), j = col_of<R>(c);
    const bool sees = j <= i && i < rows.count;
    if (kDecay == Decay::Feature) w[r][c] = sees && p.head_dim > 0 ? element<kTile>(shared.tile, i, j) : R(0);
    else if (kDecay == Decay::Token) w[r][c] = sees ? decayed(w[r][c], element<kTile>(shared.tile, i, j)) : R(0);
    else w[r][c] = sees ? w[r][c] : R(0);
  });
  __syncthreads();
}

}  // namespace cuda
}  // namespace tiled_attention
