#pragma once
// Scores w . tanh(q + k) without a hyperbolic function per pair. With u = e^2x and v = e^2y
//
//   tanh(x + y) = N / (N + 1),   N = (uv - 1) / 2 = ((u - 1) P + (u Q + R)) / 2,   P = min(v, 1), Q = max(v - 1, 0), R = min(v - 1, 0)
//
// which is exact beside its own size, however small. The exponentials belong to a row each and are made as rows are staged, and four columns of
// a pair share one reciprocal. docs/kernels/additive_attention.md has the derivation. What the formula cannot hold (|x| too large for an
// exponential, infinities, NaN) goes the direct way, pair by pair.

#include "attention_fma_tile.cuh"

namespace tiled_attention {
namespace cuda {

// Columns that share one reciprocal.
constexpr int kQuad = 4;

template <class Real>
struct AdditiveRange {
  static constexpr bool kDouble = sizeof(Real) == 8;
  static constexpr Real kArgument = kDouble ? 350 : 40;                     // |x| up to here: e^2x is a normal number
  static constexpr Real kCap = kDouble ? Real(0x1p254) : Real(0x1p30);      // of N: the product of four is finite, and N / (N + 1) rounds to 1
  static constexpr Real kNormal = kDouble ? Real(0x1p-1022) : Real(0x1p-126);
};

SIMT_DEVICE float reciprocal(float x) { return simt::rcp(x); }
SIMT_DEVICE double reciprocal(double x) { return 1.0 / x; }
SIMT_DEVICE float smaller(float a, float b) { return fminf(a, b); }
SIMT_DEVICE double smaller(double a, double b) { return fmin(a, b); }
SIMT_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
// The largest power of two up to a normal x > 0.
SIMT_DEVICE float power_of_two(float x) { return float_of_bits(bits_of(x) & 0x7f800000u); }
SIMT_DEVICE double power_of_two(double x) {
  const uint64_t bits = bits_of(x) & 0x7ff0000000000000u;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

template <class Real>
SIMT_DEVICE bool in_range(Real x) {
  return x <= AdditiveRange<Real>::kArgument && x >= -AdditiveRange<Real>::kArgument;  // not NaN
}
// What the left side of a pair, or the right one, holds of an x: u and u - 1, or P / 2 and (v - 1) / 2. Out of range: as for 0, but `missing`
// for the first, which is positive otherwise.
template <class Real>
struct Exponential {
  Real value, less_one;
};
template <bool kRight, class Real>
SIMT_DEVICE Exponential<Real> exponential(Real x, Real missing) {
  if (!in_range(x)) return {missing, Real(0)};
  const Real value = exp(x + x), less_one = expm1(x + x);
  if (kRight) return {smaller(value, Real(1)) * Real(0.5), less_one * Real(0.5)};
  return {value, less_one};
}
// N of one column: `positive` and `negative` are Q / 2 and R / 2. Where a product of exponentials is infinite, N is the cap.
template <class Real>
SIMT_DEVICE Real half_excess(Real value, Real less_one, Real right, Real positive, Real negative) {
  return smaller(multiply_add(less_one, right, multiply_add(value, positive, negative)), AdditiveRange<Real>::kCap);
}

// Exponentials of the columns [col, col + kColumns) of kCount rows of a matrix, `values` and `less_ones` [kCount][kStride]; outside of the matrix
// those of 0. `mark(row, any)` is called by one thread for each row, `any`: some x is out of range.
template <int kCount, int kColumns, int kStride, int kThreads, bool kRight, class T, class RowOf, class Mark>
SIMT_DEVICE void stage_exponentials(Real<T>* values, Real<T>* less_ones, const Rows<const T> m, int64_t col, int64_t end_col, const RowOf& row_of,
                                    Real<T> missing, const Mark& mark) {
  constexpr int kPerRow = kColumns / kVec<T>, kUnits = kCount * kPerRow, kStore = kVec<Real<T>>;
  static_assert(kColumns % kVec<T> == 0 && kUnits % kThreads == 0 && 32 % kPerRow == 0, "whole units, whole rows in a warp");
#pragma unroll 1
  for (int i = 0; i < kUnits / kThreads; i++) {
    const int unit = i * kThreads + int(threadIdx.x), r = unit / kPerRow, c = unit % kPerRow * kVec<T>;
    const int64_t row = row_of(r);
    Real<T> x[kVec<T>];
    if (row >= 0 && col + c < end_col) {
      load_vec<T>(m, row, col + c, end_col, x);
    } else {
#pragma unroll
      for (int k = 0; k < kVec<T>; k++) x[k] = 0;
    }
    bool out = false;
#pragma unroll
    for (int k = 0; k < kVec<T>; k += kStore) {
      Vec16<Real<T>> value, less_one;
#pragma unroll
      for (int e = 0; e < kStore; e++) {
        out = out || !in_range(x[k + e]);
        const Exponential<Real<T>> both = exponential<kRight>(x[k + e], missing);
        value.x[e] = both.value, less_one.x[e] = both.less_one;
      }
      *reinterpret_cast<Vec16<Real<T>>*>(values + r * kStride + c + k) = value;
      *reinterpret_cast<Vec16<Real<T>>*>(less_ones + r * kStride + c + k) = less_one;
    }
    const unsigned any = __ballot_sync(0xffffffffu, out) >> (int(threadIdx.x) % 32 / kPerRow * kPerRow);
    if (c == 0) mark(r, (any & (kPerRow == 32 ? 0xffffffffu : (1u << (kPerRow % 32)) - 1)) != 0);
  }
}

// The score of one pair, however large its numbers are.
template <class T>
SIMT_DEVICE Real<T> direct_score(const Rows<const T>& left, int64_t left_row, const Rows<const T>& right, int64_t right_row, const Real<T>* weight,
                                 int64_t dim) {
  Real<T> sum = 0;
#pragma unroll 1
  for (int64_t d = 0; d < dim; d++) sum += weight[d] * tanh(to_real(*left.at(left_row, d)) + to_real(*right.at(right_row, d)));
  return sum;
}

// As DotProduct, the template argument of the kernels of exact attention. kKeyRows: the left rows are keys. Scores are the same bits either way:
// rows of large scores are normalised by their largest one.
template <class Real, bool kKeyRows = false>
struct AdditiveProduct {
  const Real* weights;  // [head_dim], or [num_heads][head_dim]
  int64_t head_stride;
  static constexpr bool kFewRegisters = false;

  // A tile holds both exponentials of this many columns, half of those that it has room for.
  template <class Tile>
  static constexpr int kColumns = Tile::kDepth / 2;
  // Weights of kColumns columns over the scale of their quad, the scales; marks of left rows, right rows and weights.
  template <class Tile>
  static constexpr int kBytes = (kColumns<Tile> + kColumns<Tile> / kQuad) * int(sizeof(Real)) + 2 * Tile::kRows + 16 + 16;

  template <class Tile, class LeftRow, class RightRow>
  SIMT_DEVICE void add(typename Tile::Scores& scores, int64_t head, const Rows<const typename Tile::T>& left, const LeftRow& left_row,
                       const Rows<const typename Tile::T>& right, const RightRow& right_row, int64_t dim, bool left_stays, Real* left_tile, Real* right_tile,
                       unsigned char* memory, typename Tile::Place at) const {
    constexpr int kStaged = kColumns<Tile>, kStride = Tile::kStride, kThreads = Tile::kThreads;
    static_assert(kStaged % kQuad == 0 && kStaged <= 32, "one warp stages the weights");
    memory = (unsigned char*)((uintptr_t(memory) + 15) / 16 * 16);
    Real* const weight_tile = (Real*)memory;
    Real* const scale_tile = weight_tile + kStaged;
    uint8_t* const left_marks = (uint8_t*)(scale_tile + kStaged / kQuad);
    uint8_t* const right_marks = left_marks + Tile::kRows;
    uint8_t* const weight_mark = right_marks + Tile::kRows;
    const Real* const weight = weights + head * head_stride;
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) scores[i][j] = 0;
    if (dim == 0) return;
    left_stays = left_stays && dim <= kStaged;
#pragma unroll 1
    for (int64_t col = 0; col < dim; col += kStaged) {
      if (col > 0) __syncthreads();
      const auto put = [&](uint8_t* marks) { return [marks, col](int r, bool any) { marks[r] = uint8_t((col > 0 && marks[r] != 0) || any); }; };
      if (!left_stays)
        stage_exponentials<Tile::kRows, kStaged, kStride, kThreads, kKeyRows>(left_tile, left_tile + kStaged, left, col, dim, left_row,
                                                                              Real(kKeyRows ? 0.5 : 1), put(left_marks));
      stage_exponentials<Tile::kCols, kStaged, kStride, kThreads, !kKeyRows>(right_tile, right_tile + kStaged, right, col, dim, right_row,
                                                                             Real(kKeyRows ? 1 : 0.5), put(right_marks));
      if (threadIdx.x < 32) {
        const int d = int(threadIdx.x);
        const Real w = d < kStaged && col + d < dim ? weight[col + d] : Real(0);
        const bool out = __ballot_sync(0xffffffffu, w - w != 0) != 0;
        Real size = larger(w < 0 ? -w : w, AdditiveRange<Real>::kNormal);
#pragma unroll
        for (int other = 1; other < kQuad; other *= 2) size = larger(size, __shfl_xor_sync(0xffffffffu, size, other));
        const Real scale = out ? Real(1) : power_of_two(size);
        if (d < kStaged) weight_tile[d] = out ? Real(0) : w / scale;
        if (d < kStaged && d % kQuad == 0) scale_tile[d / kQuad] = scale;
        if (d == 0) put(weight_mark)(0, out);
      }
      __syncthreads();
      const int depth = int(min_of(int64_t(kStaged), dim - col));
      add_quads<Tile>(scores, left_tile, right_tile, weight_tile, scale_tile, (depth + kQuad - 1) / kQuad * kQuad, at);
    }

    const bool all = weight_mark[0] != 0;
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++) {
      const bool marked = all || left_marks[at.row(i)] != 0;
#pragma unroll 1
      for (int j = 0; j < Tile::kThreadCols; j++) {
        if (!marked && right_marks[at.x + 16 * j] == 0) continue;
        const int64_t l = left_row(at.row(i)), r = right_row(at.x + 16 * j);
        if (l < 0 || r < 0) continue;
        const Real score = direct_score<typename Tile::T>(left, l, right, r, weight, dim);
        // Scores stay in registers: no index that is not known when compiling.
#pragma unroll
        for (int a = 0; a < Tile::kThreadRows; a++)
#pragma unroll
          for (int b = 0; b < Tile::kThreadCols; b++)
            if (a == i && b == j) scores[a][b] = score;
      }
    }
  }

