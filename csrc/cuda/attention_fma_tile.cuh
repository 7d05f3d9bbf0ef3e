#pragma once
// What exact attention in Real is made of: tiles of rows as Real in shared memory, a product of rows with rows (scores) and one of weights
// with rows (outputs and gradients), both in registers, by multiply-adds or by tensor cores in tf32, and the score of a pair.

#include <math.h>
#include <new>
#include <type_traits>

#include "attention_fma_launch.h"
#include "block_list.cuh"
#include "dropout.cuh"
#include "load.cuh"
#include "row_table.cuh"
#include "score.cuh"

namespace tiled_attention {
namespace cuda {

SIMT_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SIMT_DEVICE uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SIMT_DEVICE float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Where a thread stands in a block of 8 x 16. It takes up the pairs of rows row(i) and columns x + 16 j, and holds in registers the elements
// (score_row(i), score_col(j)) of the first product and (result_row(i), result_col(j)) of the second, of which kVector columns lie together.
// A half warp has eight rows to itself, and the two write to different banks: their rows are four apart.
template <int kVector>
struct FmaPlace {
  int y, x;
  SIMT_DEVICE FmaPlace() : y(int(threadIdx.x) / 32 + int(threadIdx.x) % 32 / 16 * 4), x(int(threadIdx.x) % 16) {}
  SIMT_DEVICE int half_warp() const { return y; }
  SIMT_DEVICE int row(int i) const { return y + 8 * i; }
  SIMT_DEVICE int score_row(int i) const { return row(i); }
  SIMT_DEVICE int score_col(int j) const { return x + 16 * j; }
  SIMT_DEVICE int result_row(int i) const { return row(i); }
  SIMT_DEVICE int result_col(int j) const { return kVector * x + 16 * j; }
};
// A warp has 16 neighbouring rows; its lane 4 g + t holds rows g and g + 8 of products.
struct MmaPlace {
  int y, x;
  SIMT_DEVICE MmaPlace() : y(int(threadIdx.x) / 32 * 16 + int(threadIdx.x) % 32 / 16 * 4), x(int(threadIdx.x) % 16) {}
  SIMT_DEVICE int half_warp() const { return int(threadIdx.x) / 16; }
  SIMT_DEVICE int row(int i) const { return y + i + (i & 4); }
  SIMT_DEVICE int score_row(int i) const { return y + x / 4 + 8 * i; }
  SIMT_DEVICE int score_col(int j) const { return x % 4 + 4 * j; }
  SIMT_DEVICE int result_row(int i) const { return score_row(i); }
  SIMT_DEVICE int result_col(int j) const { return x % 4 * 8 + j % 8 + j / 8 * 32; }
};

// A block has 128 threads for kRows rows and kCols columns of scores, and for kOut columns of results.
template <class T_, int kOut_, Products kProducts_>
struct FmaTile {
  using T = T_;
  using Real = typename RealOf<T>::type;
  static constexpr Products kProducts = kProducts_;
  static constexpr bool kTensorCores = kProducts == Products::kTf32;
  static_assert(!kTensorCores || (sizeof(T) == 4 && kOut_ % 32 == 0), "tf32 is float32 cut short");
  static constexpr int kThreads = 128, kRows = 64, kCols = sizeof(Real) == 8 ? 32 : 64, kDepth = kCols, kOut = kOut_;
  static constexpr int kVector = 16 / int(sizeof(Real)), kThreadRows = kRows / 8, kThreadCols = kCols / 16;
  using Place = typename std::conditional<kTensorCores, MmaPlace, FmaPlace<kVector>>::type;
  // Terms of a product that are added at a time, and how many elements of products a thread holds.
  static constexpr int kTerms = kTensorCores ? 8 : kVector, kProductRows = kTensorCores ? 2 : kThreadRows;
  static constexpr int kScoreCols = kRows * kCols / kThreads / kProductRows, kResultCols = kRows * kOut / kThreads / kProductRows;
  using ThreadPairs = Real[kThreadRows][kThreadCols];
  using Scores = Real[kProductRows][kScoreCols];
  using Results = Real[kProductRows][kResultCols];
  // 16 bytes more than the columns: eight rows of one column lie in different banks. In values, four rows of two neighbouring columns of 16 bytes do.
  static constexpr int kStride = kDepth + kVector, kOutStride = kOut + (kTensorCores ? 8 : kVector);
  static constexpr int kLeft = kRows * kStride, kRight = kRows * kStride, kValues = kCols * kOutStride;
  static constexpr int kScoreBytes = (kLeft + kRight) * int(sizeof(Real));

