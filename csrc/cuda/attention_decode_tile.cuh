#pragma once
// What the decode kernel is made of: its tile and shared memory, the rows of a cache, sums over lanes, and the product with the values.

#include <math.h>
#include <new>

#include "attention_decode_launch.h"
#include "load.cuh"
#include "score.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

template <class T_, int kLanes_, int kRows_>
struct DecodeTile {
  using T = T_;
  using R = Real<T>;
  static constexpr int kLanes = kLanes_, kRows = kRows_, kVector = kVec<T>, kCols = kLanes * kVector;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kWarpKeys = kDecodeBlockKeys / kWarps;
  // Keys that a warp reads at a time, how often it does for its 16 keys, and how many of these reads are under way together.
  static constexpr int kSlots = 32 / kLanes, kSteps = kWarpKeys / kSlots, kUnroll = sizeof(R) == 8 && kRows == 8 ? 2 : 4;
  static_assert(kSteps % kUnroll == 0, "whole groups of reads");
  // Scores of a warp: [slot][step][row]. The distance of slots keeps what they write at the same time in different banks.
  static constexpr int kSlotStride = kSteps * kRows + (kRows == 4 && kLanes == 16 ? 16 : 0), kScores = kSlots * kSlotStride;
  // Lanes that share a row in the softmax, kRows apart, and the keys of each.
  static constexpr int kRowLanes = kRows >= 2 ? 32 / kRows : kWarpKeys, kRowKeys = kWarpKeys / kRowLanes;
};

// Blocks of 64 keys that some row of the tile sees: first those of the low keys, then those of the high keys that are not among them.
struct KeyBlocks {
  int low_begin = 0, low_count = 0, high_begin = 0, high_count = 0;
  KeyBlocks() = default;
  SIMT_DEVICE explicit KeyBlocks(const CacheKeys& keys) {
    if (!is_empty(keys.low)) low_begin = keys.low.begin / kDecodeBlockKeys, low_count = (keys.low.end - 1) / kDecodeBlockKeys + 1 - low_begin;
    if (is_empty(keys.high)) return;
    const int end = (keys.high.end - 1) / kDecodeBlockKeys + 1;
    high_begin = keys.high.begin / kDecodeBlockKeys;
    if (low_count > 0 && high_begin < low_begin + low_count) {
      low_count += max_of(0, low_begin - high_begin);
      low_begin = min_of(low_begin, high_begin);
      high_begin = low_begin + low_count;
    }
    high_count = max_of(0, end - high_begin);
  }
  SIMT_DEVICE int count() const { return low_count + high_count; }
  SIMT_DEVICE int operator[](int i) const { return i < low_count ? low_begin + i : high_begin + i - low_count; }
};

// One row of a tile.
template <class R>
struct DecodeRow {
  RowKeys keys;
  int64_t query, head;
  Scores<R> score;

  SIMT_DEVICE DecodeRow(const AttentionParams& p, const RowMask& mask, int64_t batch, int64_t head, int64_t query, bool exists)
      : keys(exists ? mask.row(query) : RowKeys{{0, 0}, {0, 0}}), query(query), head(head), score(p, batch, head) {
    score.query_offset = mask.query_offset;
  }
};

// What all threads know alike stands here too: registers are for the queries and the sums.
template <class Tile>
struct alignas(16) DecodeShared {
  using R = typename Tile::R;
  alignas(16) R scores[Tile::kWarps][Tile::kScores];
  alignas(16) R out[Tile::kRows][Tile::kCols];
  R shrink[Tile::kWarps][Tile::kRows], max[Tile::kWarps][Tile::kRows], sum[Tile::kWarps][Tile::kRows];
  int64_t key_at[Tile::kWarps][Tile::kWarpKeys], value_at[Tile::kWarps][Tile::kWarpKeys];  // elements into the cache of the head, -1: hidden
  CacheKeys seen;
  KeyBlocks blocks;
  // Two words more than all banks: the lanes of different rows read in different ones.
  static constexpr int kRowBytes = (int(sizeof(DecodeRow<R>)) + 127) / 128 * 128 + 8;
  alignas(16) char rows[Tile::kRows * kRowBytes];
  SIMT_DEVICE DecodeRow<R>& row(int r) { return *reinterpret_cast<DecodeRow<R>*>(rows + r * kRowBytes); }
};

// The cache of one (batch item, kv head).
template <class T>
struct CacheMatrix {
  const TensorView& view;
  const T* data;
  bool wide;

  SIMT_DEVICE CacheMatrix(const TensorView& view, const CacheItem& item, int64_t batch, int64_t head_kv)
      : view(view), data((const T*)view.data + head_kv * view.head_stride + (item.pages ? 0 : batch * view.batch_strides[0])) {
    const int64_t strides = view.row_stride | (item.pages ? view.batch_strides[0] : 0);
    wide = view.col_stride == 1 && (reinterpret_cast<uintptr_t>(data) | uintptr_t(strides * int64_t(sizeof(T)))) % 16 == 0;
  }
  SIMT_DEVICE int64_t at(int64_t page, int64_t row) const { return page * view.batch_strides[0] + row * view.row_stride; }
};

// Page and row of a key; the page is 0 where there are no pages, and -1 where the key is not to be read.
struct KeyPlace {
  int64_t page, row;
  SIMT_DEVICE KeyPlace(const CacheItem& item, int64_t key) {
    const int64_t slot = item.slot(key);
    page = item.pages ? item.page(slot) : 0;
    row = item.pages ? item.row_of_page(slot) : slot;
  }
};

