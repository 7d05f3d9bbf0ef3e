#pragma once
// Copies a strided matrix of any dtype into the layouts that gemm() reads, converting on the way.

#include "../core/mask.h"
#include "../core/params.h"
#include "../core/scratch.h"
#include "../core/view.h"
#include "gemm_tile.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Matrix elements in one unit.
template <class Unit> constexpr int kUnitSize = 1;
template <> inline constexpr int kUnitSize<Bf16Pair> = 2;
template <class Unit>
ALWAYS_INLINE int units(int elements) {
  return (elements + kUnitSize<Unit> - 1) / kUnitSize<Unit>;
}

// Rows [begin, begin + rows) with adjacent columns: in place, or copied to `temp` [rows][cols] where the columns are strided.
template <class T>
inline Matrix<const T> adjacent_columns(const Matrix<const T>& m, int64_t begin, int rows, int cols, T* temp) {
  if (m.col_stride == 1 || cols <= 1) return {m.row(begin), m.row_stride, 1};
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) temp[int64_t(i) * cols + j] = m.row(begin + i)[j * m.col_stride];
  return {temp, cols, 1};
}

// Rows that are read next: asked for into L2 while others are packed. The hardware does not follow reads that go down several rows at once.
struct Ahead {
  const char* data = nullptr;
  int64_t row_stride = 0;  // bytes
  int row_bytes = 0, rows = 0;
  template <class T>
  static Ahead of(const Matrix<const T>& m, int64_t begin, int rows, int cols) {
    if (m.col_stride != 1 || rows <= 0) return {};
    return {(const char*)m.row(begin), m.row_stride * int64_t(sizeof(T)), int(cols * sizeof(T)), rows};
  }
  ALWAYS_INLINE void fetch(int begin, int end) const {
    for (int i = begin; i < min_of(end, rows); i++)
      for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(data + i * row_stride + b, 0, 2);
  }
  // Of rows that are written next.
  ALWAYS_INLINE void fetch_to_write(int begin, int end) const {
    for (int i = begin; i < min_of(end, rows); i++)
      for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(data + i * row_stride + b, 1, 2);
  }
};

// `count` consecutive elements as units; zeros behind them.
template <class Unit, class T>
ALWAYS_INLINE NativeVec<Unit> load_units(const T* p, int count) {
  if constexpr (kUnitSize<Unit> == 1) return load_converted(p, count);
  else {
    if (count >= 2 * kLanes<Unit>) return NativeVec<Unit>::load(p);
    T buffer[2 * kLanes<Unit>] = {};
    if (count > 0) memcpy(buffer, p, count * sizeof(T));
    return NativeVec<Unit>::load(buffer);
  }
}

// `count` 16-bit elements, as they are.
template <class T>
ALWAYS_INLINE Vec<uint16_t, kLanes<float>> load_bits(const T* p, int count) {
  if (count >= kLanes<float>) return Vec<uint16_t, kLanes<float>>::load(p);
  T buffer[kLanes<float>] = {};
  if (count > 0) memcpy(buffer, p, count * sizeof(T));
  return Vec<uint16_t, kLanes<float>>::load(buffer);
}

// `count` columns of the next kUnitSize of `rows` rows as units along the rows; zeros behind them.
template <class Unit, class T>
ALWAYS_INLINE NativeVec<Unit> load_rows(const T* p, int64_t stride, int rows, int count) {
  if constexpr (kUnitSize<Unit> == 1) return load_converted(p, count);
  else {
    const auto low = load_bits(p, count), high = load_bits(rows > 1 ? p + stride : p, rows > 1 ? count : 0);
    return convert<uint32_t>(low).v | convert<uint32_t>(high).v << 16;
  }
}

