#pragma once
// Tiles of a TensorView on their way from global memory and back: 16 bytes at a time where base, strides and columns allow, element by element
// otherwise, converted to Real (float; double for double).

#include <string.h>

#include "../core/view.h"
#include "address.cuh"

namespace tiled_attention {
namespace cuda {

template <class T> struct RealOf {
  using type = float;
};
template <> struct RealOf<double> {
  using type = double;
};
template <class T> using Real = typename RealOf<T>::type;

// Elements in 16 bytes.
template <class T> constexpr int kVec = 16 / int(sizeof(T));

template <class T> struct alignas(16) Vec16 {
  T x[kVec<T>];
};

template <class T> SIMT_DEVICE Real<T> to_real(T x) { return simt::to_float(x); }
template <class T> SIMT_DEVICE T from_real(Real<T> x) { return simt::from_float<T>(x); }
template <> SIMT_DEVICE double from_real<double>(double x) { return x; }

// One (batch, head) matrix; `wide`: every run of kVec<T> columns that starts at a multiple of kVec<T> is one aligned access.
template <class T> struct Rows {
  T* data;
  int64_t row_stride, col_stride;
  bool wide;

  SIMT_DEVICE Rows() : data(nullptr), row_stride(0), col_stride(0), wide(false) {}
  SIMT_DEVICE Rows(T* data, int64_t row_stride, int64_t col_stride)
      : data(data),
        row_stride(row_stride),
        col_stride(col_stride),
        wide(col_stride == 1 && (reinterpret_cast<uintptr_t>(data) | uintptr_t(row_stride * int64_t(sizeof(T)))) % 16 == 0) {}
  SIMT_DEVICE T* at(int64_t row, int64_t col) const { return data + row * row_stride + col * col_stride; }
};
template <class T, class Params> SIMT_DEVICE Rows<T> rows_of(const Params& p, const TensorView& view, int64_t batch, int64_t head) {
  if (!view.data) return Rows<T>();
  const Matrix<T> m = matrix<T>(p, view, batch, head);
  return Rows<T>(m.data, m.row_stride, m.col_stride);
}

// The same from row `first` on: where a segment of packed rows begins.
template <class T, class Params> SIMT_DEVICE Rows<T> rows_from(const Params& p, const TensorView& view, int64_t batch, int64_t head, int64_t first) {
  Rows<T> rows = rows_of<T>(p, view, batch, head);
  return Rows<T>(rows.data ? rows.at(first, 0) : nullptr, rows.row_stride, rows.col_stride);
}

// x[k] = element (row, col + k), 0 from column `cols` on. col is a multiple of kVec<T>.
template <class T> SIMT_DEVICE void load_vec(const Rows<const T>& m, int64_t row, int64_t col, int64_t cols, Real<T> (&x)[kVec<T>]) {
  const T* from = m.at(row, col);
  if (m.wide && col + kVec<T> <= cols) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    T raw[kVec<T>];
    memcpy(raw, &bits, 16);
#pragma unroll
    for (int k = 0; k < kVec<T>; k++) x[k] = to_real(raw[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kVec<T>; k++) x[k] = col + k < cols ? to_real(from[k * m.col_stride]) : Real<T>(0);
  }
}
// The same the other way; columns from `cols` on are not written.
template <class T> SIMT_DEVICE void store_vec(const Rows<T>& m, int64_t row, int64_t col, int64_t cols, const Real<T> (&x)[kVec<T>]) {
  T* to = m.at(row, col);
  if (m.wide && col + kVec<T> <= cols) {
    T raw[kVec<T>];
#pragma unroll
    for (int k = 0; k < kVec<T>; k++) raw[k] = from_real<T>(x[k]);
    uint4 bits;
    memcpy(&bits, raw, 16);
    *reinterpret_cast<uint4*>(to) = bits;
  } else {
#pragma unroll
    for (int k = 0; k < kVec<T>; k++)
      if (col + k < cols) to[k * m.col_stride] = from_real<T>(x[k]);
  }
}

// Calls f(row, col, x) for every run of kVec<T> elements of a kRows x kCols tile, x being elements (first_row + row, first_col + col + k);
// zeros outside of [0, end_row) x [0, end_col) and, unread, in rows for which keep(row) is false. Neighbouring threads take neighbouring columns.
template <int kRows, int kCols, int kThreads, class T, class Keep, class F>
SIMT_DEVICE void load_tile(const Rows<const T>& m, int64_t first_row, int64_t end_row, int64_t first_col, int64_t end_col, const Keep& keep, const F& f) {
  constexpr int kPerRow = kCols / kVec<T>, kUnits = kRows * kPerRow;
  static_assert(kCols % kVec<T> == 0 && kUnits % kThreads == 0, "whole units");
#pragma unroll 2
  for (int i = 0; i < kUnits / kThreads; i++) {
    const int unit = i * kThreads + int(threadIdx.x), row = unit / kPerRow, col = unit % kPerRow * kVec<T>;
    Real<T> x[kVec<T>];
    if (first_row + row < end_row && first_col + col < end_col && keep(row)) {
      load_vec<T>(m, first_row + row, first_col + col, end_col, x);
    } else {
#pragma unroll
      for (int k = 0; k < kVec<T>; k++) x[k] = 0;
    }
    f(row, col, x);
  }
}
struct KeepAll {
  SIMT_DEVICE bool operator()(int) const { return true; }
};

// Calls f(row, col, x), which fills x, for every run of kVec<T> elements inside of the matrix, and stores them.
template <int kRows, int kCols, int kThreads, class T, class F>
SIMT_DEVICE void store_tile(const Rows<T>& m, int64_t first_row, int64_t end_row, int64_t first_col, int64_t end_col, const F& f) {
  constexpr int kPerRow = kCols / kVec<T>, kUnits = kRows * kPerRow;
  static_assert(kCols % kVec<T> == 0 && kUnits % kThreads == 0, "whole units");
#pragma unroll 2
  for (int i = 0; i < kUnits / kThreads; i++) {
    const int unit = i * kThreads + int(threadIdx.x), row = unit / kPerRow, col = unit % kPerRow * kVec<T>;
    if (first_row + row >= end_row || first_col + col >= end_col) continue;
    Real<T> x[kVec<T>];
    f(row, col, x);
    store_vec<T>(m, first_row + row, first_col + col, end_col, x);
  }
}

}  // namespace cuda
}  // namespace tiled_attention
