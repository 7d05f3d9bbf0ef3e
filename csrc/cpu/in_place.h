#pragma once
// The products of a few rows with keys and values where they lie: packing a tile costs as much as a dozen rows of products. Every result is the
// chain of multiply-adds that gemm() makes over packed operands, so the bits are the same.

#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

constexpr int kInPlaceRows = 2 * kRowStep;
// Block sizes for fewer rows: rows are rounded up, as in gemm().
constexpr int fewer_rows(int rows) { return rows > 4 ? rows - 2 : rows - 1; }

// scores[i][j] = query[i] . key[j], kRows x keys, a vector of keys at a time: kLanes x kLanes units of them are transposed in registers. Columns
// are written up to a whole vector; keys behind the last repeat it.
template <int kRows, class Unit, class T>
__attribute__((noinline)) void score_in_place(int rows, int keys, int head_dim, const Unit* query, int64_t query_stride, const Matrix<const T>& key,
                                              Accumulator<Unit>* scores, int64_t stride) {
  if constexpr (kRows > 1)
    if (rows <= fewer_rows(kRows)) return score_in_place<fewer_rows(kRows)>(rows, keys, head_dim, query, query_stride, key, scores, stride);
  using V = NativeVec<Unit>;
  using Acc = NativeVec<Accumulator<Unit>>;
  constexpr int kN = V::kLanes, kStep = kN * kUnitSize<Unit>, kAhead = 32;
  for (int j = 0; j < keys; j += kN) {
    Acc acc[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) acc[r] = Acc(Accumulator<Unit>(0));
    const auto step = [&](int d, int count, int steps) __attribute__((always_inline)) {
      V block[kN];
#pragma GCC unroll 16
      for (int i = 0; i < kN; i++) block[i] = load_units<Unit>(key.row(min_of(j + i, keys - 1)) + d, count);
#pragma GCC unroll 16
      for (int i = 0; i < kN; i++) __builtin_prefetch(key.row(j + i + kAhead) + d, 0, 2);
      transpose(block);
#pragma GCC unroll 16
      for (int k = 0; k < steps; k++)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) acc[r] = multiply_add(V(query[r * query_stride + d / kUnitSize<Unit> + k]), block[k], acc[r]);
    };
    int d = 0;
#pragma GCC unroll 1
    for (; d + kStep <= head_dim; d += kStep) step(d, kStep, kN);
    if (d < head_dim) step(d, head_dim - d, units<Unit>(head_dim - d));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) acc[r].store(scores + r * stride + j);
  }
}

// out[i][columns] += weights[i][j] value[j][columns] one j after the other: kRows rows and kVectors vectors of columns, the last of `cols` columns.
template <int kRows, int kVectors, class Unit, class T>
ALWAYS_INLINE void value_block(int keys, int cols, const Unit* weights, int64_t stride, const Matrix<const T>& value, Accumulator<Unit>* out,
                               int64_t out_stride) {
  using V = NativeVec<Unit>;
  using Acc = NativeVec<Accumulator<Unit>>;
  constexpr int kN = V::kLanes;
  Acc acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) acc[r][c] = Acc::load(out + r * out_stride + c * kN);
#pragma GCC unroll 1
  for (int j = 0; j < keys; j += kUnitSize<Unit>) {
    V right[kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) right[c] = load_rows<Unit>(value.row(j) + c * kN, value.row_stride, keys - j, kVectors > 1 ? kN : cols);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const V left(weights[r * stride + j / kUnitSize<Unit>]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; c++) acc[r][c] = multiply_add(left, right[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; c++) acc[r][c].store(out + r * out_stride + c * kN);
}

// out[i] = sum over j of weights[i][j] value[j], kRows rows. An infinity or NaN among the values makes some result infinite or NaN.
template <int kRows, class Unit, class T>
__attribute__((noinline)) void values_in_place(int rows, int keys, int cols, const Unit* weights, int64_t stride, const Matrix<const T>& value,
                                               Accumulator<Unit>* out, int64_t out_stride) {
  if constexpr (kRows > 1)
    if (rows <= fewer_rows(kRows)) return values_in_place<fewer_rows(kRows)>(rows, keys, cols, weights, stride, value, out, out_stride);
  // At least 4 chains in flight, 8 where a vector is narrow, and accumulators that fit the registers. Whole rows are read, a few in L1 at a time.
  constexpr int kN = kLanes<Unit>, kVectors = kVectorBytes == 64 ? (kRows > 4 ? 2 : 4) : kRows == 1 ? 8 : kRows == 2 ? 4 : 2, kKeys = 32;
  memset(out, 0, kRows * out_stride * sizeof(*out));
  for (int j = 0; j < keys; j += kKeys) {
    const int count = min_of(kKeys, keys - j);
    const Unit* left = weights + j / kUnitSize<Unit>;
    Matrix<const T> right = value.from(j);
    Ahead::of(value, j + kKeys, min_of(kKeys, keys - j - kKeys), cols).fetch(0, kKeys);
    int d = 0;
    const auto next = [&](int vectors) { d += vectors * kN, right.data += vectors * kN; };
    while (cols - d >= kVectors * kN) value_block<kRows, kVectors>(count, cols, left, stride, right, out + d, out_stride), next(kVectors);
    if constexpr (kVectors > 2)
      while (cols - d >= 2 * kN) value_block<kRows, 2>(count, cols, left, stride, right, out + d, out_stride), next(2);
    while (d < cols) value_block<kRows, 1>(count, cols - d, left, stride, right, out + d, out_stride), next(1);
  }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
