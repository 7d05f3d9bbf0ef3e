#pragma once
// Scores w . tanh(q + k) without a hyperbolic function per pair. tanh(x + y) = 1 - 1/P with P = 1/2 + e^2x (e^2y / 2): the exponentials belong
// to a row each and are made as rows are staged, and four columns of a pair share one reciprocal. docs/kernels/additive_attention.md has the
// derivation. What the formula cannot hold (|x| too large for an exponential, infinities, NaN) goes the direct way, pair by pair.

#include "attention_fma_tile.cuh"

namespace tiled_attention {
namespace cuda {

// Columns that share one reciprocal.
constexpr int kQuad = 4;

template <class Real>
struct AdditiveRange {
  static constexpr bool kDouble = sizeof(Real) == 8;
  static constexpr Real kArgument = kDouble ? 350 : 40;  // |x| up to here: e^2x is a normal number
  static constexpr Real kWeight = Real(1e9);             // |w| up to here: no numerator overflows
  // P is cut off here: the product of four stays finite, and 1 / kCap is 0 beside 1.
  static constexpr Real kCap = kDouble ? Real(0x1p240) : Real(0x1p30);
};

SIMT_DEVICE float reciprocal(float x) { return simt::rcp(x); }
SIMT_DEVICE double reciprocal(double x) { return 1.0 / x; }
SIMT_DEVICE float smaller(float a, float b) { return fminf(a, b); }
SIMT_DEVICE double smaller(double a, double b) { return fmin(a, b); }
SIMT_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }

template <class Real>
SIMT_DEVICE bool in_range(Real x) {
  return x <= AdditiveRange<Real>::kArgument && x >= -AdditiveRange<Real>::kArgument;  // not NaN
}
// P of one column. Where the product of exponentials is infinite, P is the cap.
template <class Real>
SIMT_DEVICE Real half_denominator(Real left, Real half_right) {
  return smaller(multiply_add(left, half_right, Real(0.5)), AdditiveRange<Real>::kCap);
}

// Columns [col, col + kColumns) of kCount rows of a matrix as e^2x, or e^2x / 2 with kHalf, [kCount][kStride]; 1 or 1/2 outside of the matrix.
// `mark(row, any)` is called by one thread for each row, `any`: some x is out of range; those stand as kMissing.
template <int kCount, int kColumns, int kStride, int kThreads, bool kHalf, class T, class RowOf, class Mark>
SIMT_DEVICE void stage_exponentials(Real<T>* tile, const Rows<const T> m, int64_t col, int64_t end_col, const RowOf& row_of, Real<T> missing,
                                    const Mark& mark) {
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
    for (int k = 0; k < kVec<T>; k++) {
      const bool inside = in_range(x[k]);
      out = out || !inside;
      x[k] = inside ? exp(x[k] + x[k]) * Real<T>(kHalf ? 0.5 : 1) : missing;
    }
#pragma unroll
    for (int k = 0; k < kVec<T>; k += kStore) {
      Vec16<Real<T>> part;
#pragma unroll
      for (int e = 0; e < kStore; e++) part.x[e] = x[k + e];
      *reinterpret_cast<Vec16<Real<T>>*>(tile + r * kStride + c + k) = part;
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

// As DotProduct, the template argument of the kernels of exact attention.
template <class Real>
struct AdditiveProduct {
  const Real* weights;  // [head_dim], or [num_heads][head_dim]
  int64_t head_stride;
  static constexpr bool kFewRegisters = false;

  // Weights of kDepth columns; marks of left rows, right rows and weights.
  template <class Tile>
  static constexpr int kBytes = Tile::kDepth * int(sizeof(Real)) + 2 * Tile::kRows + 16 + 16;

  template <class Tile, class LeftRow, class RightRow>
  SIMT_DEVICE void add(typename Tile::Scores& scores, int64_t head, const Rows<const typename Tile::T>& left, const LeftRow& left_row,
                       const Rows<const typename Tile::T>& right, const RightRow& right_row, int64_t dim, bool left_stays, Real* left_tile, Real* right_tile,
                       unsigned char* memory, typename Tile::Place at) const {
    constexpr int kDepth = Tile::kDepth, kStride = Tile::kStride, kThreads = Tile::kThreads;
    static_assert(kDepth % 32 == 0 && kDepth <= kThreads, "whole warps stage the weights");
    memory = (unsigned char*)((uintptr_t(memory) + 15) / 16 * 16);
    Real* const weight_tile = (Real*)memory;
    uint8_t* const left_marks = memory + kDepth * sizeof(Real);
    uint8_t* const right_marks = left_marks + Tile::kRows;
    uint8_t* const weight_marks = right_marks + Tile::kRows;  // [kDepth / 32]
    const Real* const weight = weights + head * head_stride;
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++)
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) scores[i][j] = 0;
    if (dim == 0) return;
#pragma unroll 1
    for (int64_t col = 0; col < dim; col += kDepth) {
      if (col > 0) __syncthreads();
      const auto put = [&](uint8_t* marks) { return [marks, col](int r, bool any) { marks[r] = uint8_t((col > 0 && marks[r] != 0) || any); }; };
      if (!left_stays) stage_exponentials<Tile::kRows, kDepth, kStride, kThreads, false>(left_tile, left, col, dim, left_row, Real(1), put(left_marks));
      stage_exponentials<Tile::kCols, kDepth, kStride, kThreads, true>(right_tile, right, col, dim, right_row, Real(0.5), put(right_marks));
      if (threadIdx.x < kDepth) {
        const int d = int(threadIdx.x);
        const Real w = col + d < dim ? weight[col + d] : Real(0), size = w < 0 ? -w : w;
        const bool out = __ballot_sync(0xffffffffu, !(size <= AdditiveRange<Real>::kWeight)) != 0;
        weight_tile[d] = out ? Real(0) : w;
        if (d % 32 == 0) put(weight_marks)(d / 32, out);
      }
      __syncthreads();
      const int depth = int(min_of(int64_t(kDepth), dim - col));
      add_quads<Tile>(scores, left_tile, right_tile, weight_tile, (depth + kQuad - 1) / kQuad * kQuad, at);
    }

    bool all = false;
#pragma unroll
    for (int i = 0; i < kDepth / 32; i++) all = all || weight_marks[i] != 0;
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
  // scores[i][j] += sum over `depth` columns, a multiple of kQuad, of w (1 - 1/P). Per quad
  //   sum_k w_k / P_k = ((w_0 P_1 + w_1 P_0) P_2 P_3 + (w_2 P_3 + w_3 P_2) P_0 P_1) / (P_0 P_1 P_2 P_3)
  template <class Tile>
  SIMT_DEVICE static void add_quads(typename Tile::Scores& scores, const Real* left, const Real* right, const Real* weight, int depth,
                                    typename Tile::Place at) {
    using Vector = Vec16<Real>;
    constexpr int kParts = kQuad / Tile::kVector;
    left += at.y * Tile::kStride, right += at.x * Tile::kStride;
#pragma unroll 1
    for (int k = 0; k < depth; k += kQuad) {
      Real w[kQuad], a[Tile::kThreadRows][kQuad];
      load_quad(w, weight + k);
      const Real total = (w[0] + w[1]) + (w[2] + w[3]);
#pragma unroll
      for (int i = 0; i < Tile::kThreadRows; i++) load_quad(a[i], left + 8 * i * Tile::kStride + k);
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) {
        Real b[kQuad];
        load_quad(b, right + 16 * j * Tile::kStride + k);
#pragma unroll
        for (int i = 0; i < Tile::kThreadRows; i++) {
          Real p[kQuad];
#pragma unroll
          for (int c = 0; c < kQuad; c++) p[c] = half_denominator(a[i][c], b[c]);
          const Real low = p[0] * p[1], high = p[2] * p[3];
          const Real numerator_low = multiply_add(w[0], p[1], w[1] * p[0]), numerator_high = multiply_add(w[2], p[3], w[3] * p[2]);
          const Real numerator = multiply_add(numerator_low, high, numerator_high * low);
          scores[i][j] += multiply_add(-numerator, reciprocal(low * high), total);
        }
      }
    }
    static_assert(kParts >= 1 && sizeof(Vector) == 16, "a quad is whole vectors");
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
