#pragma once
// One chunk of the backward of linear attention, with no decay or one per token. With w_i = 1 / (a_i . z_i), o = out,
// do = grad_out (not normalised: w_i = scale, t_i = 0), and dS, dz the gradients of the state behind the chunk:
//   t_i = o_i . do_i = w_i (sum_j W_ij do_i . v_j + in_i a_i . (S do_i))
//   G_ij = P_ij w_i (do_i . v_j - t_i)
//   da_i = sum_j G_ij b_j + in_i w_i (S do_i - t_i z)
//   db_j = sum_i G_ij a_i + out_j (dS v_j + dz)
//   dv_j = sum_i W_ij w_i do_i + out_j b_j dS
//   dS'  = through dS + sum_i in_i w_i a_i do_i^T,  dz' = through dz - sum_i in_i w_i t_i a_i
//   dg_t = sum of W_ij (G / P)_ij over j < t <= i, and of the same for pairs that enter or leave the chunk; no differences.
// Neither out nor the denominators are read: everything comes from the inputs and S. The sums over i run over the query heads
// of the group as well.

#include "linear_bwd.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T, bool kDecay>
struct LinearChunk {
  using Real = ComputeType<T>;
  using V = NativeVec<Real>;
  static constexpr int kN = V::kLanes, P = kPanel<Real>;
  const LinearAttentionBackwardParams& params;
  const LinearAttentionParams& p;
  const StateLayout<Real> layout;
  int head_dim, head_dim_v, chunk, group, key_stride, value_stride, tile_stride;
  int64_t panel_stride, key_transposed_stride, value_transposed_stride, grad_panel_stride;

  Real *key, *key_scaled, *key_panels, *key_transposed, *value, *value_transposed;  // rows, panels of columns, panels of rows
  struct QueryBuffers {  // of one head of the group
    Real *query, *query_panels, *grad_out, *grad_out_scaled, *grad_out_panels;
    Real *weights, *grads;  // tiles [chunk][tile_stride]: W_ij w_i and G_ij
    Real *factor, *query_factor;  // [tile_stride]: in_i w_i, and -t_i times that
  };
  QueryBuffers* heads;
  Real* block;              // one register block of grad_query, grad_key or grad_value
  Real* grad_state_panels;  // dS: panels of value columns [head_dim][kPanel]
  Real* token_state;
  Real *from_state, *to_state, *flow, *flow_sum;  // [tile_stride]
  T *key_temp, *value_temp, *query_temp, *grad_out_temp;
  uint8_t* mask_temp;
  ChunkDecay<Real> decay;

  LinearHead<T> head{p, 0};
  int first_panel = 0, last_panel = 0;
  const uint8_t* mask = nullptr;
  bool poisoned = false;  // dS may hold what is not finite: token by token, until a decay of exactly 0 forgets it

  static int chunk_of(const LinearAttentionParams& p) { return kVectorBytes < 64 || p.head_dim > 64 ? LINEAR_CHUNK_WIDE : LINEAR_CHUNK; }

