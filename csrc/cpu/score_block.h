#pragma once
// What happens to a block of scores between the product and the softmax: softcap, ALiBi, bias, bool mask, row intervals. One row of the
// block at a time, every operand read in place. Scores leave in log2 units; hidden ones are -inf.

#include <math.h>
#include "../core/block_list.h"
#include "../core/mask.h"
#include "../core/score_mod.h"
#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

// One row of a tile of queries.
struct TileRow {
  int head, query;
  RowKeys keys;
};

// What a block of rows sees: `main` and `sinks` hold every key of some row, `full` the keys of all rows.
struct BlockKeys {
  Interval main = {0, 0}, sinks = {0, 0}, full = {0, 0};

  BlockKeys() = default;
  BlockKeys(const TileRow* rows, int count) {
    for (int i = 0; i < count; i++) {
      main = hull(main, rows[i].keys.main);
      sinks = hull(sinks, rows[i].keys.sinks);
      full = i == 0 ? rows[i].keys.main : intersect(full, rows[i].keys.main.begin, rows[i].keys.main.end);
    }
  }
  Interval within(int begin, int end) const { return hull(intersect(main, begin, end), intersect(sinks, begin, end)); }
};

// Elements outside the row's intervals become -inf; columns count from key `first`.
template <class Real>
ALWAYS_INLINE void mask_row(Real* scores, int cols, int first, const RowKeys& keys) {
  using V = NativeVec<Real>;
  const Interval main = {keys.main.begin - first, keys.main.end - first}, sinks = {keys.sinks.begin - first, keys.sinks.end - first};
  const V hidden(Real(-INFINITY));
  for (int j = 0; j < cols; j += V::kLanes)
    if (j < main.begin || j + V::kLanes > main.end) {
      const V x = V::load(scores + j);
      V kept = keep_lanes(x, main.begin - j, main.end - j, hidden);
      if (j < sinks.end) kept = keep_lanes(x, sinks.begin - j, sinks.end - j, kept);
      kept.store(scores + j);
    }
}

// x where the byte of the lane is not 0, -inf elsewhere.
template <int N>
ALWAYS_INLINE Vec<float, N> select_bytes(Vec<float, N> x, const uint8_t* bytes) {
  const Vec<float, N> hidden(-INFINITY);
#if defined(__AVX512F__)
  const __m128i b = _mm_loadu_si128((const __m128i*)bytes);
  return (typename Vec<float, N>::Native)_mm512_mask_mov_ps((__m512)hidden.v, _mm_test_epi8_mask(b, b), (__m512)x.v);
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
  return (typename Vec<float, N>::Native)_mm256_blendv_ps((__m256)x.v, (__m256)hidden.v, (__m256)_mm256_cmpeq_epi32(lanes, _mm256_setzero_si256()));
#else
  Vec<int, N> lanes;
  for (int i = 0; i < N; i++) lanes.v[i] = bytes[i];
  return lanes.v != 0 ? x.v : hidden.v;
#endif
}
template <int N>
ALWAYS_INLINE Vec<double, N> select_bytes(Vec<double, N> x, const uint8_t* bytes) {
  for (int i = 0; i < N; i++) x.v[i] = bytes[i] ? x.v[i] : -INFINITY;
  return x;
}

// x where bit i is set for lane i, -inf elsewhere.
template <class Real, int N>
ALWAYS_INLINE Vec<Real, N> select_bits(Vec<Real, N> x, uint64_t bits) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4) return (typename Vec<Real, N>::Native)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), __mmask16(bits), (__m512)x.v);
  else return (typename Vec<Real, N>::Native)_mm512_mask_mov_pd(_mm512_set1_pd(-INFINITY), __mmask8(bits), (__m512d)x.v);
#else
  for (int i = 0; i < N; i++) x.v[i] = bits >> i & 1 ? x.v[i] : Real(-INFINITY);
  return x;
#endif
}

template <class T, class Real>
ALWAYS_INLINE NativeVec<Real> load_bias(const T* p) {
  if constexpr (sizeof(T) == sizeof(Real)) return NativeVec<Real>::load(p);
  else if constexpr (sizeof(Real) == 4) return load_converted(p);
  else {
    T buffer[kLanes<float>] = {};
    memcpy(buffer, p, kLanes<double> * sizeof(T));
    return convert<double>(low_half(load_converted(buffer)));
  }
}

// The lowest number is often used to mean "masked": times log2(e) it would be -inf, and hide the key. Anything below is taken as this.
template <class Real>
constexpr Real kLowestBias = Real(sizeof(Real) == 4 ? -2.358e38 : -1.246e308);
template <class Real>
constexpr Real kLowestReal = Real(sizeof(Real) == 4 ? -3.40282346638528859812e38 : -1.79769313486231570815e308);