  // What products multiply in place of x.
  SIMT_DEVICE static Real operand(Real x) {
    if constexpr (kTensorCores) return float_of_bits(simt::to_tf32(x));
    else return x;
  }
};

// Row r of a tile is row first + r of its matrix; negative behind the end.
struct RowRange {
  int64_t first, end;
  SIMT_DEVICE int64_t operator()(int r) const { return first + r < end ? first + r : -1; }
};
// Row r of a tile is the query rows[first + r], or first + r without a list.
struct ChosenRows {
  const int64_t* rows;
  int64_t first, end, seqlen_q;
  SIMT_DEVICE int64_t operator()(int r) const {
    if (first + r >= end) return -1;
    return rows ? min_of(max_of(rows[first + r], int64_t(0)), seqlen_q - 1) : first + r;
  }
};

// What all threads of a block know alike lies in shared memory: 70 registers of a thread otherwise. The memory is free before.
template <class X, class... Args>
SIMT_DEVICE X& in_shared(X* memory, const Args&... args) {
  __syncthreads();
  if (threadIdx.x == 0) new (memory) X(args...);
  __syncthreads();
  return *memory;
}

// Columns [col, col + kColumns) of kCount rows of a matrix as operands, [kCount][kStride], 0 outside of it. Whether all of this thread are finite.
template <class Tile, int kCount, int kColumns, int kStride, class RowOf>
SIMT_DEVICE bool stage(typename Tile::Real* tile, const Rows<const typename Tile::T> m, int64_t col, int64_t end_col, const RowOf& row_of) {
  using T = typename Tile::T;
  constexpr int kPerRow = kColumns / kVec<T>, kUnits = kCount * kPerRow, kStore = kVec<Real<T>>, kThreads = Tile::kThreads;
  static_assert(kColumns % kVec<T> == 0 && kUnits % kThreads == 0, "whole units");
  bool finite = true;
#pragma unroll(sizeof(T) == 2 ? 2 : 4)
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
#pragma unroll
    for (int k = 0; k < kVec<T>; k += kStore) {
      Vec16<Real<T>> part;
#pragma unroll
      for (int e = 0; e < kStore; e++) {
        part.x[e] = Tile::operand(x[k + e]);
        if (Tile::kTensorCores) finite = finite && is_finite(part.x[e]);
      }
      *reinterpret_cast<Vec16<Real<T>>*>(tile + r * kStride + c + k) = part;
    }
  }
  return finite;
}

// kCols rows of a matrix for the second product, kOut columns of them. not_finite, 0 before the first, becomes more where one holds inf or NaN.
template <class Tile>
SIMT_DEVICE void stage_values(typename Tile::Real* values, int* not_finite, const Rows<const typename Tile::T>& m, int64_t first_col, int64_t cols,
                              const RowRange& rows) {
  if (!stage<Tile, Tile::kCols, Tile::kOut, Tile::kOutStride>(values, m, first_col, cols, rows)) atomicAdd(not_finite, 1);
}

// scores[i][j] += left row . right row over `depth` columns, a multiple of kTerms: one chain of multiply-adds per score.
template <class Tile>
SIMT_DEVICE void add_row_products(typename Tile::Scores& scores, const typename Tile::Real* left, const typename Tile::Real* right, int depth,
                                  typename Tile::Place at) {
  using Vector = Vec16<typename Tile::Real>;
  left += at.y * Tile::kStride, right += at.x * Tile::kStride;
#pragma unroll 1
  for (int k = 0; k < depth; k += Tile::kVector) {
    Vector a[Tile::kThreadRows];
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++) a[i] = *reinterpret_cast<const Vector*>(left + 8 * i * Tile::kStride + k);
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) {
      const Vector b = *reinterpret_cast<const Vector*>(right + 16 * j * Tile::kStride + k);
#pragma unroll
      for (int e = 0; e < Tile::kVector; e++)
#pragma unroll
        for (int i = 0; i < Tile::kThreadRows; i++) scores[i][j] += a[i].x[e] * b.x[e];
    }
  }
}