  LinearChunk(const LinearAttentionBackwardParams& params, Scratch& scratch)
      : params(params),
        p(params.forward),
        layout(p),
        head_dim(int(p.head_dim)),
        head_dim_v(int(p.head_dim_v)),
        chunk(chunk_of(p)),
        group(int(p.num_heads / max_of(p.num_heads_kv, int64_t(1)))),
        decay(chunk, kDecay, scratch) {
    const int rows = round_up(chunk, kLinearRows) + kLinearRows, value_panels = (head_dim_v + P - 1) / P, chunk_panels = (chunk + P - 1) / P;
    key_stride = round_up(head_dim, kN);
    value_stride = round_up(head_dim_v, kN);
    tile_stride = round_up(chunk, kN) + kN;
    panel_stride = int64_t(chunk) * P;
    key_transposed_stride = int64_t(head_dim) * P;
    value_transposed_stride = int64_t(head_dim_v) * P;
    grad_panel_stride = int64_t(head_dim) * P;
    key = scratch.take<Real>(rows * key_stride);
    key_scaled = kDecay ? scratch.take<Real>(rows * key_stride) : key;
    key_panels = scratch.take<Real>(layout.panels * panel_stride);
    key_transposed = scratch.take<Real>(chunk_panels * key_transposed_stride);
    value = scratch.take<Real>(rows * value_stride);
    value_transposed = scratch.take<Real>(chunk_panels * value_transposed_stride);
    heads = scratch.take<QueryBuffers>(group);
    for (int i = 0; i < group; i++) {
      QueryBuffers q;
      q.query = scratch.take<Real>(rows * key_stride);
      q.query_panels = scratch.take<Real>(layout.panels * panel_stride);
      q.grad_out = scratch.take<Real>(rows * value_stride);
      q.grad_out_scaled = scratch.take<Real>(rows * value_stride);
      q.grad_out_panels = scratch.take<Real>(value_panels * panel_stride);
      q.weights = scratch.take<Real>(rows * tile_stride);
      q.grads = scratch.take<Real>(rows * tile_stride);
      q.factor = scratch.take<Real>(tile_stride);
      q.query_factor = scratch.take<Real>(tile_stride);
      if (scratch.base) heads[i] = q;
    }
    block = scratch.take<Real>(kLinearRows * max_of(key_stride, value_stride));
    grad_state_panels = scratch.take<Real>(value_panels * grad_panel_stride);
    token_state = scratch.take<Real>(layout.size);
    from_state = scratch.take<Real>(tile_stride);
    to_state = scratch.take<Real>(tile_stride);
    flow = scratch.take<Real>(tile_stride);
    flow_sum = scratch.take<Real>(tile_stride);
    const auto strided = [](const TensorView& view) { return view.col_stride != 1; };
    key_temp = scratch.take<T>(strided(p.key) ? int64_t(chunk) * head_dim : 0);
    value_temp = scratch.take<T>(strided(p.value) ? int64_t(chunk) * head_dim_v : 0);
    query_temp = scratch.take<T>(strided(p.query) ? int64_t(chunk) * head_dim : 0);
    grad_out_temp = scratch.take<T>(strided(params.grad_out) ? int64_t(chunk) * head_dim_v : 0);
    mask_temp = scratch.take<uint8_t>(chunk);
  }

  void start(int64_t item, int first, int last) {
    head = LinearHead<T>(p, item);
    first_panel = first, last_panel = last, poisoned = false;
  }

  // ---- rows in ----

  // `forward`: the keys behind these are read next.
  bool pack_keys(int64_t begin, int rows, bool forward) {
    mask = head.mask_rows(begin, rows, mask_temp);
    const int ahead = forward ? chunk : 0;
    const auto next_key = head.ahead(head.key, begin + rows, ahead, p.seqlen_kv, head_dim),
               next_value = head.ahead(head.value, begin + rows, ahead, p.seqlen_kv, head_dim_v);
    const auto key_rows = adjacent_columns(head.key, begin, rows, head_dim, key_temp);
    const auto value_rows = adjacent_columns(head.value, begin, rows, head_dim_v, value_temp);
    const bool finite = feature_rows(p.key_map, key_rows, rows, head_dim, mask, key, key_stride, next_key);
    return feature_rows(FeatureMap::kIdentity, value_rows, rows, head_dim_v, mask, value, value_stride, next_value) && finite;
  }
  bool pack_queries(int index, int64_t begin, int rows, bool with_chunk) {
    const QueryBuffers& q = heads[index];
    const auto query = adjacent_columns(head.template query_rows<const T>(p.query, index), begin, rows, head_dim, query_temp);
    // Without the chunk queries go forward, and nothing else asks for the next ones.
    const int ahead = with_chunk ? 0 : chunk;
    const auto next_query = head.ahead(head.template query_rows<const T>(p.query, index), begin + rows, ahead, p.seqlen_q, head_dim);
    const auto next_grad = head.ahead(head.template query_rows<const T>(params.grad_out, index), begin + rows, ahead, p.seqlen_q, head_dim_v);
    const bool finite = feature_rows(p.query_map, query, rows, head_dim, (const uint8_t*)nullptr, q.query, key_stride, next_query);
    for (int panel = first_panel; panel < last_panel; panel++)
      pack_panels<Real>(q.query + panel * P, key_stride, rows, min_of(P, head_dim - panel * P), q.query_panels + panel * panel_stride, 0);
    const auto grad_out = adjacent_columns(head.template query_rows<const T>(params.grad_out, index), begin, rows, head_dim_v, grad_out_temp);
    if (with_chunk) pack_panels<Real>(grad_out.data, grad_out.row_stride, rows, head_dim_v, q.grad_out_panels, panel_stride);
    return feature_rows(FeatureMap::kIdentity, grad_out, rows, head_dim_v, (const uint8_t*)nullptr, q.grad_out, value_stride, next_grad) && finite;
  }
  // Everything of a chunk. value and key_scaled end up times out_j.
  bool pack(int64_t begin, int rows) {
    bool finite = pack_keys(begin, rows, false);
    pack_transposed<Real>(value, value_stride, rows, head_dim_v, value_transposed, value_transposed_stride);
    pack_transposed<Real>(key, key_stride, rows, head_dim, key_transposed, key_transposed_stride);
    pack_panels<Real>(key, key_stride, rows, head_dim, key_panels, panel_stride);
    if (kDecay) {
      decay.build_ends(head, begin, rows);
      decay.build_pairs(rows);
      for (int j = 0; j < rows; j++) {
        scale_row(key + j * key_stride, decay.out[j], key_stride, key_scaled + j * key_stride);
        scale_row(value + j * value_stride, decay.out[j], value_stride, value + j * value_stride);
      }
    }
    for (int i = 0; i < group; i++) finite &= pack_queries(i, begin, rows, true);
    return finite;
  }

