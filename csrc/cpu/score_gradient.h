#pragma once
// From scores and gradients of the probabilities to probabilities and gradients of the scores.

#include "dropout.h"
#include "score_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// p = exp2(score * factor - lse), grad_score = p * (grad_prob - delta), of one vector. lse_low is what rounding took from lse. kSelect: the row
// may have hidden keys, whose score is -inf; theirs are 0 whatever lse, delta and grad_prob are.
template <bool kSelect, class Real>
struct ScoreGradient {
  using V = NativeVec<Real>;
  V factor, lse, lse_low, delta;
  ScoreGradient(Real factor, Real lse, Real lse_low, Real delta) : factor(factor), lse(lse), lse_low(lse_low), delta(delta) {}
  ALWAYS_INLINE V select(V score, V x) const { return kSelect ? V(score.v == V(Real(-INFINITY)).v ? V(Real(0)).v : x.v) : x; }
  ALWAYS_INLINE V prob(V score) const { return select(score, exp2(score * factor - lse - lse_low)); }
  ALWAYS_INLINE V grad_score(V score, V prob, V grad_prob) const { return select(score, prob * (grad_prob - delta)); }
};

// One row in place: scores become probabilities, grad_scores hold the gradients of the probabilities and become those of the scores.
// With kDrop the probabilities stored are the kept ones, not yet times inverse_keep; `bits` says which.
template <bool kSelect, bool kDrop, class Real>
ALWAYS_INLINE void score_gradient_row(Real* scores, Real* grad_scores, int cols, Real factor, Real lse, Real lse_low, Real delta, const Dropout* dropout,
                                      const uint32_t* bits) {
  using V = NativeVec<Real>;
  const ScoreGradient<kSelect, Real> gradient(factor, lse, lse_low, delta);
  const V inverse(Real(kDrop ? dropout->inverse_keep : 1));
  for (int j = 0; j < cols; j += V::kLanes) {
    const V score = V::load(scores + j), p = gradient.prob(score);
    V grad_prob = V::load(grad_scores + j), kept = p;
    if (kDrop) grad_prob = dropout->keep(grad_prob, bits + j) * inverse, kept = dropout->keep(p, bits + j);
    kept.store(scores + j);
    gradient.grad_score(score, p, grad_prob).store(grad_scores + j);
  }
}

// Two rows in place, the first of an even query, with dropout bits made in registers.
template <bool kSelect>
ALWAYS_INLINE void score_gradient_pair(float* scores, float* grad_scores, int stride, int cols, float factor, const float* lse, const float* lse_low,
                                       const float* delta, const Dropout& dropout, int query, int group) {
  using V = NativeVec<float>;
  const auto counters = dropout.row(query);
  const V inverse(float(dropout.inverse_keep));
  const ScoreGradient<kSelect, float> gradient[2] = {{factor, lse[0], lse_low[0], delta[0]}, {factor, lse[1], lse_low[1], delta[1]}};
  for (int j = 0; j < cols; j += 2 * V::kLanes) {
    Bits bits[2][2];
    dropout.pair_bits(group + j / (2 * V::kLanes), counters, bits);
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const int at = r * stride + j + h * V::kLanes;
        const V score = V::load(scores + at), p = gradient[r].prob(score);
        dropout.keep(p, bits[r][h]).store(scores + at);
        gradient[r].grad_score(score, p, dropout.keep(V::load(grad_scores + at), bits[r][h]) * inverse).store(grad_scores + at);
      }
  }
}

// A column is a sum over all rows of the head: in double, block by block.
template <class Real>
void add_columns(const Real* grads, int stride, int rows, int count, double* to) {
  using V = NativeVec<Real>;
  for (int j = 0; j < count; j += V::kLanes) {
    V sum(Real(0));
    for (int i = 0; i < rows; i++) sum = sum + V::load(grads + i * stride + j);
    for (int k = 0; k < V::kLanes && j + k < count; k++) to[j + k] += double(sum.v[k]);
  }
}
// Rows follow one another: each lies one element further back.
template <class Real>
void add_distances(const Real* grads, int stride, int rows, int count, double* to) {
  for (int i = 0; i < rows; i++, grads += stride, to--)
    for (int j = 0; j < count; j++) to[j] += double(grads[j]);
}

#if defined(__AVX512BF16__)
// (a[j], b[j]) as the bf16 pair j: two rows, reduction over rows.
ALWAYS_INLINE void store_rows(NativeVec<float> a, NativeVec<float> b, Bf16Pair* to) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b.v, (__m512)a.v);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), (__m512i)both));
}

// Two rows of bf16 pairs: the same results as pairs along the rows, grad_scores also as pairs along the columns.
struct PairRows {
  Bf16Pair *probs, *grad_scores, *grad_score_rows;
  int grad_row_stride;
  ALWAYS_INLINE void store(int j, const NativeVec<float> (&p)[2][2], const NativeVec<float> (&ds)[2][2]) const {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      store_rows(p[0][h], p[1][h], probs + j + 16 * h);
      store_rows(ds[0][h], ds[1][h], grad_scores + j + 16 * h);
    }
    store_pair(ds[0][0], ds[0][1], grad_score_rows, j);
    store_pair(ds[1][0], ds[1][1], grad_score_rows + grad_row_stride, j);
  }
};

template <bool kSelect, bool kDrop>
ALWAYS_INLINE void score_gradient_to_pairs(const float* scores, const float* grad_probs, int stride, int cols, float factor, const float* lse,
                                           const float* delta, const PairRows& to, const Dropout& dropout, int query, int group) {
  using V = NativeVec<float>;
  const auto counters = dropout.row(query);
  const V inverse(float(dropout.inverse_keep));
  const ScoreGradient<kSelect, float> gradient[2] = {{factor, lse[0], 0, delta[0]}, {factor, lse[1], 0, delta[1]}};
  for (int j = 0; j < cols; j += 32) {
    V p[2][2], ds[2][2];
    Bits bits[2][2];
    if (kDrop) dropout.pair_bits(group + j / 32, counters, bits);
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const V score = V::load(scores + r * stride + j + 16 * h);
        V grad_prob = V::load(grad_probs + r * stride + j + 16 * h);
        p[r][h] = gradient[r].prob(score);
        if (kDrop) grad_prob = dropout.keep(grad_prob, bits[r][h]) * inverse;
        ds[r][h] = gradient[r].grad_score(score, p[r][h], grad_prob);
        if (kDrop) p[r][h] = dropout.keep(p[r][h], bits[r][h]);
      }
    to.store(j, p, ds);
  }
}

// Two finished rows into pairs.
ALWAYS_INLINE void rows_to_pairs(const float* probs, const float* grad_scores, int stride, int cols, const PairRows& to) {
  using V = NativeVec<float>;
  for (int j = 0; j < cols; j += 32) {
    V p[2][2], ds[2][2];
    for (int r = 0; r < 2; r++)
      for (int h = 0; h < 2; h++) p[r][h] = V::load(probs + r * stride + j + 16 * h), ds[r][h] = V::load(grad_scores + r * stride + j + 16 * h);
    to.store(j, p, ds);
  }
}
#endif

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
