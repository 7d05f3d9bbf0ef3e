#pragma once
// Products of tiles in shared memory, in Real, with plain multiply-adds.
//
// Every tile lies as its matrix does in global memory, rows of kStep or kTile elements in groups of 16 bytes, group g of row r at
// g ^ (r / kV & 7). A thread owns elements (row_of(r), col_of(c)) of a 64 x 64 result: kV neighbouring rows and columns at a time. With that
// neither the rows nor the columns of an operand need be transposed, and eight lanes that read 16 bytes each always meet eight different
// groups of banks: along a row, down a column of groups, or all the same address.

#include "load.cuh"

namespace tiled_attention {
namespace cuda {

// Tokens of a chunk, features and value columns of a block; and how much of the summed dimension is in shared memory at a time.
constexpr int kTile = 64, kStep = 32;

HOST_DEVICE int64_t blocks_of(int64_t size) { return (size + kTile - 1) / kTile; }

template <class R> struct Shape {
  static constexpr int kV = kVec<R>;
  // 8 x 4 elements a thread; half as many where they take two registers each.
  static constexpr int kRows = sizeof(R) == 4 ? 8 : 4, kCols = 4;
  static constexpr int kLanesX = kTile / kCols, kLanesY = kTile / kRows, kThreads = kLanesX * kLanesY;
};
template <class R> using Block = R[Shape<R>::kRows][Shape<R>::kCols];

template <class R> SIMT_DEVICE int lane_x() { return int(threadIdx.x) % Shape<R>::kLanesX; }
template <class R> SIMT_DEVICE int lane_y() { return int(threadIdx.x) / Shape<R>::kLanesX; }
template <class R> SIMT_DEVICE int row_of(int r) {
  constexpr int kV = Shape<R>::kV;
  return lane_y<R>() * kV + r % kV + r / kV * (kV * Shape<R>::kLanesY);
}
template <class R> SIMT_DEVICE int col_of(int c) {
  constexpr int kV = Shape<R>::kV;
  return lane_x<R>() * kV + c % kV + c / kV * (kV * Shape<R>::kLanesX);
}

template <int kWidth, class R> SIMT_DEVICE R* group_at(R* tile, int row, int group) {
  constexpr int kV = Shape<R>::kV;
  return tile + row * kWidth + (group ^ (row / kV & 7)) * kV;
}
template <int kWidth, class R> SIMT_DEVICE R& element(R* tile, int row, int col) {
  constexpr int kV = Shape<R>::kV;
  return group_at<kWidth>(tile, row, col / kV)[col % kV];
}
template <int kWidth, class R> SIMT_DEVICE Vec16<R> vec_at(const R* tile, int row, int group) {
  return *reinterpret_cast<const Vec16<R>*>(group_at<kWidth>(const_cast<R*>(tile), row, group));
}

SIMT_DEVICE float multiply_add(float a, float b, float c) {
#if SIMT_EMULATED
  return a * b + c;
#else
  return fmaf(a, b, c);
#endif
}
SIMT_DEVICE double multiply_add(double a, double b, double c) {
#if SIMT_EMULATED
  return a * b + c;
#else
  return fma(a, b, c);
#endif
}

template <class R> SIMT_DEVICE void clear(Block<R>& acc) {
#pragma unroll
  for (int r = 0; r < Shape<R>::kRows; r++)
#pragma unroll
    for (int c = 0; c < Shape<R>::kCols; c++) acc[r][c] = 0;
}
// f(r, c) for all elements of the thread.
template <class R, class F> SIMT_DEVICE void for_block(const F& f) {
#pragma unroll
  for (int r = 0; r < Shape<R>::kRows; r++)
#pragma unroll
    for (int c = 0; c < Shape<R>::kCols; c++) f(r, c);
}

// How an operand lies: Along, the summed dimension runs along its rows; Down, it counts them.
enum class Lies { Along, Down };

// acc += left right over `depth` terms, the first of them group `first` of the rows of an operand that lies Along and row `row` of one that
// lies Down. `Select` is for operands that are not finite: where select(row, k) is false nothing is added, not even 0 times that.
template <Lies kLeft, int kLeftWidth, Lies kRight, int kRightWidth, bool kSelect, class R, class Select>
SIMT_DEVICE void multiply_tiles(Block<R>& acc, const R* left, int left_first, const R* right, int right_first, int depth, const Select& select) {
  constexpr int kV = Shape<R>::kV, kRows = Shape<R>::kRows, kCols = Shape<R>::kCols, kLanesX = Shape<R>::kLanesX, kLanesY = Shape<R>::kLanesY;
  const int tx = lane_x<R>(), ty = lane_y<R>();
  for (int k0 = 0; k0 < depth; k0 += kV) {
    // Bit kRows i + r: whether term i counts in row r. Asked before the operands take their registers.
    uint32_t selected = 0;
    static_assert(kRows * kV <= 32, "a bit each");
    if (kSelect) {
#pragma unroll
      for (int i = 0; i < kV; i++)
#pragma unroll
        for (int r = 0; r < kRows; r++) selected |= uint32_t(select(row_of<R>(r), k0 + i)) << (kRows * i + r);
    }
    R x[kRows][kV], y[kV][kCols];
    if constexpr (kLeft == Lies::Along) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        // The rows of a thread all have the same permutation.
        const int row = row_of<R>(r), group = (left_first + k0) / kV ^ (ty & 7);
        const Vec16<R> v = *reinterpret_cast<const Vec16<R>*>(left + row * kLeftWidth + group * kV);
#pragma unroll
        for (int i = 0; i < kV; i++) x[r][i] = v.x[i];
      }
    } else {
      const int swap = (left_first + k0) / kV & 7;
#pragma unroll
      for (int i = 0; i < kV; i++)
#pragma unroll
        for (int h = 0; h < kRows / kV; h++) {
          const Vec16<R> v = *reinterpret_cast<const Vec16<R>*>(left + (left_first + k0 + i) * kLeftWidth + ((ty ^ swap) + h * kLanesY) * kV);
#pragma unroll
          for (int e = 0; e < kV; e++) x[h * kV + e][i] = v.x[e];
        }
    }
    if constexpr (kRight == Lies::Along) {
#pragma unroll
      for (int c = 0; c < kCols; c++) {
        const int group = (right_first + k0) / kV ^ (tx & 7);
        const Vec16<R> v = *reinterpret_cast<const Vec16<R>*>(right + col_of<R>(c) * kRightWidth + group * kV);
#pragma unroll
        for (int i = 0; i < kV; i++) y[i][c] = v.x[i];
      }
    } else {
      const int swap = (right_first + k0) / kV & 7;
#pragma unroll
      for (int i = 0; i < kV; i++)
#pragma unroll
        for (int h = 0; h < kCols / kV; h++) {
          const Vec16<R> v = *reinterpret_cast<const Vec16<R>*>(right + (right_first + k0 + i) * kRightWidth + ((tx ^ swap) + h * kLanesX) * kV);
#pragma unroll
          for (int e = 0; e < kV; e++) y[i][h * kV + e] = v.x[e];
        }
    }
#pragma unroll
    for (int i = 0; i < kV; i++)
      for_block<R>([&](int r, int c) {
        if (!kSelect || (selected >> (kRows * i + r) & 1)) acc[r][c] = multiply_add(x[r][i], y[i][c], acc[r][c]);
      });
  }
}
struct SelectAll {
  SIMT_DEVICE bool operator()(int, int) const { return true; }
};
template <Lies kLeft, int kLeftWidth, Lies kRight, int kRightWidth, class R>
SIMT_DEVICE void multiply(Block<R>& acc, const R* left, int left_first, const R* right, int depth) {
  multiply_tiles<kLeft, kLeftWidth, kRight, kRightWidth, false>(acc, left, left_first, right, 0, depth, SelectAll());
}
// With `not_finite` (the same in all threads) only where select(row, k), k from 0 on.
template <Lies kLeft, int kLeftWidth, Lies kRight, int kRightWidth, class R, class Select>
SIMT_DEVICE void multiply(Block<R>& acc, const R* left, int left_first, const R* right, int depth, bool not_finite, const Select& select) {
  if (not_finite) multiply_tiles<kLeft, kLeftWidth, kRight, kRightWidth, true>(acc, left, left_first, right, 0, depth, select);
  else multiply_tiles<kLeft, kLeftWidth, kRight, kRightWidth, false>(acc, left, left_first, right, 0, depth, SelectAll());
}

