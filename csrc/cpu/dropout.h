#pragma once
// Dropout of the probabilities of a block of rows: which elements stay is a function of the seed and the absolute batch item, head,
// query and key alone (core/philox.h).

#include "../core/philox.h"
#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// One 32-bit word in each 64-bit lane; what stands above it does not matter. The product of two is then one instruction.
typedef Vec<uint64_t, kVectorBytes / 8> Words;
typedef Vec<uint32_t, kLanes<float>> Bits;
ALWAYS_INLINE Words multiply(Words a, uint32_t m) {
#if defined(__AVX512F__)
  return (Words::Native)_mm512_mul_epu32((__m512i)a.v, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
  return (Words::Native)_mm256_mul_epu32((__m256i)a.v, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
  return (Words::Native)_mm_mul_epu32((__m128i)a.v, _mm_set1_epi64x(m));
#else
  return (a.v & 0xffffffffu) * uint64_t(m);
#endif
}
ALWAYS_INLINE Words xor3(Words a, Words b, Words c) {
#if defined(__AVX512F__)
  return (Words::Native)_mm512_ternarylogic_epi64((__m512i)a.v, (__m512i)b.v, (__m512i)c.v, 0x96);
#else
  return a.v ^ b.v ^ c.v;
#endif
}
ALWAYS_INLINE Words high(Words a) { return a.v >> 32; }

// Keys of one group: two vectors of 32-bit lanes.
constexpr int kPhiloxGroup = 2 * kLanes<float>;

// Half of the first three rounds depends on the row only or on the keys only: keys() and row() do that part once, bits() the rest
// (15 of 20 multiplications).
struct Philox {
  uint32_t key0, key1, head, batch;
  struct Keys {
    Words a, b, c, d;
  };
  struct Row {
    uint32_t high0, low0;
  };

  // Keys [key, key + kPhiloxGroup), key a multiple of 4. The counters stand in the lanes so that bits() ends in order of the keys.
  ALWAYS_INLINE Keys keys(uint64_t key) const {
    constexpr int kN = Words::kLanes;
    Words counter;
    for (int i = 0; i < kN; i++) counter.v[i] = uint32_t(key / 4 + i / 2 + i % 2 * (kN / 2));
    const Words p0 = multiply(counter, kPhiloxM0), c2 = high(p0).v ^ uint64_t(batch ^ key1);
    const Words p1 = multiply(c2, kPhiloxM1), c0 = high(p1).v ^ uint64_t(uint32_t(uint64_t(kPhiloxM1) * head) ^ (key0 + kPhiloxW0));
    const Words q0 = multiply(c0, kPhiloxM0);
    return {p0.v ^ uint64_t(key1 + kPhiloxW1), p1.v ^ uint64_t(key0 + 2 * kPhiloxW0), high(q0).v ^ uint64_t(key1 + 2 * kPhiloxW1), q0};
  }
  ALWAYS_INLINE Row row(uint64_t query) const {
    const uint32_t c0 = uint32_t(uint64_t(kPhiloxM1) * head >> 32) ^ uint32_t(query / 2) ^ key0;
    const uint64_t p0 = uint64_t(kPhiloxM0) * c0;
    return {uint32_t(p0 >> 32), uint32_t(p0)};
  }
  // The words of the group: first of the keys [0, kLanes), second of the rest.
  ALWAYS_INLINE void words(const Keys& k, Row row, Bits& first, Bits& second) const {
    const Words p = multiply(Words(k.a.v ^ uint64_t(row.high0)), kPhiloxM1);
    Words c0 = high(p).v ^ k.b.v, c1 = p, c2 = k.c.v ^ uint64_t(row.low0), c3 = k.d;
#pragma GCC unroll 10
    for (int r = 3; r < kPhiloxRounds; r++) {
      const Words round0(uint64_t(uint32_t(key0 + r * kPhiloxW0))), round1(uint64_t(uint32_t(key1 + r * kPhiloxW1)));
      const Words p0 = multiply(c0, kPhiloxM0), p1 = multiply(c2, kPhiloxM1);
      c0 = xor3(high(p1), c1, round0);
      c1 = p1;
      c2 = xor3(high(p0), c3, round1);
      c3 = p0;
    }
#if defined(__AVX512F__)
    const __m512i l = _mm512_mask_mov_epi32((__m512i)c0.v, 0xaaaa, (__m512i)(c1.v << 32)),
                  u = _mm512_mask_mov_epi32((__m512i)c2.v, 0xaaaa, (__m512i)(c3.v << 32));
    first.v = (Bits::Native)_mm512_unpacklo_epi64(l, u);
    second.v = (Bits::Native)_mm512_unpackhi_epi64(l, u);
#elif defined(__AVX2__)
    const __m256i l = _mm256_blend_epi32((__m256i)c0.v, (__m256i)(c1.v << 32), 0xaa), u = _mm256_blend_epi32((__m256i)c2.v, (__m256i)(c3.v << 32), 0xaa);
    first.v = (Bits::Native)_mm256_unpacklo_epi64(l, u);
    second.v = (Bits::Native)_mm256_unpackhi_epi64(l, u);
#else
    const Words low = Words::Native((c0.v & 0xffffffffu) | c1.v << 32), up = Words::Native((c2.v & 0xffffffffu) | c3.v << 32);
    for (int j = 0; j < Words::kLanes; j += 2) {
      const Words a = Words::Native{low.v[j], up.v[j]}, b = Words::Native{low.v[j + 1], up.v[j + 1]};
      memcpy((char*)&first + j * 8, &a, 16);
      memcpy((char*)&second + j * 8, &b, 16);
    }
#endif
  }
};

// The draws of one (batch item, head). Two ways to the same bits: for two rows that share their words, group by group in registers
// (begin_tile, pair_bits), and row by row into memory, for any offsets (row_bits).
struct Dropout {
  Philox philox;
  int64_t query_offset, key_offset;
  uint32_t threshold;  // kept where the 16 bits, moved to the top of the word, are not below it
  double inverse_keep;
  Philox::Keys* tile_keys;  // [tile_kv / kPhiloxGroup]

  Dropout(const DropoutParams& p, int64_t batch, int64_t head, Philox::Keys* tile_keys) : tile_keys(tile_keys) {
    const uint64_t seed = p.p > 0 ? uint64_t(*p.seed) : 0;
    philox = {uint32_t(seed), uint32_t(seed >> 32), uint32_t(head + p.head_offset), uint32_t(batch + p.batch_offset)};
    query_offset = p.query_offset, key_offset = p.key_offset;
    const int64_t dropped = dropped_of_65536(p.p);
    threshold = dropped >= 65536 ? 0xffffffffu : uint32_t(dropped) << 16;
    inverse_keep = inverse_keep_of(p.p);
  }

  // Whether rows 2i and 2i + 1 of the call share words and groups start where key tiles do.
  static bool in_registers(const DropoutParams& p) { return p.query_offset % 2 == 0 && p.key_offset % kPhiloxGroup == 0; }
  void begin_tile(int64_t key_begin, int64_t key_end) const {
    for (int64_t j = key_begin; j < key_end; j += kPhiloxGroup) tile_keys[(j - key_begin) / kPhiloxGroup] = philox.keys(j + key_offset);
  }
  ALWAYS_INLINE Philox::Row row(int64_t query) const { return philox.row(query + query_offset); }
  // bits[row][half] of the group for an even row and the one behind it.
  ALWAYS_INLINE void pair_bits(int group, Philox::Row row, Bits (&bits)[2][2]) const {
    philox.words(tile_keys[group], row, bits[1][0], bits[1][1]);
    bits[0][0].v = bits[1][0].v << 16;
    bits[0][1].v = bits[1][1].v << 16;
  }
  ALWAYS_INLINE NativeVec<float> keep(NativeVec<float> x, Bits bits) const { return bits.v >= threshold ? x.v : NativeVec<float>(0.0f).v; }

  // Room that row_bits() needs for `cols` columns.
  static constexpr int row_bits_size(int cols) { return cols + 2 * kPhiloxGroup; }
  // Words for `query` and keys [key, key + cols), in `to`; returns where they start.
  const uint32_t* row_bits(int64_t query, int64_t key, int cols, uint32_t* to) const {
    const Philox::Row counters = row(query);
    const int shift = (query + query_offset) % 2 == 0 ? 16 : 0;
    const int64_t first = (key + key_offset) / 4 * 4;
    const int lead = int(key + key_offset - first);
    for (int j = 0; j < lead + cols; j += kPhiloxGroup) {
      Bits a, b;
      philox.words(philox.keys(first + j), counters, a, b);
      Bits(a.v << shift).store(to + j);
      Bits(b.v << shift).store(to + j + kLanes<float>);
    }
    return to + lead;
  }
  // x where the word of the lane says kept, 0 elsewhere.
  ALWAYS_INLINE NativeVec<float> keep(NativeVec<float> x, const uint32_t* bits) const { return keep(x, Bits::load(bits)); }
  ALWAYS_INLINE NativeVec<double> keep(NativeVec<double> x, const uint32_t* bits) const {
    for (int i = 0; i < kLanes<double>; i++) x.v[i] = bits[i] >= threshold ? x.v[i] : 0.0;
    return x;
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
