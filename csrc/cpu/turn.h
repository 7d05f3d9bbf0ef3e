#pragma once
// Rotary positions: turns the pairs of columns of single rows, and the rows of query and key on their way to where they are packed.

#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
struct Turn {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes;
  int rotary_dim, head_dim;
  bool interleaved, transposed;

  // table: rotary_dim / 2 of cos, then as many of sin. `to` may be `from`.
  void row(const Matrix<const T>& from, const Real* table, const Matrix<T>& to) const {
    const int half = rotary_dim / 2, step = interleaved ? 2 : 1;
    const int64_t second = interleaved ? 1 : half;
    const bool whole = !interleaved && half % kN == 0 && from.col_stride == 1 && to.col_stride == 1;
    const V zero(Real(0));
    for (int k = 0; k < half; k += kN) {
      const int count = whole ? kN : min_of(kN, half - k);
      V a, b, cos, sin;
      if (whole) a = load_converted(from.data + k), b = load_converted(from.data + half + k), cos = V::load(table + k), sin = V::load(table + half + k);
      else load_pairs(from, k * step, second, count, &a, &b), cos = load_converted(table + k, count), sin = load_converted(table + half + k, count);
      if (transposed) sin = zero - sin;
      const V first = multiply_add(zero - b, sin, a * cos), last = multiply_add(a, sin, b * cos);
      if (whole) store_converted(first, to.data + k), store_converted(last, to.data + half + k);
      else store_pairs(first, last, to, k * step, second, count);
    }
    for (int64_t col = rotary_dim; col < head_dim; col++) to.data[col * to.col_stride] = from.data[col * from.col_stride];
  }

 private:
  // `count` pairs from column `col` on: elements col, ... and those `second` columns further.
  void load_pairs(const Matrix<const T>& m, int64_t col, int64_t second, int count, V* a, V* b) const {
    if (m.col_stride == 1 && !interleaved) {
      *a = load_converted(m.data + col, count);
      *b = load_converted(m.data + col + second, count);
    } else if (m.col_stride == 1) {
      alignas(64) Real pairs[2 * kN], first[kN], last[kN];
      load_converted(m.data + col, 2 * count).store(pairs);
      load_converted(m.data + col + kN, 2 * count - kN).store(pairs + kN);
      for (int i = 0; i < kN; i++) first[i] = pairs[2 * i], last[i] = pairs[2 * i + 1];
      *a = V::load(first), *b = V::load(last);
    } else {
      alignas(64) T first[kN] = {}, last[kN] = {};
      for (int i = 0; i < count; i++) {
        const T* at = m.data + (col + (interleaved ? 2 * i : i)) * m.col_stride;
        first[i] = *at, last[i] = at[second * m.col_stride];
      }
      *a = load_converted(first, count), *b = load_converted(last, count);
    }
  }

  void store_pairs(V a, V b, const Matrix<T>& m, int64_t col, int64_t second, int count) const {
    if (m.col_stride == 1 && !interleaved) {
      store_converted(a, m.data + col, count);
      store_converted(b, m.data + col + second, count);
    } else if (m.col_stride == 1) {
      alignas(64) Real pairs[2 * kN], first[kN], last[kN];
      a.store(first), b.store(last);
      for (int i = 0; i < kN; i++) pairs[2 * i] = first[i], pairs[2 * i + 1] = last[i];
      store_converted(V::load(pairs), m.data + col, 2 * count);
      store_converted(V::load(pairs + kN), m.data + col + kN, 2 * count - kN);
    } else {
      alignas(64) T first[kN], last[kN];
      store_converted(a, first, kN), store_converted(b, last, kN);
      for (int i = 0; i < count; i++) {
        T* at = m.data + (col + (interleaved ? 2 * i : i)) * m.col_stride;
        *at = first[i], at[second * m.col_stride] = last[i];
      }
    }
  }
};

// Rows [begin, begin + rows) of `view`, query or key, with adjacent columns: where they lie, or in `temp` [rows][head_dim], turned where there is a
// table and rounded to T, as Rotate leaves them.
template <class T>
Matrix<const T> turned_rows(const AttentionParams& p, const TensorView& view, const TensorView& table, int64_t batch, int64_t head, int64_t begin, int rows,
                            T* temp) {
  const Matrix<const T> from = matrix<const T>(p, view, batch, head);
  constexpr int kAhead = 8;  // rows
  if (!table.data) return adjacent_columns(from, begin, rows, int(p.head_dim), temp);
  const auto angles = matrix<const ComputeType<T>>(p, table, batch, head);
  const Turn<T> turn = {int(p.rotary.rotary_dim), int(p.head_dim), p.rotary.interleaved, false};
  const Ahead ahead = Ahead::of(from, begin, rows, int(p.head_dim));
  for (int i = 0; i < rows; i++) {
    ahead.fetch(i + kAhead, i + kAhead + 1);
    turn.row({from.row(begin + i), 0, from.col_stride}, angles.row(begin + i), {temp + i * p.head_dim, 0, 1});
  }
  return {temp, p.head_dim, 1};
}
// Whether turned_rows() needs `temp`.
inline bool needs_copy(const TensorView& view, const TensorView& table) { return view.col_stride != 1 || table.data; }

// Stores the gradient of row `at` of query or key, or adds it, from that of the turned row, which is still to be multiplied by the scale and is
// overwritten.
template <class T, class Real>
void store_turned_back(const AttentionParams& p, const TensorView& table, int64_t batch, int64_t head, int64_t at, Real* grad, const Matrix<T>& to, bool adds) {
  using V = NativeVec<Real>;
  Real scale = Real(p.scale);
  if (table.data) {
    for (int d = 0; d < p.head_dim; d += V::kLanes) (V::load(grad + d) * V(scale)).store(grad + d);
    const Turn<Real> back = {int(p.rotary.rotary_dim), int(p.head_dim), p.rotary.interleaved, true};
    back.row({grad, 0, 1}, matrix<const Real>(p, table, batch, head).row(at), {grad, 0, 1});
    scale = 1;
  }
  if (adds) {
    add_row(grad, int(p.head_dim), scale, to.row(at), to.col_stride, Real(1));
    scale = 1;
  }
  store_row(grad, int(p.head_dim), scale, to.row(at), to.col_stride);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