// scores = scores * factor + bias * log2(e), then the mask. A bias of -inf hides whatever the score is.
template <bool kBias, bool kMask, class T, class Real>
ALWAYS_INLINE void bias_row(Real* scores, int valid, Real factor, const T* bias, const uint8_t* mask) {
  using V = NativeVec<Real>;
  constexpr int kN = V::kLanes;
  const V hidden(Real(-INFINITY));
  const auto step = [&](int j, const T* b, const uint8_t* m) __attribute__((always_inline)) {
    V x = V::load(scores + j);
    if (kBias) {
      const V y = load_bias<T, Real>(b);
      x = multiply_add(max(V(kLowestBias<Real>), y), V(Real(kLog2e)), x * V(factor));
      x = y.v == hidden.v ? hidden.v : x.v;
    } else if (factor != Real(1)) x = x * V(factor);
    if (kMask) x = select_bytes(x, m);
    x.store(scores + j);
  };
  int j = 0;
  for (; j + kN <= valid; j += kN) step(j, bias + j, mask + j);
  if (j < valid) {
    T b[kN] = {};
    uint8_t m[64] = {};
    for (int i = 0; i < valid - j; i++) {
      if (kBias) b[i] = bias[j + i];
      if (kMask) m[i] = mask[j + i];
    }
    step(j, b, m);
  }
}

constexpr int kMaxCols = 512;  // keys of a tile

// What a block list shows a block of rows of one tile of keys: bit c of words[row][t] is key (first + t) * kListTile + c.
struct ListedKeys {
  int first;
  uint64_t words[kBlockRows][kMaxCols / kListTile + 1];
};

// The keys that a block of rows sees of one tile of keys, in increasing order; between them whole panels that none of the rows sees.
struct KeyRuns {
  static constexpr int kStep = 16;  // or a panel where that is more
  int count = 0;
  Interval run[kMaxCols / kStep / 2 + 1];

  void add(int begin, int end) {
    if (count && run[count - 1].end == begin) run[count - 1].end = end;
    else run[count++] = {begin, end};
  }
  Interval hull() const { return count ? Interval{run[0].begin, run[count - 1].end} : Interval{0, 0}; }
  bool sees_some(int begin, int end) const {
    for (int r = 0; r < count; r++)
      if (!is_empty(intersect(run[r], begin, end))) return true;
    return false;
  }
};

// The modifiers of one batch item.
template <class Real>
struct ScoreMods {
  const AttentionParams& p;
  const RowMask& mask;
  const char* bias = nullptr;
  const uint8_t* bool_mask = nullptr;
  BlockList list;

  ScoreMods(const AttentionParams& p, const RowMask& mask, int64_t batch) : p(p), mask(mask), list{p.blocks, nullptr} {
    if (p.blocks.rows.data) list.ranges = (const int32_t*)p.blocks.rows.data + batch_offset(p, p.blocks.rows, batch);
    if (p.bias.data) bias = (const char*)p.bias.data + batch_offset(p, p.bias, batch) * element_size(p.bias.dtype);
    if (p.bool_mask.data) bool_mask = (const uint8_t*)p.bool_mask.data + batch_offset(p, p.bool_mask, batch);
  }
  static int element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

  // Whether apply() can hide a key.
  bool hides() const { return p.bias.data || p.bool_mask.data || list.is_given(); }
  // What products are multiplied by: to log2 units, or to score / softcap. Its sign is given to the query while packing, so that the largest
  // product is the largest score.
  Real factor() const { return Real(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2e); }
  Real positive_factor() const { return factor() < 0 ? -factor() : factor(); }