// Left operand, reduction along the columns: dst[row][units(cols)]. dst_stride is a multiple of kLanes.
template <class Unit, class T>
void pack_rows(const T* src, int64_t src_stride, int rows, int cols, bool negate, Unit* dst, int dst_stride) {
  constexpr int kStep = kLanes<Unit> * kUnitSize<Unit>;
  for (int row = 0; row < rows; row++, src += src_stride, dst += dst_stride)
    for (int col = 0; col < cols; col += kStep) {
      NativeVec<Unit> x = load_units<Unit>(src + col, cols - col);
      if (negate) {
        if constexpr (kUnitSize<Unit> == 1) x = -x.v;
        else x = x.v ^ 0x80008000u;
      }
      x.store(dst + col / kUnitSize<Unit>);
    }
}

// Right operand, reduction along the rows: panels of columns, dst[panel][units(rows)][kPanel]. Returns whether every
// element was finite. With kSanitize the others are packed as zeros.
template <class Unit, class T, bool kSanitize = false>
bool pack_panels(const T* src, int64_t src_stride, int rows, int cols, Unit* dst, int64_t panel_stride, const Ahead& ahead = Ahead()) {
  using V = NativeVec<Unit>;
  constexpr int kRows = 16;  // read together: whole rows, as they lie
  V check(Unit(0));          // stays zero as long as all is finite
  for (int begin = 0; begin < rows; begin += kRows) {
    const int end = min_of(begin + kRows, rows);
    ahead.fetch(begin, end);
    for (int col = 0; col < cols; col += kLanes<Unit>) {
      Unit* to = dst + col / kPanel<Unit> * panel_stride + col % kPanel<Unit> + begin / kUnitSize<Unit> * kPanel<Unit>;
      const T* from = src + begin * src_stride + col;
      for (int row = begin; row < end; row += kUnitSize<Unit>, to += kPanel<Unit>, from += kUnitSize<Unit> * src_stride) {
        const V x = load_rows<Unit>(from, src_stride, rows - row, cols - col);
        if constexpr (kUnitSize<Unit> == 1) {
          const V zero = x - x;
          (kSanitize ? V(zero.v == zero.v ? x.v : V(Unit(0)).v) : x).store(to);
          check = check + zero;
        } else {
          const auto bad = (((x.v & 0x7f80u) == 0x7f80u) & 0xffffu) | (((x.v & 0x7f800000u) == 0x7f800000u) & 0xffff0000u);
          V(kSanitize ? x.v & ~bad : x.v).store(to);
          check = check.v | bad;
        }
      }
    }
  }
  for (int i = 0; i < V::kLanes; i++)
    if (!(check.v[i] == 0)) return false;
  return true;
}

// pack_panels(), with everything that is not finite packed as zero. Returns whether there was nothing such.
template <class Unit, class T>
bool pack_finite_panels(const T* src, int64_t src_stride, int rows, int cols, Unit* dst, int64_t panel_stride, const Ahead& ahead = Ahead()) {
  const bool finite = pack_panels<Unit, T>(src, src_stride, rows, cols, dst, panel_stride, ahead);
  if (!finite) pack_panels<Unit, T, true>(src, src_stride, rows, cols, dst, panel_stride);
  return finite;
}

// Right operand, reduction along the columns: panels of rows, dst[panel][units(cols)][kPanel].
template <class Unit, class T>
void pack_transposed(const T* src, int64_t src_stride, int rows, int cols, Unit* dst, int64_t panel_stride, const Ahead& ahead = Ahead()) {
  constexpr int kN = kLanes<Unit>;
  const int k_size = units<Unit>(cols);
  for (int row = 0; row < rows; row += kN) {
    Unit* to = dst + row / kPanel<Unit> * panel_stride + row % kPanel<Unit>;
    ahead.fetch(row, row + kN);
    for (int k = 0; k < k_size; k += kN) {
      NativeVec<Unit> block[kN];
      const T* from = src + row * src_stride + k * kUnitSize<Unit>;
      if (row + kN <= rows && (k + kN) * kUnitSize<Unit> <= cols) {
#pragma GCC unroll 16
        for (int i = 0; i < kN; i++) block[i] = load_units<Unit>(from + i * src_stride, kN * kUnitSize<Unit>);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kN; i++) block[i].store(to + (k + i) * kPanel<Unit>);
      } else {
        for (int i = 0; i < kN; i++) block[i] = row + i < rows ? load_units<Unit>(from + i * src_stride, cols - k * kUnitSize<Unit>) : NativeVec<Unit>(Unit(0));
        transpose(block);
        for (int i = 0; i < kN && k + i < k_size; i++) block[i].store(to + (k + i) * kPanel<Unit>);
      }
    }
  }
}

