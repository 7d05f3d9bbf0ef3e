#pragma once
// Tiles of 16-bit elements in shared memory: rows of D elements in chunks of 16 bytes whose order is permuted from row to row, so that
// neither ldmatrix nor a 16-byte access of eight rows meets a bank twice.

#include "../core/view.h"
#include "address.cuh"

namespace tiled_attention {
namespace cuda {

#ifndef SIMT_FAULT
#define SIMT_FAULT 0  // seeded faults for the tests of the emulator
#endif

// D a multiple of 64: a row is whole sets of 8 chunks.
template <int D, class T>
SIMT_DEVICE T* chunk_at(T* tile, int row, int chunk) {
#if SIMT_FAULT == 3
  return tile + row * D + chunk * 8;
#else
  return tile + row * D + (chunk ^ (row & 7)) * 8;
#endif
}

// A matrix whose rows may be read or written 16 bytes at a time.
template <class T>
struct TileMatrix {
  Matrix<T> m;
  int64_t rows;
  int cols;
  bool aligned;

  SIMT_DEVICE TileMatrix(const Matrix<T>& m, int64_t rows, int64_t cols) : m(m), rows(rows), cols(int(cols)) {
    constexpr int kVector = 16 / int(sizeof(T));
    aligned = m.col_stride == 1 && m.row_stride % kVector == 0 && uintptr_t(m.data) % 16 == 0;
  }
};

// Rows [first, first + kRows) into a tile; what lies beyond the matrix is 0. The copies may still be under way: commit and wait follow.
template <int D, int kRows, int kThreads, class T>
SIMT_DEVICE void load_tile(T* tile, const TileMatrix<const T>& source, int64_t first) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;
  const int row = int(threadIdx.x) / kChunks, chunk = int(threadIdx.x) % kChunks, left = source.cols - chunk * 8;
  const int64_t rows = source.rows - first - row;
  if (source.aligned && (left >= 8 || left <= 0)) {
    const T* from = source.m.row(first + row) + chunk * 8;
    const int64_t step = kStep * source.m.row_stride;
#pragma unroll
    for (int i = 0; i < kRows / kStep; i++) {
#if SIMT_FAULT == 5
      const bool copies = i * kStep <= rows && left > 0;
#else
      const bool copies = i * kStep < rows && left > 0;
#endif
      simt::cp_async16(chunk_at<D>(tile, row + i * kStep, chunk), copies ? from : source.m.data, copies);
      from += step;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kRows / kStep; i++) {
      T* const to = chunk_at<D>(tile, row + i * kStep, chunk);
      const T* from = source.m.row(first + row + i * kStep) + chunk * 8 * source.m.col_stride;
#pragma unroll 1
      for (int j = 0; j < 8; j++, from += source.m.col_stride) to[j] = i * kStep < rows && j < left ? *from : T{0};
    }
  }
}

// The first `cols` columns of rows [first, first + kRows) of a tile to a matrix.
template <int D, int kRows, int kThreads, class T>
SIMT_DEVICE void store_tile(const T* tile, const TileMatrix<T>& target, int64_t first) {
  constexpr int kChunks = D / 8;
#pragma unroll 4
  for (int i = 0; i < kRows * kChunks / kThreads; i++) {
    const int index = int(threadIdx.x) + i * kThreads, row = index / kChunks, chunk = index % kChunks, left = target.cols - chunk * 8;
    if (first + row >= target.rows || left <= 0) continue;
    const T* from = chunk_at<D>(tile, row, chunk);
    T* to = target.m.row(first + row) + chunk * 8 * target.m.col_stride;
    if (target.aligned && left >= 8) {
      *(uint4*)to = *(const uint4*)from;
    } else {
#pragma unroll 1
      for (int j = 0; j < 8 && j < left; j++, to += target.m.col_stride) *to = from[j];
    }
  }
}

// Where a lane reads the fragments of mma.m16n8k16. A: 16 rows, 16 columns. B of the transposed tile: 16 rows (the columns of B), as two
// fragments {b[0], b[1]} and {b[2], b[3]} of 8. B of the tile itself: 16 rows, 16 columns. Tiles are aligned to 128 bytes.
template <int D>
struct Fragments {
  SharedAddress lane_address;