// The number of terms to sum where `left` remain, in whole groups.
SIMT_DEVICE int depth_of(int64_t left) { return left < kStep ? int(left + 3) / 4 * 4 : kStep; }

// Sums over the 16 threads that share rows; all of them get it.
template <class R> SIMT_DEVICE R sum_of_row(R x) {
#pragma unroll
  for (int width = Shape<R>::kLanesX / 2; width; width /= 2) x += __shfl_xor_sync(0xffffffffu, x, width);
  return x;
}

template <class R> SIMT_DEVICE bool is_finite(R x) { return x - x == 0; }

#if SIMT_EMULATED
template <class R> SIMT_DEVICE R exp_of(R x) { return std::exp(x); }
#else
SIMT_DEVICE float exp_of(float x) { return expf(x); }
SIMT_DEVICE double exp_of(double x) { return exp(x); }
#endif
template <class R> SIMT_DEVICE R feature(FeatureMap map, R x) {
  // Below 0 elu(x) + 1 is e^x: computed as such it does not round to zero. NaN stays NaN.
  if (map == FeatureMap::kEluPlusOne) return x > 0 ? x + 1 : exp_of(x);
  if (map == FeatureMap::kRelu) return x <= 0 ? R(0) : x;
  if (map == FeatureMap::kExp) return exp_of(x);
  return x;
}
// The derivative from the value y of the map.
template <class R> SIMT_DEVICE R feature_slope(FeatureMap map, R y) {
  if (map == FeatureMap::kEluPlusOne) return y > 1 ? R(1) : y;
  if (map == FeatureMap::kRelu) return y > 0 ? R(1) : R(0);
  if (map == FeatureMap::kExp) return y;
  return R(1);
}