// d += a b for a d whose registers need not lie together.
SIMT_DEVICE void mma_tf32(float& d00, float& d01, float& d10, float& d11, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float d[4] = {d00, d01, d10, d11};
  simt::mma_1688_tf32(d, a, b0, b1);
  d00 = d[0], d01 = d[1], d10 = d[2], d11 = d[3];
}
// Where a lane begins to read the A fragments of the rows of its warp: ldmatrix moves a float as two 16-bit elements.
template <class Tile>
SIMT_DEVICE const float* a_fragments(const float* tile) {
  const int lane = int(threadIdx.x) % 32;
  return tile + (int(threadIdx.x) / 32 * 16 + lane % 16) * Tile::kStride + lane / 16 * 4;
}

// The same by tensor cores. Column 2 t + e of 8 is row t + 4 e of `right`: scores written one by one meet 32 banks.
template <class Tile>
SIMT_DEVICE void add_row_products_tf32(typename Tile::Scores& scores, const float* left, const float* right, int depth) {
  const int lane = int(threadIdx.x) % 32;
  left = a_fragments<Tile>(left);
  right += (lane / 16 * 8 + lane % 2 * 4 + lane % 8 / 2) * Tile::kStride + lane / 8 % 2 * 4;
#pragma unroll 1
  for (int k = 0; k < depth; k += Tile::kTerms) {
    uint32_t a[4];
    simt::ldmatrix_x4(a, left + k);
#pragma unroll
    for (int n = 0; n < Tile::kCols / 8; n += 2) {
      uint32_t b[4];
      simt::ldmatrix_x4(b, right + n * 8 * Tile::kStride + k);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int j = 2 * (n + h);
        mma_tf32(scores[0][j], scores[0][j + 1], scores[1][j], scores[1][j + 1], a, b[2 * h], b[2 * h + 1]);
      }
    }
  }
}

// scores = left rows . right rows over all `dim` columns, kDepth at a time through shared memory, which must be free. `left_stays`: the rows of
// the last call are still there.
template <class Tile, class LeftRow, class RightRow>
SIMT_DEVICE void row_products(typename Tile::Scores& scores, const Rows<const typename Tile::T>& left, const LeftRow& left_row,
                              const Rows<const typename Tile::T>& right, const RightRow& right_row, int64_t dim, bool left_stays,
                              typename Tile::Real* left_tile, typename Tile::Real* right_tile, typename Tile::Place at) {
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kScoreCols; j++) scores[i][j] = 0;
#pragma unroll 1
  for (int64_t col = 0; col < dim; col += Tile::kDepth) {
    if (col > 0) __syncthreads();
    if (!left_stays) stage<Tile, Tile::kRows, Tile::kDepth, Tile::kStride>(left_tile, left, col, dim, left_row);
    stage<Tile, Tile::kCols, Tile::kDepth, Tile::kStride>(right_tile, right, col, dim, right_row);
    __syncthreads();
    const int depth = (int(min_of(int64_t(Tile::kDepth), dim - col)) + Tile::kTerms - 1) / Tile::kTerms * Tile::kTerms;
    if constexpr (Tile::kTensorCores) add_row_products_tf32<Tile>(scores, left_tile, right_tile, depth);
    else add_row_products<Tile>(scores, left_tile, right_tile, depth, at);
  }
}

// What scores are made of, one of the template arguments of the kernels: here query . key. `memory`: kBytes of shared memory that stay its own.
struct DotProduct {
  // Whether products leave registers for more blocks of a multiprocessor, and for wide results of 16-bit tiles.
  static constexpr bool kFewRegisters = true;
  template <class Tile>
  static constexpr int kBytes = 0;
  template <class Tile, class LeftRow, class RightRow>
  SIMT_DEVICE void add(typename Tile::Scores& scores, int64_t /*head*/, const Rows<const typename Tile::T>& left, const LeftRow& left_row,
                       const Rows<const typename Tile::T>& right, const RightRow& right_row, int64_t dim, bool left_stays, typename Tile::Real* left_tile,
                       typename Tile::Real* right_tile, unsigned char* /*memory*/, typename Tile::Place at) const {
    row_products<Tile>(scores, left, left_row, right, right_row, dim, left_stays, left_tile, right_tile, at);
  }
};

