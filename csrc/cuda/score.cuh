#pragma once
// What happens to one score, the same in forward and backward, on tensor cores and without: scale, softcap, ALiBi, bias, bool mask, dropout.

#include "../core/mask.h"
#include "../core/packed.h"
#include "../core/philox.h"
#include "../core/score_mod.h"
#include "../core/view.h"
#include "device.cuh"

namespace tiled_attention {
namespace cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

SIMT_DEVICE float minus_infinity(float) { return -__builtin_huge_valf(); }
SIMT_DEVICE double minus_infinity(double) { return -__builtin_huge_val(); }

// An optional (query, key) matrix of bias, bytes or gradients of one head.
struct PairMatrix {
  const char* data = nullptr;
  int64_t row_stride = 0, col_stride = 0;  // elements
  SIMT_DEVICE int64_t at(int64_t query, int64_t key) const { return query * row_stride + key * col_stride; }
};

SIMT_DEVICE int element_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

SIMT_DEVICE PairMatrix pair_matrix(const AttentionParams& p, const TensorView& view, int bytes, int64_t batch, int64_t head) {
  if (!view.data) return {};
  return {(const char*)view.data + (batch_offset(p, view, batch) + head * view.head_stride) * bytes, view.row_stride, view.col_stride};
}

// The score of one pair of a head in natural units: -inf where a bool mask or the bias hides it. Intervals are not looked at.
template <class Real>
struct Scores {
  Real scale, softcap, inverse_softcap, slope;
  int64_t query_offset;
  PairMatrix bias, bool_mask;
  DType bias_dtype;

  SIMT_DEVICE Scores(const AttentionParams& p, int64_t batch, int64_t head)
      : scale(Real(p.scale)),
        softcap(Real(p.softcap)),
        inverse_softcap(p.softcap != 0 ? Real(1 / p.softcap) : Real(0)),
        slope(p.alibi_slopes ? ((const Real*)p.alibi_slopes)[head] : Real(0)),
        query_offset(RowMask(p.mask, batch, query_segment(p, batch).length, key_segment(p, batch).length).query_offset),
        bias(pair_matrix(p, p.bias, element_bytes(p.bias.dtype), batch, head)),
        bool_mask(pair_matrix(p, p.bool_mask, 1, batch, head)),
        bias_dtype(p.bias.dtype) {}

  SIMT_DEVICE Real distance(int64_t query, int64_t key) const {
    const int64_t difference = query + query_offset - key;
    return Real(difference < 0 ? -difference : difference);
  }

  // `product` is q . k. `derivative` is d score / d product.
  SIMT_DEVICE Real operator()(Real product, int64_t query, int64_t key, Real* derivative = nullptr) const {
    Real score = product * scale, slope_of_score = scale;
    if (softcap != Real(0)) {
      const Real t = softcap_tanh(score * inverse_softcap);
      slope_of_score = softcap_gradient(scale, t);
      score = softcap * t;
    }
    if (derivative) *derivative = slope_of_score;
    if (slope != Real(0)) score -= slope * distance(query, key);
    if (bias.data) {
      const Real added = bias_at(query, key);
      // Whatever the product is: a key behind a bias of -inf may hold NaN.
      score = added == minus_infinity(Real()) ? added : score + added;
    }
    if (bool_mask.data && bool_mask.data[bool_mask.at(query, key)] == 0) score = minus_infinity(Real());
    return score;
  }

 private:
  SIMT_DEVICE Real bias_at(int64_t query, int64_t key) const {
    const int64_t at = bias.at(query, key);
    if (bias_dtype == DType::kBFloat16) return Real(simt::to_float(((const bf16*)bias.data)[at]));
    if (bias_dtype == DType::kFloat16) return Real(simt::to_float(((const f16*)bias.data)[at]));
    return ((const Real*)bias.data)[at];
  }
};

// Whether a score is more than scale * q . k, scale > 0, and a weight more than its exponential.
inline bool needs_features(const AttentionParams& p) {
  return p.bias.data || p.bool_mask.data || p.blocks.rows.data || p.alibi_slopes || p.softcap > 0 || p.dropout.p > 0 || !(p.scale > 0);
}

}  // namespace cuda
}  // namespace tiled_attention
