#pragma once
// The query side of one tile of the backward pass: packed queries and gradients of out, lse and delta of each row.

#include "backward_buffers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T, class Unit, bool kDrop>
struct BackwardQueries {
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  using Buffers = BackwardBuffers<T, Unit, kDrop>;
  static constexpr int kSize = kUnitSize<Unit>;
  const AttentionBackwardParams& params;
  const AttentionParams& p;

  void pack_queries(int64_t batch, int rows, bool negate, const Buffers& buf) const {
    const int head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    // A row that completes the last pair, or the last rows of a block, is zero.
    const int padded = round_up(rows, kRowStep);
    if (rows % kSize) {
      memset(buf.query_rows + int64_t(rows) * buf.query_stride, 0, buf.query_stride * sizeof(Unit));
      memset(buf.grad_out_rows + int64_t(rows) * buf.grad_out_stride, 0, buf.grad_out_stride * sizeof(Unit));
    }
    // Panels hold whole pairs of rows: gather the tile where runs may break a pair or columns are strided.
    const bool one_run = buf.rows[rows - 1].head == buf.rows[0].head;
    const bool gather = !one_run || p.query.col_stride != 1 || params.grad_out.col_stride != 1, turns = p.rotary.query_table.data != nullptr;
    Matrix<const T> query = matrix<const T>(p, p.query, batch, buf.rows[0].head), grad_out = matrix<const T>(p, params.grad_out, batch, buf.rows[0].head);
    query.data = query.row(buf.rows[0].query), grad_out.data = grad_out.row(buf.rows[0].query);
    if (gather) {
      for (int i = 0; i < rows; i++) {
        const Matrix<const T> q = matrix<const T>(p, p.query, batch, buf.rows[i].head), g = matrix<const T>(p, params.grad_out, batch, buf.rows[i].head);
        for (int d = 0; d < head_dim && !turns; d++) buf.query_temp[int64_t(i) * head_dim + d] = q.row(buf.rows[i].query)[d * q.col_stride];
        for (int d = 0; d < head_dim_v; d++) buf.grad_out_temp[int64_t(i) * head_dim_v + d] = g.row(buf.rows[i].query)[d * g.col_stride];
      }
      query = {buf.query_temp, head_dim, 1}, grad_out = {buf.grad_out_temp, head_dim_v, 1};
    }
    if (turns) {
      for (int i = 0; i < rows; i++)
        turned_rows(p, p.query, p.rotary.query_table, batch, buf.rows[i].head, buf.rows[i].query, 1, buf.query_temp + int64_t(i) * head_dim);
      query = {buf.query_temp, head_dim, 1};
    }
    pack_rows(query.data, query.row_stride, rows, head_dim, negate, buf.query_rows, buf.query_stride);
    pack_rows(grad_out.data, grad_out.row_stride, rows, head_dim_v, false, buf.grad_out_rows, buf.grad_out_stride);
    pack_panels(query.data, query.row_stride, rows, head_dim, buf.query_panels, buf.tile_stride);
    pack_panels(grad_out.data, grad_out.row_stride, rows, head_dim_v, buf.grad_out_panels, buf.tile_stride);
    for (int i = 0; i < padded; i++) {
      buf.row_delta[i] = buf.row_lse_low[i] = 0;
      buf.row_lse[i] = Real(INFINITY);  // makes every probability of an empty row, and of a row that only pads the block, zero
      if (i >= rows) continue;
      const int64_t at = lse_offset(p, batch, buf.rows[i].head) + buf.rows[i].query;
      const Real lse = ((const Real*)p.lse)[at], grad_lse = params.grad_lse ? ((const Real*)params.grad_lse)[at] : Real(0);
      if (lse == Real(-INFINITY)) {
        zero_panel_row(buf.query_panels, i, head_dim, buf.tile_stride);
        zero_panel_row(buf.grad_out_panels, i, head_dim_v, buf.tile_stride);
      } else {
        buf.row_lse[i] = in_log2_units(lse);
        buf.row_lse_low[i] = lost_in_log2_units(lse, buf.row_lse[i]);
        // d lse / d score = probs, so a gradient of lse only shifts delta.
        buf.row_delta[i] = out_times_grad(batch, buf.rows[i], grad_out.row(i)) - grad_lse;
      }
      buf.row_slope[i] = buf.row_shift[i] = 0;
    }
  }