// The weight of a hidden pair is -0, which no visible one is: products then leave out what it would multiply, be it NaN.
template <class Real>
SIMT_DEVICE Real hidden_weight() {
  return Real(-0.0);
}
SIMT_DEVICE bool is_hidden(float weight) { return bits_of(weight) == 0x80000000u; }
SIMT_DEVICE bool is_hidden(double weight) { return bits_of(weight) == 0x8000000000000000u; }

// sums[i] += weights[row][k] values[k] over `count` columns of the weights. kSelect: some pairs may be hidden.
template <class Tile, bool kSelect>
SIMT_DEVICE void add_weighted_chain(typename Tile::Results& sums, const typename Tile::Real* weights, const typename Tile::Real* values, int count,
                                    typename Tile::Place at) {
  using Vector = Vec16<typename Tile::Real>;
  constexpr int kVector = Tile::kVector;
  weights += at.result_row(0) * Tile::kStride, values += at.result_col(0);
#pragma unroll 1
  for (int k = 0; k < count; k += kVector) {
    Vector w[Tile::kProductRows];
#pragma unroll
    for (int i = 0; i < Tile::kProductRows; i++) w[i] = *reinterpret_cast<const Vector*>(weights + 8 * i * Tile::kStride + k);
#pragma unroll
    for (int e = 0; e < kVector; e++)
#pragma unroll
      for (int j = 0; j < Tile::kResultCols; j += kVector) {
        const Vector v = *reinterpret_cast<const Vector*>(values + (k + e) * Tile::kOutStride + at.result_col(j) - at.result_col(0));
#pragma unroll
        for (int i = 0; i < Tile::kProductRows; i++) {
          if (kSelect && is_hidden(w[i].x[e])) continue;
#pragma unroll
          for (int c = 0; c < kVector; c++) sums[i][j + c] += w[i].x[e] * v.x[c];
        }
      }
  }
}

// The same by tensor cores, where what is hidden counts as 0. Column 2 t + e of the j-th 8 of 32 is column 8 t + 4 e + j: four of them are one access.
template <class Tile>
SIMT_DEVICE void add_weighted_tf32(typename Tile::Results& sums, const float* weights, const float* values, int count) {
  const int lane = int(threadIdx.x) % 32;
  weights = a_fragments<Tile>(weights), values += lane % 4 * Tile::kOutStride + lane / 4 * 4;
#pragma unroll 1
  for (int k = 0; k < count; k += Tile::kTerms, values += Tile::kTerms * Tile::kOutStride) {
    uint32_t a[4];
    simt::ldmatrix_x4(a, weights + k);
#pragma unroll
    for (int n = 0; n < Tile::kResultCols; n += 8) {
      const auto b0 = *reinterpret_cast<const Vec16<float>*>(values + 4 * n),
                 b1 = *reinterpret_cast<const Vec16<float>*>(values + 4 * Tile::kOutStride + 4 * n);
#pragma unroll
      for (int j = n; j < n + 4; j++) mma_tf32(sums[0][j], sums[0][j + 4], sums[1][j], sums[1][j + 4], a, bits_of(b0.x[j - n]), bits_of(b1.x[j - n]));
    }
  }
}

