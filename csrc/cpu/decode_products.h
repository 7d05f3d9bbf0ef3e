#pragma once
// The products of decode: a few query rows with keys and values where they lie, which are read once, from memory. Loads are asked for ahead of
// the arithmetic, a few lines at each step: bursts fill the queue of misses and then wait.

#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Adjacent rows of a cache: row i at data + i * row_stride, columns adjacent.
template <class T>
struct CacheRun {
  const T* data;
  int64_t row_stride;
  int count;
};

// How far ahead, in bytes: some 100 cycles of latency for each of the dozen lines that a core has on their way.
#ifndef DECODE_AHEAD
#define DECODE_AHEAD 16384
#endif

// Asks for the lines of `rows` rows that lie DECODE_AHEAD bytes behind the start of `run`, or in `next`, the run that is read after it.
struct AheadOfRun {
  const char *row, *next;
  int64_t row_stride;  // bytes
  int row_bytes, left, at = 0, lines;

  // `steps` calls of step() cover the rows.
  template <class T>
  ALWAYS_INLINE AheadOfRun(const CacheRun<T>& run, int first, const T* next, int cols, int rows, int steps)
      : next((const char*)next), row_stride(run.row_stride * int64_t(sizeof(T))), row_bytes(int(cols * sizeof(T))) {
    const int ahead = first + DECODE_AHEAD / (int(sizeof(T)) * max_of(cols, 1));
    left = run.count - ahead;
    row = left > 0 || !next ? (const char*)(run.data + ahead * run.row_stride) : this->next + (first < run.count ? first : 0) * row_stride;
    if (left <= 0) left = rows;
    lines = ((row_bytes + 63) / 64 * rows + steps - 1) / max_of(steps, 1);
  }
  ALWAYS_INLINE void step() {
    for (int i = 0; i < lines; i++) {
      __builtin_prefetch(row + at, 0, 2);
      if ((at += 64) >= row_bytes) {
        at = 0;
        row += row_stride;
        if (--left == 0 && next) row = next;
      }
    }
  }
};

// Blocks of kHalf lanes: lane L of v[i] becomes the sum of two lanes of what was v[i] where L is in an even block, of v[i + kHalf] in an odd one.
template <int kHalf, class T, int N>
ALWAYS_INLINE void fold_blocks(Vec<T, N> (&v)[N]) {
  typedef typename Vec<T, N>::Native Native;
  constexpr int kWide = N * int(sizeof(T)) / 8, kStep = kHalf * int(sizeof(T)) / 8;  // as 64-bit lanes, for which GCC finds one shuffle
  typedef typename Vec<int64_t, kWide>::Native Wide;
  Wide low, high;
#pragma GCC unroll 8
  for (int i = 0; i < kWide; i++) {
    low[i] = i & kStep ? kWide + i - kStep : i;
    high[i] = i & kStep ? kWide + i : i + kStep;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kHalf; i++) v[i] = Native(shuffle(Wide(v[i].v), Wide(v[i + kHalf].v), low)) + Native(shuffle(Wide(v[i].v), Wide(v[i + kHalf].v), high));
  if constexpr (kHalf * sizeof(T) > 16 || (sizeof(T) == 8 && kHalf > 1)) fold_blocks<kHalf / 2>(v);
}
// Lane i: the sum over the lanes of v[i].
template <class T, int N>
ALWAYS_INLINE Vec<T, N> reduce_each(Vec<T, N> (&v)[N]) {
  typedef typename Vec<T, N>::Native Native;
  if constexpr (N * sizeof(T) > 16 || sizeof(T) == 8) fold_blocks<N / 2>(v);
  if constexpr (sizeof(T) == 8) return v[0];
  else {
    // Inside of 128 bits: interleave, then the halves.
    constexpr int kWide = N / 2;
    typedef typename Vec<int64_t, kWide>::Native Wide;
    decltype(Native{} < Native{}) low, high;
    Wide low_pair, high_pair;
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
      low[i] = (i & 1 ? N : 0) + i / 4 * 4 + i % 4 / 2;
      high[i] = low[i] + 2;
    }
#pragma GCC unroll 8
    for (int i = 0; i < kWide; i++) {
      low_pair[i] = i & 1 ? kWide + i - 1 : i;
      high_pair[i] = i & 1 ? kWide + i : i + 1;
    }
    const Native a = shuffle(v[0].v, v[1].v, low) + shuffle(v[0].v, v[1].v, high);
    const Native b = shuffle(v[2].v, v[3].v, low) + shuffle(v[2].v, v[3].v, high);
    return Native(shuffle(Wide(a), Wide(b), low_pair)) + Native(shuffle(Wide(a), Wide(b), high_pair));
  }
}