// x as units of the probabilities: two vectors at columns [col, col + 2 * kLanes).
template <class Real>
ALWAYS_INLINE void store_pair(NativeVec<Real> a, NativeVec<Real> b, Real* row, int col) {
  a.store(row + col);
  b.store(row + col + kLanes<Real>);
}
#if defined(__AVX512BF16__)
ALWAYS_INLINE void store_pair(NativeVec<float> a, NativeVec<float> b, Bf16Pair* row, int col) {
  const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)b.v, (__m512)a.v);
  memcpy(row + col / 2, &packed, sizeof packed);
}
#endif

// Element k of a row of units, as Real.
template <class Unit>
ALWAYS_INLINE Accumulator<Unit> unit_element(const Unit* row, int k) {
  if constexpr (kUnitSize<Unit> == 1) return row[k];
  else return to_float(Vec<uint16_t, kLanes<float>>(((const uint16_t*)row)[k]), bf16()).v[0];
}

// dst[i][0 .. cols) = src[i] * scale, dst with columns as strided as they are.
template <class T, class Real>
ALWAYS_INLINE void store_row(const Real* src, int cols, Real scale, T* dst, int64_t col_stride) {
  using V = NativeVec<Real>;
  if (col_stride == 1) {
    for (int d = 0; d < cols; d += V::kLanes) store_converted(V::load(src + d) * V(scale), dst + d, cols - d);
    return;
  }
  for (int d = 0; d < cols; d += V::kLanes) {
    T buffer[V::kLanes];
    store_converted(V::load(src + d) * V(scale), buffer);
    for (int k = 0; k < V::kLanes && d + k < cols; k++) dst[(d + k) * col_stride] = buffer[k];
  }
}

// Elements [begin, end) of a row with adjacent columns: in place, or copied to `temp`.
template <class T>
ALWAYS_INLINE const T* adjacent_elements(const T* row, int64_t col_stride, int begin, int end, T* temp) {
  if (col_stride == 1) return row + begin;
  for (int j = begin; j < end; j++) temp[j - begin] = row[j * col_stride];
  return temp;
}

// row[i] = row[i] * scale + from[i] * from_scale, `from` with columns as strided as they are.
template <class T, class Real>
ALWAYS_INLINE void add_row(Real* row, int cols, Real scale, const T* from, int64_t col_stride, Real from_scale) {
  using V = NativeVec<Real>;
  for (int d = 0; d < cols; d += V::kLanes) {
    const int count = min_of(V::kLanes, cols - d);
    T temp[V::kLanes];
    multiply_add(load_converted(adjacent_elements(from, col_stride, d, d + count, temp), count), V(from_scale), V::load(row + d) * V(scale)).store(row + d);
  }
}

// What rounding to T took from src[i] * scale; src is overwritten.
template <class T, class Real>
void store_residual(Real* src, int cols, Real scale, T* dst, int64_t col_stride) {
  using V = NativeVec<Real>;
  for (int d = 0; d < cols; d += V::kLanes) {
    T rounded[V::kLanes];
    const V x = V::load(src + d) * V(scale);
    store_converted(x, rounded);
    const V rest = x - load_converted(rounded);
    V(rest.v == rest.v ? rest.v : V(Real(0)).v).store(src + d);  // inf - inf
  }
  store_row(src, cols, Real(1), dst, col_stride);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