// results += weights . values over the first `columns` columns of the weights, all where there are more. `edge`: some pairs may be hidden. In
// float32 a tile is summed by itself first: one chain over thousands of columns would lose what the contract keeps, twice the error of sums in
// blocks.
template <class Tile>
SIMT_DEVICE void add_weighted(typename Tile::Results& results, const typename Tile::Real* weights, const typename Tile::Real* values, int64_t columns,
                              bool edge, const int* not_finite, typename Tile::Place at) {
  const int count = (int(min_of(int64_t(Tile::kCols), columns)) + Tile::kTerms - 1) / Tile::kTerms * Tile::kTerms;
  if constexpr (Tile::kTensorCores) {
    if (edge && *not_finite) add_weighted_chain<Tile, true>(results, weights, values, count, at);
    else add_weighted_tf32<Tile>(results, weights, values, count);
  } else if constexpr (sizeof(typename Tile::Real) == 8) {
    if (edge) add_weighted_chain<Tile, true>(results, weights, values, count, at);
    else add_weighted_chain<Tile, false>(results, weights, values, count, at);
  } else {
    typename Tile::Results of_tile = {};
    if (edge) add_weighted_chain<Tile, true>(of_tile, weights, values, count, at);
    else add_weighted_chain<Tile, false>(of_tile, weights, values, count, at);
#pragma unroll
    for (int i = 0; i < Tile::kProductRows; i++)
#pragma unroll
      for (int c = 0; c < Tile::kResultCols; c++) results[i][c] += of_tile[i][c];
  }
}

// To the tile of weights, where each thread can take up its own row by row without holding all of them. The rows are those of its warp.
template <class Tile>
SIMT_DEVICE void put_scores(typename Tile::Real* tile, const typename Tile::Scores& scores, typename Tile::Place at) {
#pragma unroll
  for (int i = 0; i < Tile::kProductRows; i++)
#pragma unroll
    for (int j = 0; j < Tile::kScoreCols; j++) tile[at.score_row(i) * Tile::kStride + at.score_col(j)] = scores[i][j];
  if (Tile::kTensorCores) __syncwarp();
}

// What dropout keeps of a tile: a byte for 2 queries x 4 keys by absolute position, the pairs of one Philox call.
template <int kQueries, int kKeys>
struct KeptTile {
  static constexpr int kKeyGroups = kKeys / 4 + 1, kGroups = (kQueries / 2 + 1) * kKeyGroups, kBytes = (kGroups + 15) / 16 * 16;
  const uint8_t* bytes;             // null: all
  int query_shift = 0, key_shift = 0;  // of the first pair in its group

  // By all threads; to be read after a barrier.
  template <int kThreads>
  SIMT_DEVICE static KeptTile draw(const Dropout& dropout, int64_t first_query, int64_t first_key, uint8_t* bytes) {
    if (!dropout.active) return {nullptr};
    const int64_t query = first_query + dropout.query_offset, key = first_key + dropout.key_offset;
    const int query_shift = int(query % 2), key_shift = int(key % 4);
#pragma unroll 1
    for (int group = int(threadIdx.x); group < kGroups; group += kThreads) {
      uint32_t words[4], kept = 0;
      dropout.words(query - query_shift + group / kKeyGroups * 2, key - key_shift + group % kKeyGroups * 4, words);
#pragma unroll
      for (int c = 0; c < 4; c++) kept |= uint32_t(dropout.keeps(words[c], 0)) << c | uint32_t(dropout.keeps(words[c], 1)) << (4 + c);
      bytes[group] = uint8_t(kept);
    }
    return {bytes, query_shift, key_shift};
  }
  SIMT_DEVICE bool operator()(int query, int key) const {
    if (!bytes) return true;
    const int q = query + query_shift, k = key + key_shift;
    return bytes[q / 2 * kKeyGroups + k / 4] >> (q % 2 * 4 + k % 4) & 1;
  }
};

// What a query sees of the keys of a tile.
struct RowView {
  RowEntry keys;
  uint64_t word;  // HeadList::word()
  SIMT_DEVICE bool contains(int key) const { return keys.contains(key) && (word >> (key % kListTile) & 1); }
};

// The pairs of one query head.
template <class Real>
struct HeadScores {
  Scores<Real> scores;
  HeadList list;
  const RowEntry* rows;
  int64_t seqlen_q;
  bool hides;  // whether a pair inside the intervals may be hidden

  SIMT_DEVICE HeadScores(const AttentionParams& p, const RowTable& table, int64_t batch, int64_t head)
      : scores(p, batch, head),
        list(p, batch, head),
        rows(table.rows_of(batch)),
        seqlen_q(query_segment(p, batch).length),
        hides(p.bias.data || p.bool_mask.data) {}

