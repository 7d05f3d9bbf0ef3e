#pragma once
// Backward, what the kernels do with one tile of pairs: products, weights and gradients of the scores, rows that must not be multiplied by zero.
// C fragments: a warp has kSets sets of 16 rows; lane = 4 g + t has rows g and g + 8 of each, columns 2 t and 2 t + 1 of each 8.

#include "attention_bwd_rows.cuh"

namespace tiled_attention {
namespace cuda {

template <class T, int kSets, int kTiles>
SIMT_DEVICE void pack(PackedTile<kSets, kTiles>& packed, const PairTile<kSets, kTiles>& c) {
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) packed[s][n][r] = simt::pack2<T>(c[s][n][2 * r], c[s][n][2 * r + 1]);
}

// c times a factor, rounded once, into the warp's rows of a tile.
template <class T, int D, int kSets>
SIMT_DEVICE void put_rounded(T* tile, const PairTile<kSets, D / 8>& c, float factor, int warp_row, int lane) {
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int d = 0; d < D / 8; d++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *(uint32_t*)(chunk_at<D>(tile, warp_row + s * 16 + lane / 4 + 8 * r, d) + 2 * (lane % 4)) =
            simt::pack2<T>(c[s][d][2 * r] * factor, c[s][d][2 * r + 1] * factor);
}

// Rows may be beyond seqlen_q, keys beyond seqlen_kv.
template <bool kFeatures>
SIMT_DEVICE bool sees_pair(int64_t seqlen_q, const RowEntry* rows, const BackwardHead& head, int64_t query, int key) {
  if (query >= seqlen_q || !rows[query].contains(key)) return false;
  return !kFeatures || (head.list.sees(query, key) && !head.features.hides(query, key));
}

// Which of the lane's pairs are visible, bit 4 n + i of a word for each set of rows: found while the tile's scores are not yet in registers.
template <int kSets>
using PairMask = uint32_t[kSets];

template <int kSets, int kTiles>
SIMT_DEVICE void hide(PairTile<kSets, kTiles>& c, const PairMask<kSets>& visible) {
  static_assert(kTiles <= 8, "one word");
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!(visible[s] >> (4 * n + i) & 1)) c[s][n][i] = 0;
      }
}

constexpr uint16_t kHiddenWeight = 0xffff;  // a NaN that no conversion makes

// The warp's weights to [rows of the block][8 kTiles], kHiddenWeight where sees(row of the block, column) is false.
template <class T, int kSets, int kTiles, class Sees>
SIMT_DEVICE void put_weights(T* weights, const PackedTile<kSets, kTiles>& packed, int warp_row, int lane, Sees sees) {
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = warp_row + s * 16 + lane / 4 + 8 * (i >> 1), column = n * 8 + 2 * (lane % 4) + (i & 1);
        weights[row * kTiles * 8 + column] = T{sees(row, column) ? uint16_t(packed[s][n][i >> 1] >> (16 * (i & 1))) : kHiddenWeight};
      }
  __syncwarp();
}

// Adds weight * element to c for what is inf or NaN in the first kRight rows of `right`, for the pairs that are visible, and puts 0 in its
// place: on tensor cores a hidden pair would count as 0 x NaN. All kThreads threads of the block take part.
template <class T, int D, int kSets, int kRight, int kThreads>
SIMT_DEVICE void add_not_finite_rows(PairTile<kSets, D / 8>& c, const T* weights, T* right, int warp_row, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int row = 0; row < kRight; row++) {
#pragma unroll
    for (int d = 0; d < D / 8; d++) {
      const T* pair = chunk_at<D>(right, row, d) + 2 * t;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float element = simt::to_float(pair[i]);
        if (is_finite(element)) continue;
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const T weight = weights[(warp_row + s * 16 + g + 8 * r) * kRight + row];
            if (weight.u != kHiddenWeight) c[s][d][2 * r + i] += simt::to_float(weight) * element;
          }
      }
    }
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kRight * D; i += kThreads) {
    if (!is_finite(simt::to_float(right[i]))) right[i] = T{0};
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace tiled_attention