// 16 bytes of a row from column `col` on, zeros behind `cols` and where `at` is negative.
template <class T>
SIMT_DEVICE uint4 load_raw(const CacheMatrix<T>& m, int64_t at, int64_t col, int64_t cols) {
  uint4 bits = {0, 0, 0, 0};
  if (at < 0 || col >= cols) return bits;
  const T* const from = m.data + at + col * m.view.col_stride;
  if (m.wide && col + kVec<T> <= cols) return *reinterpret_cast<const uint4*>(from);
  T raw[kVec<T>];
  memcpy(raw, &bits, 16);
#pragma unroll
  for (int k = 0; k < kVec<T>; k++)
    if (col + k < cols) raw[k] = from[k * m.view.col_stride];
  memcpy(&bits, raw, 16);
  return bits;
}
template <class T>
SIMT_DEVICE void unpack(const uint4& bits, Real<T> (&x)[kVec<T>]) {
  T raw[kVec<T>];
  memcpy(raw, &bits, 16);
#pragma unroll
  for (int k = 0; k < kVec<T>; k++) x[k] = to_real(raw[k]);
}

// The sums over kLanes lanes of N values: as long as there are several, a lane keeps one half of them and its partner the other. Returns the index
// of the first of the max(1, N / kLanes) values that are left to this lane, -1 where another lane has the same.
template <int kLanes, int N, class R>
SIMT_DEVICE int fold_lanes(R* x, int lane) {
  if constexpr (kLanes == 1) return 0;
  else {
    constexpr int kPartner = kLanes / 2;
    const bool upper = lane & kPartner;
    if constexpr (N > 1) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) {
        const R given = upper ? x[i] : x[i + N / 2], kept = upper ? x[i + N / 2] : x[i];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, given, kPartner);
      }
      const int rest = fold_lanes<kPartner, N / 2>(x, lane);
      return rest < 0 ? rest : rest + (upper ? N / 2 : 0);
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], kPartner);
      const int rest = fold_lanes<kPartner, 1>(x, lane);
      return upper ? -1 : rest;
    }
  }
}

SIMT_DEVICE float larger_of(float a, float b) { return fmaxf(a, b); }
SIMT_DEVICE double larger_of(double a, double b) { return fmax(a, b); }
SIMT_DEVICE float log_sum(float max, float sum) { return sum == 0 ? minus_infinity(0.0f) : float(double(max) + double(logf(sum))); }
SIMT_DEVICE double log_sum(double max, double sum) { return sum == 0 ? minus_infinity(0.0) : max + log(sum); }
// exp(max - top) where -inf stands for nothing.
template <class R>
SIMT_DEVICE R shrink_of(R max, R top) {
  return max == minus_infinity(R()) ? R(0) : max == top ? R(1) : exp(max - top);
}

// The running softmax of a row; `sum` is the share of one lane.
template <class R>
struct DecodeState {
  R max = minus_infinity(R()), sum = 0;
};

// kCount adjacent elements of shared memory, up to 16 bytes at a time.
template <int kCount, class R>
SIMT_DEVICE void load_adjacent(const R* from, R (&x)[kCount]) {
  constexpr int kPart = kCount * int(sizeof(R)) >= 16 ? 16 / int(sizeof(R)) : kCount;
  struct alignas(kPart * sizeof(R)) Part {
    R x[kPart];
  };
#pragma unroll
  for (int i = 0; i < kCount; i += kPart) {
    const Part part = *reinterpret_cast<const Part*>(from + i);
#pragma unroll
    for (int k = 0; k < kPart; k++) x[i + k] = part.x[k];
  }
}
template <int kCount, class R>
SIMT_DEVICE void store_adjacent(const R* x, R* to) {
  static_assert(kCount * sizeof(R) <= 16, "one access");
  struct alignas(kCount * sizeof(R)) Part {
    R x[kCount];
  } part;
#pragma unroll
  for (int k = 0; k < kCount; k++) part.x[k] = x[k];
  *reinterpret_cast<Part*>(to) = part;
}

// acc[r] += weight[r] value, over the 16 keys of a warp. kSelect: some pairs are hidden, with a weight below 0, and their values may be NaN.
template <class Tile, bool kSelect, class T, class R>
SIMT_DEVICE void add_values(R (&acc)[Tile::kRows][Tile::kVector], const CacheMatrix<T>& value, const int64_t* at, const R* weights, int64_t col, int64_t cols,
                            int slot) {
#pragma unroll 1
  for (int step = 0; step < Tile::kSteps; step += Tile::kUnroll) {
    uint4 bits[Tile::kUnroll];
#pragma unroll
    for (int u = 0; u < Tile::kUnroll; u++) bits[u] = load_raw(value, at[(step + u) * Tile::kSlots + slot], col, cols);
#pragma unroll
    for (int u = 0; u < Tile::kUnroll; u++) {
      R x[Tile::kVector], of_rows[Tile::kRows];
      unpack<T>(bits[u], x);
      load_adjacent<Tile::kRows>(weights + slot * Tile::kSlotStride + (step + u) * Tile::kRows, of_rows);
#pragma unroll
      for (int r = 0; r < Tile::kRows; r++) {
        const R weight = of_rows[r];
        if (kSelect && weight < 0) continue;
#pragma unroll
        for (int k = 0; k < Tile::kVector; k++) acc[r][k] += weight * x[k];
      }
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
