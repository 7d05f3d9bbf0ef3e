#pragma once
// Rotary positions: reads and writes each row once, and a block of the table once for all heads.

#include "pack.h"
#include "workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
struct Rotate {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, kBlock = 32;
  const RotateParams& p;

  void run(const ThreadPool& pool) const {
    const int64_t blocks = (p.seqlen + kBlock - 1) / kBlock;
    ThreadPool workers = pool;
    // Waking a thread costs as much as some 10^4 elements.
    if (p.batch * p.num_heads * p.seqlen * p.head_dim < 20000) workers.num_workers = 1;
    for_each_item(workers, p.batch * blocks, [&](int, int64_t item) {
      const int64_t batch = item / blocks, begin = item % blocks * kBlock, end = min_of(p.seqlen, begin + kBlock);
      for (int64_t head = 0; head < p.num_heads; head++) {
        const Matrix<const T> rows = matrix<const T>(p, p.rows, batch, head);
        const Matrix<T> out = matrix<T>(p, p.out, batch, head);
        const Matrix<const Real> table = matrix<const Real>(p, p.table, batch, head);
        for (int64_t i = begin; i < end; i++) row({rows.row(i), 0, rows.col_stride}, table.row(i), {out.row(i), 0, out.col_stride});
      }
    });
  }

 private:
  void row(const Matrix<const T>& from, const Real* table, const Matrix<T>& to) const {
    const int half = int(p.rotary_dim / 2), step = p.interleaved ? 2 : 1;
    const int64_t second = p.interleaved ? 1 : half;
    for (int k = 0; k < half; k += kN) {
      const int count = min_of(kN, half - k);
      V a, b, cos, sin;
      load_pairs(from, k * step, second, count, &a, &b);
      cos = load_converted(table + k, count), sin = load_converted(table + half + k, count);
      if (p.transposed) sin = V(Real(0)) - sin;
      store_pairs(multiply_add(V(Real(0)) - b, sin, a * cos), multiply_add(a, sin, b * cos), to, k * step, second, count);
    }
    for (int64_t col = p.rotary_dim; col < p.head_dim; col++) to.data[col * to.col_stride] = from.data[col * from.col_stride];
  }

  // `count` pairs from column `col` on: elements col, ... and those `second` columns further.
  void load_pairs(const Matrix<const T>& m, int64_t col, int64_t second, int count, V* a, V* b) const {
    if (m.col_stride == 1 && !p.interleaved) {
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
        const T* at = m.data + (col + (p.interleaved ? 2 * i : i)) * m.col_stride;
        first[i] = *at, last[i] = at[second * m.col_stride];
      }
      *a = load_converted(first, count), *b = load_converted(last, count);
    }
  }

  void store_pairs(V a, V b, const Matrix<T>& m, int64_t col, int64_t second, int count) const {
    if (m.col_stride == 1 && !p.interleaved) {
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
        T* at = m.data + (col + (p.interleaved ? 2 * i : i)) * m.col_stride;
        *at = first[i], at[second * m.col_stride] = last[i];
      }
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