  // ---- states ----

  // state = through state + sum_j out_j (v_j b_j^T, b_j)
  bool advance(Real* state, int64_t begin, int64_t end) {
    const int rows = int(end - begin);
    const bool finite = pack_keys(begin, rows, true);
    if (!finite && rows > 1) {
      for (int64_t i = begin; i < end; i++) advance(state, i, i + 1);
      return false;
    }
    for (int panel = first_panel; panel < last_panel; panel++)
      pack_panels<Real>(key + panel * P, key_stride, rows, min_of(P, head_dim - panel * P), key_panels + panel * panel_stride, 0);
    if (kDecay) {
      decay.build_ends(head, begin, rows);
      scale_state(state, decay.through);
      for (int j = 0; j < rows; j++) scale_row(value + j * value_stride, decay.out[j], value_stride, value + j * value_stride);
    }
    add_products(rows, value, key_panels, state);
    add_rows<Real>(key, key_stride, kDecay ? decay.out : nullptr, rows, key_stride, layout.sum(state));
    return finite;
  }
  // Its key columns; the sums always whole.
  void scale_state(Real* state, Real factor) const {
    for (int panel = first_panel; panel < last_panel; panel++)
      scale_row(state + panel * layout.panel_stride, factor, layout.panel_stride, state + panel * layout.panel_stride);
    scale_row(layout.sum(state), factor, key_stride, layout.sum(state));
  }
  // state^T += sum over rows of left^T right.
  void add_products(int rows, const Real* left, const Real* right_panels, Real* state) const {
    for (int panel = first_panel; panel < last_panel; panel++)
      gemm<Left::Transposed, Store::Accumulate, kLinearRows>(head_dim_v, min_of(P, head_dim - panel * P), rows, left, value_stride,
                                                             right_panels + panel * panel_stride, 0, state + panel * layout.panel_stride, P);
  }

  // ---- few heads: the parts of backward() ----

  bool factors(Real* state, int64_t begin, int64_t end, Real* to, int64_t stride) {
    const int rows = int(end - begin);
    if (!pack(begin, rows)) return false;
    for (int i = 0; i < group; i++) queries(i, begin, rows, state, true, false);
    store_factors(rows, to, stride);
    return true;
  }
  void store_factors(int rows, Real* to, int64_t stride) const {
    for (int i = 0; i < group; i++) {
      memcpy(to + 2 * i * stride, heads[i].factor, rows * sizeof(Real));
      memcpy(to + (2 * i + 1) * stride, heads[i].query_factor, rows * sizeof(Real));
    }
  }
  bool advance_grad(Real* grad_state, bool grad_empty, int64_t begin, int64_t end, const Real* from, int64_t stride) {
    const int rows = int(end - begin);
    bool finite = true;
    if (kDecay) decay.build_ends(head, begin, rows);
    for (int i = 0; i < group; i++) {
      finite &= pack_queries(i, begin, rows, false);
      memcpy(heads[i].factor, from + 2 * i * stride, rows * sizeof(Real));
      memcpy(heads[i].query_factor, from + (2 * i + 1) * stride, rows * sizeof(Real));
      for (int row = 0; row < rows; row++)
        scale_row(heads[i].grad_out + row * value_stride, heads[i].factor[row], value_stride, heads[i].grad_out_scaled + row * value_stride);
    }
    update_grad_state(grad_state, grad_empty, rows);
    return finite;
  }