  // Keys [begin, end) of `count` rows, `begin` a multiple of a panel; `listed` holds them, null without a list. `tanhs`, laid out like scores, receives tanh(score / softcap); null where it is not wanted. Returns what
  // the scores are still to be multiplied by: a bool mask alone leaves them products, so that it gives the same bits as the same mask of intervals.
  Real apply(const TileRow* rows, int count, int begin, int end, Real* scores, int stride, Real* tanhs, const ListedKeys* listed) const {
    const Real rest = modify(rows, count, begin, end, scores, stride, tanhs);
    if (listed)
      for (int i = 0; i < count; i++) hide_unlisted(*listed, i, begin, end, scores + i * stride);
    return rest;
  }
  Real modify(const TileRow* rows, int count, int begin, int end, Real* scores, int stride, Real* tanhs) const {
    using V = NativeVec<Real>;
    const bool products = p.softcap <= 0 && !p.alibi_slopes && !bias && p.scale != 0;
    if (products && !bool_mask) return positive_factor();
    const Real factor = products ? Real(1) : positive_factor();
    for (int i = 0; i < count; i++) {
      Real *row = scores + i * stride, rest = factor;
      if (p.softcap > 0) {
        for (int j = 0; j < end - begin; j += V::kLanes) {
          const V t = softcap_tanh(V::load(row + j) * V(factor));
          if (tanhs) t.store(tanhs + i * stride + j);
          (t * V(Real(p.softcap * kLog2e))).store(row + j);
        }
        rest = Real(1);
      }
      if (p.alibi_slopes) {
        const V slope(Real(((const Real*)p.alibi_slopes)[rows[i].head] * kLog2e));
        for (int j = 0; j < end - begin; j += V::kLanes) (V::load(row + j) * V(rest) - slope * distance(rows[i], begin + j)).store(row + j);
        rest = Real(1);
      }
      if (hides() || rest != Real(1)) apply_bias(rows[i], begin, end, row, rest);
    }
    return products ? positive_factor() : Real(1);
  }

  // |position of the row - key| for the keys from `key` on.
  ALWAYS_INLINE NativeVec<Real> distance(const TileRow& row, int key) const {
    return alibi_distance(NativeVec<Real>(Real(mask.position(row.query) - key)), NativeVec<Real>::iota(Real(0)));
  }

  // What the list shows of the keys [begin, end) to a block of rows; false where that is nothing.
  bool look_up(const TileRow* rows, int count, int begin, int end, ListedKeys* to) const {
    const int first = begin / kListTile, tiles = (end - 1) / kListTile - first + 1;
    bool some = false;
    to->first = first;
    for_each_listed(rows, count, [&](int row, int row_end, BlockList::Range range) {
      for (int i = row; i < row_end; i++) memset(to->words[i], 0, tiles * sizeof(uint64_t));
      for (const ListedTile* entry = BlockList::find(range, first); entry < range.end && entry->keys < first + tiles; entry++) {
        some = true;
        for (int i = row; i < row_end; i++) to->words[i][entry->keys - first] = list.word(*entry, rows[i].query);
      }
    });
    return some;
  }
  // The first key at or behind `key`, rounded down to tiles of the list, that is listed for some of the rows.
  int next_listed(const TileRow* rows, int count, int key) const {
    int next = INT32_MAX;
    for_each_listed(rows, count, [&](int, int, BlockList::Range range) {
      const ListedTile* entry = BlockList::find(range, key / kListTile);
      if (entry < range.end) next = min_of(next, entry->keys * kListTile);
    });
    return next;
  }

  // The keys in `keys` that list and bool mask show to some of these rows. A tile of a triangle or a band costs what it shows.
  KeyRuns runs(const TileRow* rows, int count, Interval keys, int panel, const ListedKeys* listed) const {
    KeyRuns found;
    const bool bytes = bool_mask && p.bool_mask.col_stride == 1;
    if (is_empty(keys)) return found;
    if (!bytes && !listed) {
      found.add(keys.begin, keys.end);
      return found;
    }
    const int step = max_of(panel, KeyRuns::kStep);
    for (int begin = keys.begin, end; begin < keys.end; begin = end) {
      end = min_of(round_down(begin, step) + step, keys.end);
      if (listed && !lists_some(*listed, count, begin, end)) continue;
      if (bytes && !shows_some(rows, count, begin, end)) continue;
      found.add(begin, end);
    }
    return found;
  }

  // Whether apply() leaves this pair visible: for the rare products that must skip what is hidden.
  bool visible(const TileRow& row, int key) const {
    if (!contains(row.keys, key) || (list.is_given() && !list.visible(row.head, row.query, key))) return false;
    if (bool_mask && !bool_mask[row.head * p.bool_mask.head_stride + row.query * p.bool_mask.row_stride + key * p.bool_mask.col_stride]) return false;
    if (!bias) return true;
    const int64_t at = row.head * p.bias.head_stride + row.query * p.bias.row_stride + key * p.bias.col_stride;
    switch (p.bias.dtype) {
      case DType::kFloat32: return ((const float*)bias)[at] != -INFINITY;
      case DType::kFloat64: return ((const double*)bias)[at] != -INFINITY;
      case DType::kBFloat16: return ((const uint16_t*)bias)[at] != 0xff80;
      case DType::kFloat16: return ((const uint16_t*)bias)[at] != 0xfc00;
    }
    return true;
  }