// A factor of exactly zero forgets even what is not finite.
template <class R> SIMT_DEVICE R decayed(R x, R factor) { return factor == 0 ? R(0) : x * factor; }

// Writes a run of kVec<T> columns of a row, all of them at or behind `col`, which begins a group.
template <int kWidth, class T, class R> SIMT_DEVICE void put(R* tile, int row, int col, const R (&x)[kVec<T>]) {
  constexpr int kV = Shape<R>::kV;
#pragma unroll
  for (int g = 0; g < kVec<T> / kV; g++) {
    Vec16<R> v;
#pragma unroll
    for (int i = 0; i < kV; i++) v.x[i] = x[g * kV + i];
    *reinterpret_cast<Vec16<R>*>(group_at<kWidth>(tile, row, col / kV + g)) = v;
  }
}
template <int kWidth, class T, class R> SIMT_DEVICE void get(const R* tile, int row, int col, R (&x)[kVec<T>]) {
  constexpr int kV = Shape<R>::kV;
#pragma unroll
  for (int g = 0; g < kVec<T> / kV; g++) {
    const Vec16<R> v = vec_at<kWidth>(tile, row, col / kV + g);
#pragma unroll
    for (int i = 0; i < kV; i++) x[g * kV + i] = v.x[i];
  }
}
// The block of the thread into a tile of kTile columns, as groups.
template <class R> SIMT_DEVICE void put_block(R* tile, const Block<R>& acc) {
  constexpr int kV = Shape<R>::kV;
#pragma unroll
  for (int r = 0; r < Shape<R>::kRows; r++)
#pragma unroll
    for (int h = 0; h < Shape<R>::kCols / kV; h++) {
      Vec16<R> v;
#pragma unroll
      for (int i = 0; i < kV; i++) v.x[i] = acc[r][h * kV + i];
      *reinterpret_cast<Vec16<R>*>(group_at<kTile>(tile, row_of<R>(r), lane_x<R>() + h * Shape<R>::kLanesX)) = v;
    }
}

// The same to global memory; what lies outside of [0, end_row) x [0, end_col) is left out.
template <class R>
SIMT_DEVICE void store_block(const Rows<R>& to, int64_t first_row, int64_t end_row, int64_t first_col, int64_t end_col, const Block<R>& acc) {
  constexpr int kV = Shape<R>::kV;
#pragma unroll
  for (int r = 0; r < Shape<R>::kRows; r++)
#pragma unroll
    for (int h = 0; h < Shape<R>::kCols / kV; h++) {
      const int64_t row = first_row + row_of<R>(r), col = first_col + col_of<R>(h * kV);
      R x[kV];
#pragma unroll
      for (int i = 0; i < kV; i++) x[i] = acc[r][h * kV + i];
      if (row < end_row && col < end_col) store_vec<R>(to, row, col, end_col, x);
    }
}

// A block of a kTile x kTile matrix of whole groups.
template <class R> SIMT_DEVICE void load_block(const R* from, Block<R>& acc) {
  constexpr int kV = Shape<R>::kV;
#pragma unroll
  for (int r = 0; r < Shape<R>::kRows; r++)
#pragma unroll
    for (int h = 0; h < Shape<R>::kCols / kV; h++) {
      const Vec16<R> v = *reinterpret_cast<const Vec16<R>*>(from + row_of<R>(r) * kTile + col_of<R>(h * kV));
#pragma unroll
      for (int i = 0; i < kV; i++) acc[r][h * kV + i] = v.x[i];
    }
}

}  // namespace cuda
}  // namespace tiled_attention