  // ---- a chunk ----

  void backward(Real* state, Real* grad_state, bool grad_empty, int64_t begin, int64_t end) {
    const int rows = int(end - begin);
    const bool finite = pack(begin, rows);
    if ((finite && !poisoned) || rows == 1) {
      run_chunk(begin, rows, state, grad_state, grad_empty, finite);
      return;
    }
    for (int64_t i = end - 1; i >= begin; i--) {
      memcpy(token_state, state, layout.size * sizeof(Real));
      for (int64_t k = begin; k < i; k++) advance(token_state, k, k + 1);
      const bool token_finite = pack(i, 1);
      run_chunk(i, 1, token_state, grad_state, grad_empty, token_finite);
      grad_empty = false;
    }
  }
  void run_chunk(int64_t begin, int rows, Real* state, Real* grad_state, bool grad_empty, bool finite) {
    if (kDecay) poisoned = (poisoned && decay.through != 0) || !finite;
    const bool flows = kDecay && params.grad_log_decay.data;
    Real through_flow = 0;
    if (flows) {
      memset(flow, 0, tile_stride * sizeof(Real));
      memset(from_state, 0, tile_stride * sizeof(Real));
      if (!grad_empty && decay.through != 0) through_flow = decay.through * dot(state, grad_state, layout.size);
    }
    for (int i = 0; i < group; i++) queries(i, begin, rows, state, true, true);
    transpose_grad_state(grad_state);
    keys(begin, rows, grad_state, grad_empty, true);
    update_grad_state(grad_state, grad_empty, rows);
    if (!flows) return;
    const Matrix<Real> grad = head.template rows<Real>(params.grad_log_decay);
    Real sum = through_flow;
    for (int i = 0; i < rows; i++) {  // to_state of j < i
      *grad.row(begin + i) = flow[i] + sum;
      sum += to_state[i];
    }
    sum = 0;
    for (int i = rows - 1; i >= 0; i--) *grad.row(begin + i) += sum += from_state[i];
  }
  // Not causal: every query has seen every key.
  void full_queries(const Real* state, int64_t begin, int64_t end, Real* to, int64_t stride) {
    const int rows = int(end - begin);
    for (int i = 0; i < group; i++) {
      pack_queries(i, begin, rows, false);
      queries(i, begin, rows, state, false, true);
    }
    store_factors(rows, to, stride);
  }
  void full_keys(const Real* grad_state, bool grad_empty, int64_t begin, int64_t end) {
    pack_keys(begin, int(end - begin), true);
    keys(begin, int(end - begin), grad_state, grad_empty, false);
  }

  void transpose_grad_state(const Real* grad_state) const {
    for (int panel = 0; panel < layout.panels; panel++)
      pack_transposed<Real>(grad_state + panel * layout.panel_stride, P, head_dim_v, min_of(P, head_dim - panel * P), grad_state_panels + panel * P * P,
                            grad_panel_stride);
  }
  void update_grad_state(Real* grad_state, bool grad_empty, int rows) {
    if (kDecay && !grad_empty) scale_state(grad_state, decay.through);
    for (int i = 0; i < group; i++) {
      const QueryBuffers& q = heads[i];
      add_products(rows, q.grad_out_scaled, q.query_panels, grad_state);
      if (p.normalize) add_rows<Real>(q.query, key_stride, q.query_factor, rows, key_stride, layout.sum(grad_state));
    }
  }