  // Of a query that may be negative or behind the end, in a tile that the list shows as `shown`.
  SIMT_DEVICE RowView row(int64_t query, int shown) const {
    if (query < 0 || query >= seqlen_q) return {{0, 0, 0, 0}, 0};
    return {rows[query], list.word(shown, query)};
  }
  // The same of any query and the tile of `key`.
  SIMT_DEVICE RowView row_at(int64_t query, int64_t key) const {
    if (query < 0 || query >= seqlen_q) return {{0, 0, 0, 0}, 0};
    return {rows[query], list.word_at(query, key)};
  }
  // -inf where hidden. `edge`: the tile has hidden pairs, or ends behind the matrix.
  template <class Row>
  SIMT_DEVICE Real operator()(Real product, int64_t query, int64_t key, bool edge, const Row& row, Real* derivative = nullptr) const {
    if (edge && !row.contains(int(key))) return minus_infinity(Real());
    return scores(product, query, key, derivative);
  }
};

// kVector columns of a result, rounded to T.
template <class T, int kVector>
SIMT_DEVICE void store_part(const Rows<T>& m, int64_t row, int64_t col, int64_t cols, const Real<T> (&x)[kVector]) {
  T* const to = m.at(row, col);
  if (m.wide && col + kVector <= cols) {
    struct alignas(kVector * sizeof(T)) Part {
      T x[kVector];
    } part;
#pragma unroll
    for (int k = 0; k < kVector; k++) part.x[k] = from_real<T>(x[k]);
    *reinterpret_cast<Part*>(to) = part;
  } else {
#pragma unroll
    for (int k = 0; k < kVector; k++)
      if (col + k < cols) to[k * m.col_stride] = from_real<T>(x[k]);
  }
}

SIMT_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
SIMT_DEVICE double larger(double a, double b) { return fmax(a, b); }

// Over the 16 threads of a row.
template <class Real>
SIMT_DEVICE Real row_max(Real x) {
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}
template <class Real>
SIMT_DEVICE Real row_sum(Real x) {
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// The running softmax of the rows of a block, in shared memory.
template <class Tile>
struct SoftmaxRows {
  using Real = typename Tile::Real;
  static constexpr int kElements = 3 * Tile::kRows + Tile::kThreadRows * Tile::kThreads;
  Real *max, *next_max, *shrink;  // [kRows]
  Real* sum;                      // [kThreadRows][kThreads], each thread's share
  const Real sink;

  SIMT_DEVICE SoftmaxRows(const AttentionParams& p, int64_t head, Real* memory, typename Tile::Place at)
      : max(memory),
        next_max(memory + Tile::kRows),
        shrink(memory + 2 * Tile::kRows),
        sum(memory + 3 * Tile::kRows + threadIdx.x),
        sink(p.sinks ? ((const Real*)p.sinks)[head] : minus_infinity(Real())) {
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; i++) {
      if (at.x == 0) max[at.row(i)] = sink;
      sum[i * Tile::kThreads] = at.x == 0 && sink != minus_infinity(Real()) ? Real(1) : Real(0);
    }
  }
  // The scores of a thread in its row i become weights, hidden_weight() where they are -inf. Rows are not to be read before next_tile().
  SIMT_DEVICE void add(int i, Real (&scores)[Tile::kThreadCols], typename Tile::Place at) {
    const int row = at.row(i);
    const Real before = max[row];
    Real top = scores[0];
#pragma unroll
    for (int j = 1; j < Tile::kThreadCols; j++) top = larger(top, scores[j]);
    top = larger(before, row_max(top));
    const Real base = top == minus_infinity(Real()) ? Real(0) : top, factor = exp(before - base);
    Real added = 0;
#pragma unroll
    for (int j = 0; j < Tile::kThreadCols; j++) {
      const Real weight = exp(scores[j] - base);
      added += weight;
      scores[j] = scores[j] == minus_infinity(Real()) ? hidden_weight<Real>() : weight;
    }
    sum[i * Tile::kThreads] = sum[i * Tile::kThreads] * factor + added;
    if (at.x == 0) next_max[row] = top, shrink[row] = factor;
  }
  // After a barrier of the warp.
  SIMT_DEVICE void next_tile() {
    Real* const other = max;
    max = next_max, next_max = other;
  }
};

}  // namespace cuda
}  // namespace tiled_attention