  // -(weight of the sink) * delta, what a row adds to the gradient of its sink.
  Real grad_sink(int64_t batch, int in_tile, const Buffers& buf) const {
    const TileRow& row = buf.rows[in_tile];
    const double sink = p.sinks ? double(((const Real*)p.sinks)[row.head]) : -INFINITY;
    if (sink == -INFINITY || buf.row_lse[in_tile] == Real(INFINITY)) return 0;
    const double lse = double(((const Real*)p.lse)[lse_offset(p, batch, row.head) + row.query]);
    const double log2_weight =
        lse_is_coarse<T>(in_log2_units(Real(lse))) ? sink * kLog2e - buf.row_shift[in_tile] - buf.row_lse[in_tile] : (sink - lse) * kLog2e;
    return Real(-exp2(NativeVec<double>(log2_weight)).v[0] * buf.row_delta[in_tile]);
  }

  int64_t bias_offset(int64_t batch, int64_t head) const { return batch_offset(p, params.grad_bias, batch) + head * params.grad_bias.head_stride; }

  // A bias that is the same for all keys of a row changes lse alone: sum_j ds_j = grad_lse + (weight of the sink) * delta. Free of the
  // rounding that the sum over the keys would collect.
  double bias_of_row(int64_t batch, int in_tile, const Buffers& buf) const {
    const TileRow& row = buf.rows[in_tile];
    if (buf.row_lse[in_tile] == Real(INFINITY)) return 0;
    const Real grad_lse = params.grad_lse ? ((const Real*)params.grad_lse)[lse_offset(p, batch, row.head) + row.query] : Real(0);
    const Real delta = buf.row_delta[in_tile];
    return double(grad_lse) - buf.row_sink[in_tile] + (delta - delta);  // NaN where delta is not finite
  }

  // The first of the heads and batch items that share a row of grad_bias clears it: it comes first in the plan.
  void clear_bias_row(int64_t batch, const TileRow& row) const {
    const TensorView& view = params.grad_bias;
    if (view.head_stride == 0 && row.head > 0) return;
    int64_t rest = batch;
    for (int d = p.num_batch_dims - 1; d >= 0; d--) {
      if (view.batch_strides[d] == 0 && rest % p.batch_sizes[d] > 0) return;
      rest /= p.batch_sizes[d];
    }
    memset((Real*)view.data + bias_offset(batch, row.head) + row.query * view.row_stride, 0, p.seqlen_kv * sizeof(Real));
  }

 private:
  static void zero_panel_row(Unit* panels, int row, int cols, int64_t panel_stride) {
    for (int d = 0; d < cols; d++) {
      Unit& unit = panels[d / kPanel<Unit> * panel_stride + row / kSize * kPanel<Unit> + d % kPanel<Unit>];
      if constexpr (kSize == 1) unit = 0;
      else unit &= row % 2 ? 0xffffu : 0xffff0000u;
    }
  }
  Real out_times_grad(int64_t batch, const TileRow& row, const T* grad_out) const {
    const Matrix<const T> out = matrix<const T>(p, p.out, batch, row.head);
    const Matrix<const T> residual = p.residual.data ? matrix<const T>(p, p.residual, batch, row.head) : Matrix<const T>{nullptr, 0, 1};
    const int cols = int(p.head_dim_v);
    // In double: an error of delta is the same in all keys of the row, and does not average out where rows are summed.
    NativeVec<double> sum(0.0);
    for (int d = 0; d < cols; d += V::kLanes) {
      T temp[V::kLanes], rest[V::kLanes];
      const int count = min_of(V::kLanes, cols - d);
      const V grad = load_converted(grad_out + d, count), x = load_converted(adjacent_elements(out.row(row.query), out.col_stride, d, d + count, temp), count);
      sum = add_products(grad, x, sum);
      if (residual.data)
        sum = add_products(grad, load_converted(adjacent_elements(residual.row(row.query), residual.col_stride, d, d + count, rest), count), sum);
    }
    return Real(reduce_add(sum));
  }
  static ALWAYS_INLINE NativeVec<double> add_products(V a, V b, NativeVec<double> sum) {
    if constexpr (sizeof(Real) == 8) return multiply_add(a, b, sum);
    else {
      sum = multiply_add(convert<double>(low_half(a)), convert<double>(low_half(b)), sum);
      return multiply_add(convert<double>(high_half(a)), convert<double>(high_half(b)), sum);
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