  // The two tiles, the factors and grad_out_scaled of one query head; with_grads: grad_query and the flows too. Blocks from the
  // last to the first: flow_sum[j] then holds the sum of W_ij G_ij / P_ij over all rows from i on.
  void queries(int index, int64_t begin, int rows, const Real* state, bool with_chunk, bool with_grads) {
    const QueryBuffers& q = heads[index];
    const bool empty = with_chunk && begin == 0 && !p.initial_k_sum, flows = kDecay && with_grads && params.grad_log_decay.data;
    if (flows) memset(flow_sum, 0, tile_stride * sizeof(Real));
    const auto next_query = head.template query_rows<const T>(p.query, index), next_grad = head.template query_rows<const T>(params.grad_out, index);
    const auto grad_query = head.template query_rows<T>(params.grad_query, index);
    for (int i0 = (rows - 1) / kLinearRows * kLinearRows; i0 >= 0; i0 -= kLinearRows) {
      const int count = min_of(kLinearRows, rows - i0), cols = with_chunk ? i0 + count : 0;
      Real *weights = q.weights + i0 * tile_stride, *grads = q.grads + i0 * tile_stride;
      const Real *query = q.query + i0 * key_stride, *grad_out = q.grad_out + i0 * value_stride;
      const int64_t next = begin - chunk + i0;
      const int ahead = with_chunk && next >= 0 ? count : 0;
      prefetch_rows<Access::Read>(next_query, next, ahead, head_dim);
      prefetch_rows<Access::Write>(grad_query, begin + i0, with_grads ? count : 0, head_dim);
      if (with_chunk) {
        gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(count, cols, head_dim, query, key_stride, key_transposed, key_transposed_stride, weights,
                                                            tile_stride);
        gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(count, cols, head_dim_v, grad_out, value_stride, value_transposed, value_transposed_stride, grads,
                                                            tile_stride);
      }
      if (empty) memset(block, 0, kLinearRows * key_stride * sizeof(Real));
      else
        gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(count, head_dim, head_dim_v, grad_out, value_stride, state, layout.panel_stride, block, key_stride);
      prefetch_rows<Access::Read>(next_grad, next, ahead, head_dim_v);
      for (int i = count - 1; i >= 0; i--) query_row(q, i0 + i, cols, empty, layout.sum(state), block + i * key_stride, flows);
      if (!with_grads || !params.grad_query.data) continue;
      if (with_chunk)
        gemm<Left::RowMajor, Store::Accumulate, kLinearRows>(count, head_dim, cols, grads, tile_stride, key_panels, panel_stride, block, key_stride);
      store_feature_grad(p.query_map, block, key_stride, query, key_stride, count, head_dim, nullptr, grad_query, begin + i0);
    }
  }
  // grad comes in as S do_i and leaves as the part of da_i that passes through the state.
  ALWAYS_INLINE void query_row(const QueryBuffers& q, int i, int cols, bool empty, const Real* k_sum, Real* grad, bool flows) {
    const Real *query = q.query + i * key_stride, *pairs = decay.pairs + i * decay.stride;
    Real *weights = q.weights + i * tile_stride, *grads = q.grads + i * tile_stride;
    const Real in = kDecay ? decay.in[i] : Real(1);
    V sum(Real(0)), weighted(Real(0));
    for (int j = 0; j < cols; j += kN) {
      V w = V::load(weights + j);
      if (kDecay) w = w * V::load(pairs + j);
      const bool edge = j + kN > i + 1;
      if (edge) w = keep_lanes(w, 0, i + 1 - j, V(Real(0)));
      if (kDecay || edge) w.store(weights + j);
      sum = sum + w;
      V grad_weight = V::load(grads + j);
      if (edge) {
        grad_weight = keep_lanes(grad_weight, 0, i + 1 - j, V(Real(0)));
        grad_weight.store(grads + j);
      }
      weighted = multiply_add(w, grad_weight, weighted);
    }
    Real state_grad = 0, state_sum = 0;
    if (!empty && in != 0 && (kDecay || p.normalize)) {
      state_grad = dot(query, grad, head_dim);
      state_sum = dot(query, k_sum, head_dim);
    }
    Real inverse = Real(p.scale), delta = 0;
    if (p.normalize) {
      const Real denominator = reduce_add(sum) + in * state_sum;
      inverse = denominator == 0 ? Real(0) : 1 / denominator;
      delta = inverse == 0 ? Real(0) : inverse * (reduce_add(weighted) + in * state_grad);
    }
    const V inverses(inverse), deltas(delta);
    for (int j = 0; j < cols; j += kN) {
      const bool edge = j + kN > i + 1;
      V w = V::load(weights + j) * inverses;
      const V difference = V::load(grads + j) - deltas;
      V g = difference * inverses;
      if (kDecay) g = g * V::load(pairs + j);
      if (edge) {  // last: inverse may be NaN, and that concerns visible elements only
        w = keep_lanes(w, 0, i + 1 - j, V(Real(0)));
        g = keep_lanes(g, 0, i + 1 - j, V(Real(0)));
      }
      if (flows) {
        V m = w * difference;
        if (j + kN > i) m = keep_lanes(m, 0, i - j, V(Real(0)));
        (V::load(flow_sum + j) + m).store(flow_sum + j);
      }
      w.store(weights + j);
      g.store(grads + j);
    }
    const Real factor = in == 0 ? Real(0) : inverse * in;
    q.factor[i] = factor;
    q.query_factor[i] = factor == 0 ? Real(0) : -delta * factor;
    scale_row(q.grad_out + i * value_stride, factor, value_stride, q.grad_out_scaled + i * value_stride);
    for (int d = 0; d < head_dim; d += kN) (factor == 0 ? V(Real(0)) : (V::load(grad + d) - deltas * V::load(k_sum + d)) * V(factor)).store(grad + d);
    if (flows) {
      from_state[i] += factor == 0 ? Real(0) : factor * (state_grad - delta * state_sum);
      V below(Real(0));
      for (int j = 0; j < i; j += kN) {
        const V x = V::load(flow_sum + j);
        below = below + (j + kN > i ? keep_lanes(x, 0, i - j, V(Real(0))) : x);
      }
      flow[i] += reduce_add(below);
    }
  }