  template <class T>
  SIMT_DEVICE static Fragments a(const T* tile, int row, int lane) {
    return {shared_address(chunk_at<D>(tile, row + lane % 16, lane / 16))};
  }
  template <class T>
  SIMT_DEVICE static Fragments b_transposed(const T* tile, int lane) {
    return {shared_address(chunk_at<D>(tile, lane / 16 * 8 + lane % 8, lane / 8 & 1))};
  }
  template <class T>
  SIMT_DEVICE static Fragments b(const T* tile, int lane) {
    return a(tile, 0, lane);
  }
  // `row` a multiple of 8 and `chunk` an even number, both known when compiling.
  SIMT_DEVICE void load(uint32_t (&r)[4], int row, int chunk) const { ldmatrix(r, at(row, chunk)); }
  SIMT_DEVICE void load_transposed(uint32_t (&r)[4], int row, int chunk) const { ldmatrix_transposed(r, at(row, chunk)); }

 private:
  SIMT_DEVICE SharedAddress at(int row, int chunk) const {
#if SIMT_FAULT == 3
    return lane_address + SharedAddress(row * D * 2 + chunk * 16);
#else
    return (lane_address ^ SharedAddress(chunk % 8 * 16)) + SharedAddress(row * D * 2 + chunk / 8 * 128);
#endif
  }
};

// C fragments: a warp has kSets sets of 16 rows; lane = 4 g + t has rows g and g + 8 of each, columns 2 t and 2 t + 1 of each 8.
template <int kSets, int kTiles>
using PairTile = float[kSets][kTiles][4];
// Two columns of 16 bit in each word, for rows g and g + 8: the A fragments of the next product.
template <int kSets, int kTiles>
using PackedTile = uint32_t[kSets][kTiles][2];

template <int kSets, int kTiles>
SIMT_DEVICE void clear(PairTile<kSets, kTiles>& c) {
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[s][n][i] = 0;
}

// c += left right^T: the warp's rows of one tile and the first 8 kTiles rows of another, over D columns.
template <class T, int D, int kSets, int kTiles>
SIMT_DEVICE void multiply_transposed(PairTile<kSets, kTiles>& c, const Fragments<D>& left_tile, const Fragments<D>& right_tile) {
  const Fragments<D> left = {opaque(left_tile.lane_address)}, right = {opaque(right_tile.lane_address)};
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    uint32_t a[kSets][4];
#pragma unroll
    for (int s = 0; s < kSets; s++) left.load(a[s], s * 16, 2 * k);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      right.load(b, n * 8, 2 * k);
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        simt::mma_16816<T>(c[s][n], a[s], b[0], b[1]);
        simt::mma_16816<T>(c[s][n + 1], a[s], b[2], b[3]);
      }
    }
  }
}

// c += weights right: over the first 8 kTiles rows of a tile of D columns.
template <class T, int D, int kSets, int kTiles>
SIMT_DEVICE void multiply(PairTile<kSets, D / 8>& c, const PackedTile<kSets, kTiles>& weights, const Fragments<D>& right_tile) {
  const Fragments<D> right = {opaque(right_tile.lane_address)};
#pragma unroll
  for (int k = 0; k < kTiles / 2; k++) {
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t b[4];
      right.load_transposed(b, k * 16, d);
#pragma unroll
      for (int s = 0; s < kSets; s++) {
        const uint32_t a[4] = {weights[s][2 * k][0], weights[s][2 * k][1], weights[s][2 * k + 1][0], weights[s][2 * k + 1][1]};
        simt::mma_16816<T>(c[s][d], a, b[0], b[1]);
        simt::mma_16816<T>(c[s][d + 1], a, b[2], b[3]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace tiled_attention