 private:
  // Calls f(first, end, entries of the list) for each run of rows of one head and one tile of the list.
  template <class F>
  void for_each_listed(const TileRow* rows, int count, const F& f) const {
    for (int first = 0, end; first < count; first = end) {
      const int head = rows[first].head, tile = rows[first].query / kListTile;
      for (end = first + 1; end < count && rows[end].head == head && rows[end].query / kListTile == tile;) end++;
      f(first, end, list.range(head, rows[first].query));
    }
  }
  static bool lists_some(const ListedKeys& listed, int count, int begin, int end) {
    for (int tile = begin / kListTile; tile * kListTile < end; tile++) {
      const int from = max_of(begin - tile * kListTile, 0), to = min_of(end - tile * kListTile, kListTile);
      const uint64_t wanted = ~uint64_t(0) >> (kListTile - (to - from)) << from;
      for (int i = 0; i < count; i++)
        if (listed.words[i][tile - listed.first] & wanted) return true;
    }
    return false;
  }
  bool shows_some(const TileRow* rows, int count, int begin, int end) const {
    for (int i = 0; i < count; i++) {
      const uint8_t* bytes = bool_mask + rows[i].head * p.bool_mask.head_stride + rows[i].query * p.bool_mask.row_stride;
      int j = begin;
      for (uint64_t eight; j + 8 <= end; j += 8) {
        memcpy(&eight, bytes + j, 8);
        if (eight) return true;
      }
      for (; j < end; j++)
        if (bytes[j]) return true;
    }
    return false;
  }
  // Elements that the list does not show the row become -inf.
  static void hide_unlisted(const ListedKeys& listed, int row, int begin, int end, Real* scores) {
    using V = NativeVec<Real>;
    for (int j = begin; j < end;) {
      const uint64_t word = listed.words[row][j / kListTile - listed.first];
      const int to = min_of(round_down(j, kListTile) + kListTile, end);
      if (word == ~uint64_t(0)) j = to;
      for (; j < to; j += V::kLanes) select_bits(V::load(scores + j - begin), word >> j % kListTile).store(scores + j - begin);
    }
  }

  void apply_bias(const TileRow& row, int begin, int end, Real* scores, Real factor) const {
    uint8_t mask_temp[kMaxCols];
    const uint8_t* visible = nullptr;
    if (bool_mask) {
      const TensorView& view = p.bool_mask;
      visible = adjacent_elements(bool_mask + row.head * view.head_stride + row.query * view.row_stride, view.col_stride, begin, end, mask_temp);
    }
    const auto with_bias = [&](auto element) __attribute__((always_inline)) {
      using T = decltype(element);
      T temp[kMaxCols];
      const TensorView& view = p.bias;
      const T* b = adjacent_elements((const T*)bias + row.head * view.head_stride + row.query * view.row_stride, view.col_stride, begin, end, temp);
      if (visible) bias_row<true, true>(scores, end - begin, factor, b, visible);
      else bias_row<true, false>(scores, end - begin, factor, b, visible);
    };
    if (!bias) {
      if (visible) bias_row<false, true>(scores, end - begin, factor, (const Real*)nullptr, visible);
      else bias_row<false, false>(scores, end - begin, factor, (const Real*)nullptr, visible);
    } else if (p.bias.dtype == DType::kBFloat16) with_bias(bf16());
    else if (p.bias.dtype == DType::kFloat16) with_bias(fp16());
    else with_bias(Real());
  }
};

// After gemm() with a right operand packed by pack_finite_panels(): out[i] += left[i][j] right[j] for the infinities and NaNs of the keys j
// in [begin, end) that row i sees. Whatever else was added, the sum is the same infinity or NaN, so the order does not matter and rows
// that see none keep their bits.
template <class Unit, class T>
__attribute__((noinline)) void add_nonfinite(const ScoreMods<Accumulator<Unit>>& mods, const TileRow* tile_rows, int rows, int begin, int end, const Unit* left,
                                             int left_stride, const Matrix<const T>& right, int cols, Accumulator<Unit>* out, int out_stride) {
  for (int j = begin; j < end; j++)
    for (int d = 0; d < cols; d++) {
      T element[kLanes<Accumulator<Unit>>] = {right.row(j)[d * right.col_stride]};
      const auto x = load_converted(element).v[0];
      if (x - x == 0) continue;
      for (int i = 0; i < rows; i++)
        if (mods.visible(tile_rows[i], j)) out[i * out_stride + d] += unit_element(left + i * left_stride, j - begin) * x;
    }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
