#pragma once
// From the state of a tile of rows to what the operator returns: out, lse, residual.

#include "softmax_block.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// out = accumulated / row_sum, lse = ln2 * (row_max + log2(row_sum)); a row that saw nothing gets 0 and -inf.
template <class T, class Real>
struct ResultRows {
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes;
  const AttentionParams& p;
  Real inverse_keep;  // of dropout
  bool adds;          // out, lse (then double) and residual hold the results over other keys, and become those over all

  void write(int64_t batch, int rows, const RowState<Real>& state, const TileRow* tile_rows) const {
    alignas(64) Real scale[kN], old_scale[kN];
    alignas(64) double lse[kN];
    bool empty[kN];
    for (int i = 0; i < rows; i++) {
      if (i % kN == 0) {
        const int count = min_of(kN, rows - i);
        finish(count, state.from(i), tile_rows + i, scale, lse, empty);
        if (adds) add_old(batch, count, tile_rows + i, scale, lse, old_scale, empty);
      }
      const int k = i % kN;
      const int64_t head = tile_rows[i].head, query = tile_rows[i].query;
      if (adds && empty[k]) continue;
      if (adds) ((double*)p.lse)[lse_offset(p, batch, head) + query] = lse[k];
      else if (p.lse) ((Real*)p.lse)[lse_offset(p, batch, head) + query] = Real(lse[k]);
      Real *row = state.out + int64_t(i) * state.out_stride, factor = scale[k];
      if (empty[k]) memset(row, 0, p.head_dim_v * sizeof(Real));
      const Matrix<T> out = matrix<T>(p, p.out, batch, head);
      const Matrix<T> residual = p.residual.data ? matrix<T>(p, p.residual, batch, head) : Matrix<T>{nullptr, 0, 1};
      if (adds && old_scale[k] != 0) {
        add_row(row, int(p.head_dim_v), factor, out.row(query), out.col_stride, old_scale[k]);
        if (residual.data) add_row(row, int(p.head_dim_v), Real(1), residual.row(query), residual.col_stride, old_scale[k]);
        factor = 1;
      }
      store_row(row, int(p.head_dim_v), factor, out.row(query), out.col_stride);
      if constexpr (sizeof(T) == 2)
        if (residual.data) store_residual(row, int(p.head_dim_v), factor, residual.row(query), residual.col_stride);
    }
  }

 private:
  // What the accumulated rows are to be multiplied by, and lse, of up to kLanes rows.
  void finish(int count, const RowState<Real>& state, const TileRow* tile_rows, Real* scale, double* lse, bool* empty) const {
    for (int k = 0; k < kN; k++) {
      if (k < count && p.sinks)
        add_sink(Real(((const Real*)p.sinks)[tile_rows[k].head] * kLog2e), state.row_max[k], state.row_sum + k * kN, state.out + int64_t(k) * state.out_stride,
                 int(p.head_dim_v));
      scale[k] = k < count ? reduce_add(V::load(state.row_sum + k * kN)) : Real(1);
    }
    natural_lse(state.row_max, scale, lse);
    (V(Real(1)) / V::load(scale)).store(scale);
    for (int k = 0; k < count; k++) {
      empty[k] = state.row_max[k] == Real(-INFINITY) && scale[k] == Real(INFINITY);
      // A row of the lowest numbers: its lse, in natural units, is the lowest number too.
      if (state.row_max[k] > Real(-INFINITY) && state.row_max[k] <= kLowestBias<Real>) lse[k] = kLowestReal<Real>;
      if (empty[k]) lse[k] = -INFINITY;
      scale[k] = empty[k] ? Real(1) : scale[k] * inverse_keep;
    }
  }

  // The same over the old keys too, and what the old rows are to be multiplied by.
  void add_old(int64_t batch, int count, const TileRow* tile_rows, Real* scale, double* lse, Real* old_scale, const bool* empty) const {
    using D = NativeVec<double>;
    alignas(64) double old[kN] = {}, now[kN] = {}, top[kN] = {}, total[kN];
    for (int k = 0; k < count; k++) {
      old[k] = ((const double*)p.lse)[lse_offset(p, batch, tile_rows[k].head) + tile_rows[k].query];
      now[k] = lse[k];
      top[k] = old[k] > now[k] || old[k] != old[k] ? old[k] : now[k];
      if (!empty[k]) old[k] -= top[k], now[k] -= top[k];
    }
    for (int k = 0; k < kN; k += D::kLanes) {
      const D a = exp2(D::load(old + k) * D(kLog2e)), b = exp2(D::load(now + k) * D(kLog2e)), sum = a + b;
      a.store(old + k), b.store(now + k), sum.store(total + k);
    }
    for (int k = 0; k < count; k++) {
      if (empty[k]) continue;
      old_scale[k] = Real(old[k] / total[k]);
      scale[k] = Real(scale[k] * (now[k] / total[k]));
    }
    for (int k = 0; k < kN; k += D::kLanes) multiply_add(log2(D::load(total + k)), D(kLn2), D::load(top + k)).store(top + k);
    for (int k = 0; k < count; k++)
      if (old_scale[k] != 0 && lse[k] < INFINITY) lse[k] = top[k];
  }

  // ln2 * (row_max + log2(sum)) of kLanes rows.
  static void natural_lse(const Real* row_max, const Real* sums, double* lse) {
    using D = NativeVec<double>;
    for (int k = 0; k < kN; k += D::kLanes) {
      D top, sum;
      for (int i = 0; i < D::kLanes; i++) top.v[i] = row_max[k + i], sum.v[i] = sums[k + i];
      multiply_add(top, D(kLn2), log2(sum) * D(kLn2)).store(lse + k);
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
