#pragma once
// mma.sync and ldmatrix, with the fragment layouts of the PTX ISA. In a warp, lane = 4 g + t.

#include "formats.h"
#include "shared_memory.h"

namespace simt {

// Four columns at once: what every x86-64 has.
typedef float Float4 __attribute__((vector_size(16), may_alias));

// d = a b + d for A of 16 x kDepth, B of kDepth x 8, from matrices that load(warp, a, b) has filled. d[i] is row g + 8 (i / 2), column 2 t + i % 2.
template <int kDepth, class Load>
SIMT_RUNTIME inline void multiply(Warp& warp, Load load) {
  float a[16][kDepth];
  alignas(16) float b[kDepth][8], c[16][8];
  for (int l = 0; l < 32; ++l) {
    const uint32_t* in = warp.lanes[l]->in;
    const int g = l >> 2, t = l & 3;
    load(in, g, t, a, b);
    for (int i = 0; i < 4; ++i) c[g + 8 * (i >> 1)][2 * t + (i & 1)] = bits_f32(in[6 + i]);
  }
  for (int m = 0; m < 16; ++m) {
    auto* row = (Float4*)c[m];
    Float4 left = row[0], right = row[1];
    for (int k = 0; k < kDepth; ++k) {
      const auto* other = (const Float4*)b[k];
      left += a[m][k] * other[0];
      right += a[m][k] * other[1];
    }
    row[0] = left;
    row[1] = right;
  }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) warp.lanes[l]->out[i] = f32_bits(c[(l >> 2) + 8 * (i >> 1)][2 * (l & 3) + (i & 1)]);
  stats.mma.fetch_add(1, std::memory_order_relaxed);
}
template <class Finish>
SIMT_RUNTIME inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Op op, Site site, Finish finish) {
  Quiet quiet;
  Lane& lane = *current_lane;
  for (int i = 0; i < 4; ++i) {
    lane.in[i] = a[i];
    lane.in[6 + i] = f32_bits(d[i]);
  }
  lane.in[4] = b0;
  lane.in[5] = b1;
  collective(kFullMask, op, site, finish);
  for (int i = 0; i < 4; ++i) d[i] = bits_f32(lane.out[i]);
}

// A: register j holds row g + 8 (j % 2), columns 2 t + 8 (j / 2) + {0, 1}. B: register j holds rows 2 t + 8 j + {0, 1}, column g.
template <class T>
inline void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site = Site::here()) {
  mma(d, a, b0, b1, std::is_same<T, f16>::value ? Op::kMmaF16 : Op::kMmaBf16, site, [](Warp& warp) {
    multiply<16>(warp, [](const uint32_t* in, int g, int t, auto& a, auto& b) {
      for (int h = 0; h < 2; ++h) {
        for (int j = 0; j < 4; ++j) a[g + 8 * (j & 1)][2 * t + 8 * (j >> 1) + h] = to_float(T{uint16_t(in[j] >> (16 * h))});
        for (int j = 0; j < 2; ++j) b[2 * t + 8 * j + h][g] = to_float(T{uint16_t(in[4 + j] >> (16 * h))});
      }
    });
  });
}
// A: register j holds row g + 8 (j % 2), column t + 4 (j / 2). B: register j holds row t + 4 j, column g. The low 13 bits are not read.
inline void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site = Site::here()) {
  mma(d, a, b0, b1, Op::kMmaTf32, site, [](Warp& warp) {
    multiply<8>(warp, [](const uint32_t* in, int g, int t, auto& a, auto& b) {
      for (int j = 0; j < 4; ++j) a[g + 8 * (j & 1)][t + 4 * (j >> 1)] = bits_f32(in[j] & 0xffffe000u);
      for (int j = 0; j < 2; ++j) b[t + 4 * j][g] = bits_f32(in[4 + j] & 0xffffe000u);
    });
  });
}

// Four 8 x 8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8; register j receives, of matrix j, row g,
// columns 2 t + {0, 1}, or with `trans` rows 2 t + {0, 1}, column g.
SIMT_RUNTIME inline void ldmatrix_finish(Warp& warp, bool trans, Site site) {
  uint16_t matrix[4][8][8];
  uintptr_t address[32];
  for (int l = 0; l < 32; ++l) {
    memcpy(matrix[l / 8][l % 8], warp.lanes[l]->in, 16);
    memcpy(&address[l], warp.lanes[l]->in + 4, sizeof(uintptr_t));
  }
  for (int l = 0; l < 32; ++l)
    for (int j = 0; j < 4; ++j) {
      const int g = l >> 2, t = l & 3;
      const auto& m = matrix[j];
      warp.lanes[l]->out[j] = trans ? m[2 * t][g] | uint32_t(m[2 * t + 1][g]) << 16 : m[g][2 * t] | uint32_t(m[g][2 * t + 1]) << 16;
    }
  const unsigned extra = extra_wavefronts(address, kFullMask, 16);
  stats.ldsm.fetch_add(1, std::memory_order_relaxed);
  stats.ldsm_extra_wavefronts.fetch_add(extra, std::memory_order_relaxed);
  if (extra) add_conflict({site.file, site.line, nullptr}, extra);
}
// A lane reads its row itself, so that sanitizers charge it to the right thread.
SIMT_UNTRACED __attribute__((noinline)) inline void ldmatrix(uint32_t (&r)[4], const void* p, bool trans, Site site) {
  check_shared16(p, site);
  const uint4 row = *(const uint4*)p;
  Quiet quiet;
  Lane& lane = *current_lane;
  memcpy(lane.in, &row, 16);
  memcpy(lane.in + 4, &p, sizeof p);
  collective(kFullMask, trans ? Op::kLdmatrixTrans : Op::kLdmatrix, site, [=](Warp& warp) { ldmatrix_finish(warp, trans, site); });
  memcpy(r, lane.out, 16);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* p, Site site = Site::here()) { ldmatrix(r, p, false, site); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* p, Site site = Site::here()) { ldmatrix(r, p, true, site); }

}  // namespace simt