  void keys(int64_t begin, int rows, const Real* grad_state, bool grad_empty, bool with_chunk) {
    const Matrix<T> grad_key = head.template rows<T>(params.grad_key), grad_value = head.template rows<T>(params.grad_value);
    for (int j0 = 0; j0 < rows; j0 += kLinearRows) {
      const int count = min_of(kLinearRows, rows - j0);
      const int64_t tile = int64_t(j0) * tile_stride + j0, next = begin - chunk + j0;
      const int ahead = with_chunk && next >= 0 ? count : 0;
      const uint8_t* block_mask = mask ? mask + j0 : nullptr;
      prefetch_rows<Access::Read>(head.key, next, ahead, head_dim);
      prefetch_rows<Access::Write>(grad_key, begin + j0, count, head_dim);
      if (params.grad_key.data || (kDecay && params.grad_log_decay.data)) {
        if (grad_empty) memset(block, 0, kLinearRows * key_stride * sizeof(Real));
        else
          gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(count, head_dim, head_dim_v, value + j0 * value_stride, value_stride, grad_state,
                                                              layout.panel_stride, block, key_stride);
        for (int j = 0; j < count; j++) {
          Real* grad = block + j * key_stride;
          if (!grad_empty && !(kDecay && decay.out[j0 + j] == 0)) add_row(layout.sum(grad_state), kDecay ? decay.out[j0 + j] : Real(1), head_dim, grad);
          if (kDecay) to_state[j0 + j] = dot(key + (j0 + j) * key_stride, grad, head_dim);
        }
        for (int i = 0; with_chunk && i < group; i++)
          gemm<Left::Transposed, Store::Accumulate, kLinearRows>(count, head_dim, rows - j0, heads[i].grads + tile, tile_stride, heads[i].query_panels + j0 * P,
                                                                 panel_stride, block, key_stride);
        if (params.grad_key.data)
          store_feature_grad(p.key_map, block, key_stride, key + j0 * key_stride, key_stride, count, head_dim, block_mask, grad_key, begin + j0);
      }
      prefetch_rows<Access::Read>(head.value, next, ahead, head_dim_v);
      prefetch_rows<Access::Write>(grad_value, begin + j0, count, head_dim_v);
      if (!params.grad_value.data) continue;
      if (grad_empty) memset(block, 0, kLinearRows * value_stride * sizeof(Real));
      else
        gemm<Left::RowMajor, Store::Overwrite, kLinearRows>(count, head_dim_v, head_dim, key_scaled + j0 * key_stride, key_stride, grad_state_panels,
                                                            grad_panel_stride, block, value_stride);
      for (int i = 0; with_chunk && i < group; i++)
        gemm<Left::Transposed, Store::Accumulate, kLinearRows>(count, head_dim_v, rows - j0, heads[i].weights + tile, tile_stride,
                                                               heads[i].grad_out_panels + j0 * P, panel_stride, block, value_stride);
      store_feature_grad(FeatureMap::kIdentity, block, value_stride, block, value_stride, count, head_dim_v, block_mask, grad_value, begin + j0);
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