// Rows of queries are padded to a multiple of this.
constexpr int kDecodeRowStep = 4;

// scores[r][j] = query[r] . key[j], lanes along head_dim: kRows rows and kKeys keys have as many accumulators as a vector has lanes, so that
// their sums become one vector. Padded columns of `query` are 0. Up to kKeys - 1 columns behind the last are written.
template <class Unit, class T>
__attribute__((noinline)) void decode_scores(int rows, int head_dim, const Unit* query, int query_stride, const CacheRun<T>& run, const T* next,
                                             Accumulator<Unit>* scores, int stride) {
  using V = NativeVec<Unit>;
  using Acc = NativeVec<Accumulator<Unit>>;
  constexpr int kN = Acc::kLanes, kRows = kN < kDecodeRowStep ? kN : kDecodeRowStep, kKeys = kN / kRows, kStep = kN * kUnitSize<Unit>;
  for (int j = 0; j < run.count; j += kKeys) {
    const T* from[kKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; k++) from[k] = run.data + min_of(j + k, run.count - 1) * run.row_stride;
    AheadOfRun ahead(run, j, next, head_dim, kKeys, rows / kRows * (head_dim / kStep));
    for (int r = 0; r < rows; r += kRows) {
      Acc acc[kN];
#pragma GCC unroll 16
      for (int i = 0; i < kN; i++) acc[i] = Acc(Accumulator<Unit>(0));
      const Unit* q = query + r * query_stride;
      const auto step = [&](int d, int count) __attribute__((always_inline)) {
        V key[kKeys];
#pragma GCC unroll 4
        for (int k = 0; k < kKeys; k++) key[k] = load_units<Unit>(from[k] + d, count);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; i++) {
          const V left = V::load(q + i * query_stride + d / kUnitSize<Unit>);
#pragma GCC unroll 4
          for (int k = 0; k < kKeys; k++) acc[i * kKeys + k] = multiply_add(left, key[k], acc[i * kKeys + k]);
        }
      };
      int d = 0;
#pragma GCC unroll 1
      for (; d + kStep <= head_dim; d += kStep) step(d, kStep), ahead.step();
      if (d < head_dim) step(d, head_dim - d);
      const Acc sums = reduce_each(acc);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; i++)
        memcpy(scores + (r + i) * stride + j, (const char*)&sums + i * kKeys * sizeof(Accumulator<Unit>), kKeys * sizeof(Accumulator<Unit>));
    }
  }
}

// kVectors vectors of columns of the next kUnitSize rows as units along the rows; of a single vector only `cols` columns, zeros behind.
template <int kVectors, class Unit, class T>
ALWAYS_INLINE void load_value_units(const T* from, int64_t stride, int rows, int cols, NativeVec<Unit> (&v)[kVectors]) {
  constexpr int kN = kLanes<Unit>;
#if defined(__AVX512BF16__)
  if constexpr (kUnitSize<Unit> == 2 && kVectors % 2 == 0) {
    // 32 columns of two rows, interleaved.
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 2
    for (int c = 0; c < kVectors; c += 2) {
      const __m512i a = _mm512_loadu_si512(from + c * kN), b = rows > 1 ? _mm512_loadu_si512(from + stride + c * kN) : _mm512_setzero_si512();
      v[c].v = (typename NativeVec<Unit>::Native)_mm512_permutex2var_epi16(a, low, b);
      v[c + 1].v = (typename NativeVec<Unit>::Native)_mm512_permutex2var_epi16(a, high, b);
    }
    return;
  }
#endif
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; c++) v[c] = load_rows<Unit>(from + c * kN, stride, rows, kVectors > 1 ? kN : cols);
}