 private:
  // A quad of one row: u and u - 1 of a query; P / 2, R / 2 and Q / 2 of a key.
  struct Side {
    Real value[kQuad], less_one[kQuad], positive[kQuad];
    SIMT_DEVICE void load(const Real* from, int second, bool of_key) {
      load_quad(value, from), load_quad(less_one, from + second);
#pragma unroll
      for (int c = 0; c < kQuad; c++)
        if (of_key) positive[c] = larger(less_one[c], Real(0)), less_one[c] = smaller(less_one[c], Real(0));
    }
  };

  // Rows whose exponentials a thread holds in registers at a time; in double one leaves no spills.
  static constexpr int kRowsAtATime = sizeof(Real) == 8 ? 1 : 4;

  // scores[i][j] += sum over `depth` columns, a multiple of kQuad, of w N / D, D = N + 1. Per quad, with n = w N over the scale,
  //   sum_k n_k / D_k = ((n_0 D_1 + n_1 D_0) D_2 D_3 + (n_2 D_3 + n_3 D_2) D_0 D_1) / (D_0 D_1 D_2 D_3)
  template <class Tile>
  SIMT_DEVICE static void add_quads(typename Tile::Scores& scores, const Real* left, const Real* right, const Real* weight, const Real* scales, int depth,
                                    typename Tile::Place at) {
    constexpr int kStaged = kColumns<Tile>;
    static_assert(Tile::kThreadRows % kRowsAtATime == 0 && kQuad % Tile::kVector == 0, "a quad is whole vectors");
    left += at.y * Tile::kStride, right += at.x * Tile::kStride;
#pragma unroll 1
    for (int k = 0; k < depth; k += kQuad) {
      Real w[kQuad];
      load_quad(w, weight + k);
      const Real scale = scales[k / kQuad];
#pragma unroll
      for (int i0 = 0; i0 < Tile::kThreadRows; i0 += kRowsAtATime) {
        Side a[kRowsAtATime];
#pragma unroll
        for (int i = 0; i < kRowsAtATime; i++) a[i].load(left + 8 * (i0 + i) * Tile::kStride + k, kStaged, kKeyRows);
#pragma unroll
        for (int j = 0; j < Tile::kThreadCols; j++) {
          Side b;
          b.load(right + 16 * j * Tile::kStride + k, kStaged, !kKeyRows);
#pragma unroll
          for (int i = 0; i < kRowsAtATime; i++) {
            const Side &query = kKeyRows ? b : a[i], &key = kKeyRows ? a[i] : b;
            Real n[kQuad], d[kQuad];
#pragma unroll
            for (int c = 0; c < kQuad; c++) {
              n[c] = half_excess(query.value[c], query.less_one[c], key.value[c], key.positive[c], key.less_one[c]);
              d[c] = n[c] + Real(1), n[c] *= w[c];
            }
            const Real low = d[0] * d[1], high = d[2] * d[3];
            const Real numerator_low = multiply_add(n[0], d[1], n[1] * d[0]), numerator_high = multiply_add(n[2], d[3], n[3] * d[2]);
            const Real numerator = multiply_add(numerator_low, high, numerator_high * low);
            scores[i0 + i][j] = multiply_add(numerator * reciprocal(low * high), scale, scores[i0 + i][j]);
          }
        }
      }
    }
  }
  SIMT_DEVICE static void load_quad(Real (&to)[kQuad], const Real* from) {
#pragma unroll
    for (int c = 0; c < kQuad; c += kVec<Real>) {
      const Vec16<Real> part = *reinterpret_cast<const Vec16<Real>*>(from + c);
#pragma unroll
      for (int e = 0; e < kVec<Real>; e++) to[c + e] = part.x[e];
    }
  }
};

}  // namespace cuda
}  // namespace tiled_attention