// out[r][columns] += weights[r][j] value[j][columns], kRows rows, kVectors vectors of columns.
template <int kRows, int kVectors, class Unit, class T>
ALWAYS_INLINE void decode_value_block(AheadOfRun& ahead, int keys, int cols, const Unit* weights, int stride, const T* value, int64_t value_stride,
                                      Accumulator<Unit>* out, int out_stride) {
  using V = NativeVec<Unit>;
  using Acc = NativeVec<Accumulator<Unit>>;
  Acc acc[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; c++) acc[r][c] = Acc::load(out + r * out_stride + c * Acc::kLanes);
  const auto step = [&](int j, int rows) __attribute__((always_inline)) {
    V right[kVectors];
    load_value_units<kVectors, Unit>(value, value_stride, rows, cols, right);
    value += kUnitSize<Unit> * value_stride;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const V left(weights[r * stride + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c++) acc[r][c] = multiply_add(left, right[c], acc[r][c]);
    }
  };
  const int whole = keys / kUnitSize<Unit>;
#pragma GCC unroll 1
  for (int j = 0; j < whole; j++) step(j, kUnitSize<Unit>), ahead.step();
  if (keys % kUnitSize<Unit>) step(whole, 1);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; c++) acc[r][c].store(out + r * out_stride + c * Acc::kLanes);
}

template <int kValue> struct VectorCount {
  static constexpr int value = kValue;
};

// out[r] += weights[r][j] value[j], one j after the other. rows is a multiple of kDecodeRowStep; weights of bf16 pairs begin at a whole one.
template <class Unit, class T>
__attribute__((noinline)) void decode_values(int rows, int cols, const Unit* weights, int stride, const CacheRun<T>& run, const T* next, Accumulator<Unit>* out,
                                             int out_stride) {
  // 32 rows of values stay in L1 while the rows of weights pass over them. 16 accumulators, or 8: the registers of the instruction set.
  constexpr int kN = kLanes<Unit>, kKeys = 32, kVectors = kVectorBytes == 64 ? 4 : 2;
  const int eights = kVectorBytes == 64 && sizeof(T) == 2 ? round_down(rows, 8) : 0;
  for (int j = 0; j < run.count; j += kKeys) {
    const int keys = min_of(kKeys, run.count - j);
    const Unit* left = weights + j / kUnitSize<Unit>;
    const T* right = run.data + j * run.row_stride;
    const int passes = eights / 8 * ((cols + 2 * kN - 1) / (2 * kN)) + (rows - eights) / 4 * ((cols + kVectors * kN - 1) / (kVectors * kN));
    AheadOfRun ahead(run, j, next, cols, keys, (keys / kUnitSize<Unit>)*passes);
    int d = 0;
    const auto columns = [&](auto vectors, int count) __attribute__((always_inline)) {
      constexpr int kCount = decltype(vectors)::value;
      int r = 0;
      if constexpr (kCount <= 2)
        for (; r < eights; r += 8)
          decode_value_block<8, kCount>(ahead, keys, count, left + r * stride, stride, right + d, run.row_stride, out + r * out_stride + d, out_stride);
      for (; r < rows; r += 4)
        decode_value_block<4, kCount>(ahead, keys, count, left + r * stride, stride, right + d, run.row_stride, out + r * out_stride + d, out_stride);
      d += kCount * kN;
    };
    if constexpr (kVectors > 2)
      while (eights == 0 && cols - d >= kVectors * kN) columns(VectorCount<kVectors>(), kVectors * kN);
    while (cols - d >= 2 * kN) columns(VectorCount<2>(), 2 * kN);
    while (d < cols) columns(VectorCount<1>(), cols - d);
  }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
