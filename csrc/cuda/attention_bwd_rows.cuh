#pragma once
// Backward, what is known per query before the main kernels: lse in units of log 2, delta, which tiles of queries hold inf or NaN, and what
// each row adds to the gradients of sinks and of a bias without columns. Also the scratch memory of the whole pass.

#include "attention_grad_reduce.cuh"
#include "block_list.cuh"
#include "dropout.cuh"
#include "row_table.cuh"
#include "score.cuh"
#include "tile.cuh"

namespace tiled_attention {
namespace cuda {

constexpr int kStatRows = 32;    // a block of attention_bwd_rows_kernel, and a flag of not_finite
constexpr int kPaddedRows = 128;  // a multiple of every query tile
constexpr int kSlopeRows = 64;   // a query tile of the kernel that adds up gradients of slopes

// In scratch memory. Rows behind seqlen_q are there and read like rows that see no key. A head of a batch item begins at BackwardHead::stats:
// [batch][num_heads][padded], or for packed sequences [num_heads][total], item b at row (cu_seqlens_q[b] / kPaddedRows + b) * kPaddedRows.
struct BackwardRows {
  float* lse;          // weight = exp2((score - shift) * log2 e - lse), +inf where no key is seen
  float* minus_delta;
  float* shift;        // 0 unless lse is coarse; null without features
  uint8_t* not_finite;  // of kStatRows rows each: a row of query or grad_out with inf or NaN; null where no key is hidden
  int64_t padded;      // of the longest item
  int64_t count;       // of all

  BackwardRows() = default;
  HOST_DEVICE explicit BackwardRows(const AttentionParams& p)
      : lse(nullptr), minus_delta(nullptr), shift(nullptr), not_finite(nullptr), padded((p.seqlen_q + kPaddedRows - 1) / kPaddedRows * kPaddedRows) {
    count = p.num_heads * (p.cu_seqlens_q ? (p.total_q / kPaddedRows + p.batch) * kPaddedRows : p.batch * padded);
  }
  HOST_DEVICE int64_t begin(const AttentionParams& p, int64_t batch, int64_t head) const {
    if (!p.cu_seqlens_q) return (batch * p.num_heads + head) * padded;
    return head * (count / p.num_heads) + (query_segment(p, batch).begin / kPaddedRows + batch) * kPaddedRows;
  }
};

// With features: one head's modifiers of scores and weights.
struct PairFeatures {
  Scores<float> scores;
  Dropout dropout;
  float inverse_softcap, inverse_keep;

  SIMT_DEVICE void fill(const AttentionParams& p, int batch, int head) {
    scores = Scores<float>(p, batch, head);
    dropout = Dropout(p.dropout, batch, head);
    inverse_softcap = scores.softcap != 0 ? 1 / scores.softcap : 0.0f, inverse_keep = float(dropout.inverse_keep);
  }

  // From q . k to the score, and its derivative by scale * q . k. Softcap is applied here: a division by it would be a call in the main loops.
  SIMT_DEVICE float score(float product, int64_t query, int64_t key, float* derivative) const {
    Scores<float> others = scores;
    others.scale = 1, others.softcap = 0;
    float score = product * scores.scale;
    *derivative = 1;
    if (scores.softcap != 0) {
      const float t = softcap_tanh(score * inverse_softcap);
      *derivative = softcap_gradient(1.0f, t), score = scores.softcap * t;
    }
    return others(score, query, key);
  }
  SIMT_DEVICE bool hides(int64_t query, int64_t key) const {
    float derivative;
    return score(0.0f, query, key, &derivative) == minus_infinity(0.0f);
  }

  // From q . k and dout . v to the weight and d loss / d score; `to_product` takes that to d loss / d (scale q . k).
  SIMT_DEVICE void operator()(float& product, float& grad, float& to_product, int64_t query, int64_t key, float lse, float shift, float minus_delta,
                              bool kept) const {
    const float modified = score(product, query, key, &to_product);
    if (modified == minus_infinity(0.0f)) {
      product = grad = 0;
      return;
    }
    const float weight = simt::ex2(fmaf(modified - shift, kLog2E, -lse));
    grad = weight * ((kept ? grad * inverse_keep : 0.0f) + minus_delta);
    product = kept ? weight : 0.0f;
  }

  // For query and query + 1.
  SIMT_DEVICE void keeps_two_queries(int64_t query, int64_t key, bool& first, bool& second) const {
    if ((query + dropout.query_offset) % 2 != 0) {
      first = dropout.keeps(query, key), second = dropout.keeps(query + 1, key);
      return;
    }
    uint32_t counter[4];
    key += dropout.key_offset;
    dropout.words(query + dropout.query_offset, key, counter);
    const int i = int(key % 4);
    const uint32_t word = i == 0 ? counter[0] : i == 1 ? counter[1] : i == 2 ? counter[2] : counter[3];
    first = dropout.keeps(word, 0), second = dropout.keeps(word, 1);
  }
};

// One query head of one batch item. Where its matrices begin, in elements, is worked out once per call: the divisions would be calls in the
// main loops.
struct BackwardHead {
  int64_t query, key, value, out, residual, grad_out, grad_query, grad_key, grad_value, grad_bias;
  int64_t stats, slope_parts, lse;  // the last in what lies as lse does
  int seqlen_q, seqlen_kv;
  PairFeatures features;
  HeadList list;

  SIMT_DEVICE void fill(const AttentionBackwardParams& params, const BackwardRows& rows, int64_t slope_tiles, int batch, int head) {
    const AttentionParams& p = params.forward;
    const Segment of_queries = query_segment(p, batch), of_keys = key_segment(p, batch);
    seqlen_q = int(of_queries.length), seqlen_kv = int(of_keys.length);
    stats = rows.begin(p, batch, head), lse = lse_offset(p, batch, head) + of_queries.begin;
    slope_parts = p.cu_seqlens_q ? stats / kSlopeRows : (int64_t(batch) * p.num_heads + head) * slope_tiles;
    const int kv_head = head / (int(p.num_heads) / int(p.num_heads_kv));
    query = head * p.query.head_stride, out = head * p.out.head_stride, residual = head * p.residual.head_stride;
    grad_out = head * params.grad_out.head_stride, grad_query = head * params.grad_query.head_stride, grad_bias = head * params.grad_bias.head_stride;
    key = kv_head * p.key.head_stride, value = kv_head * p.value.head_stride;
    grad_key = kv_head * params.grad_key.head_stride, grad_value = kv_head * params.grad_value.head_stride;
    for (int d = p.num_batch_dims - 1, rest = batch; d >= 0; d--) {
      const int size = int(p.batch_sizes[d]), index = rest % size;
      rest /= size;
      query += index * p.query.batch_strides[d], out += index * p.out.batch_strides[d], residual += index * p.residual.batch_strides[d];
      key += index * p.key.batch_strides[d], value += index * p.value.batch_strides[d], grad_out += index * params.grad_out.batch_strides[d];
      grad_query += index * params.grad_query.batch_strides[d], grad_bias += index * params.grad_bias.batch_strides[d];
      grad_key += index * params.grad_key.batch_strides[d], grad_value += index * params.grad_value.batch_strides[d];
    }
    query += of_queries.begin * p.query.row_stride, out += of_queries.begin * p.out.row_stride, residual += of_queries.begin * p.residual.row_stride;
    grad_out += of_queries.begin * params.grad_out.row_stride, grad_query += of_queries.begin * params.grad_query.row_stride;
    key += of_keys.begin * p.key.row_stride, value += of_keys.begin * p.value.row_stride;
    grad_key += of_keys.begin * params.grad_key.row_stride, grad_value += of_keys.begin * params.grad_value.row_stride;
    features.fill(p, batch, head), list = HeadList(p, batch, head);
  }
};

// The matrix of a view that begins at an offset of a BackwardHead.
template <class T>
SIMT_DEVICE Matrix<T> matrix_at(const TensorView& view, int64_t offset) {
  return {(T*)view.data + offset, view.row_stride, view.col_stride};
}

struct BackwardWork {
  RowTable table;
  ListingQueries listing;
  BackwardHead* heads;  // [batch * num_heads]
  BackwardRows rows;
  float* sink_parts;   // of kStatRows rows each, as BackwardRows
  float* bias_rows;    // of a bias without columns: [batch][num_heads][seqlen_q], or [..][padded / kStatRows] where it has no rows either
  float* slope_parts;  // [batch][num_heads][slope_tiles], or for packed sequences of kSlopeRows rows each, as BackwardRows
  float* bias_parts;   // [bias_splits][bias_elements]; null where one split writes the result; by distance as sum_distances() reads them
  int64_t slope_tiles, bias_splits, bias_elements;
  bool full_bias;  // bias_is_full()
};

// A bias that is the same for all keys changes lse alone: its gradient needs no scores.
inline bool bias_has_columns(const AttentionBackwardParams& params) { return params.grad_bias.data && params.grad_bias.col_stride != 0; }
// Every pair has an element of its own: written where the scores are at hand.
inline bool bias_is_full(const AttentionBackwardParams& params) {
  const TensorView& bias = params.grad_bias;
  return bias_has_columns(params) && bias.row_stride != 0 && !is_by_distance(bias) && BiasSlices(params.forward, bias).summed == 1;
}

// Blocks of the kernel that sums a broadcast bias: tiles of the bias times splits of what is summed. Enough blocks for any device, at most
// kBiasBlocks tiles of partial sums.
constexpr int64_t kBiasBlocks = 512;
constexpr int kBiasRows = 64;
constexpr int bias_keys(int D) { return D > 64 ? 32 : 64; }

struct BiasGrid {
  int64_t row_tiles, key_tiles, slices, steps, splits;  // steps: query tiles of pairs of (batch item, head) that add up in one element

  HOST_DEVICE BiasGrid(const AttentionParams& p, const TensorView& bias, int keys) {
    const BiasSlices all(p, bias);
    const int64_t tiles = (p.seqlen_q + kBiasRows - 1) / kBiasRows;
    row_tiles = bias.row_stride != 0 ? tiles : 1, key_tiles = (p.seqlen_kv + keys - 1) / keys, slices = all.kept;
    steps = all.summed * (bias.row_stride != 0 ? 1 : tiles);
    splits = max_of(int64_t(1), min_of(steps, kBiasBlocks / (row_tiles * key_tiles * slices)));
  }
};

inline int padded_head_dim(const AttentionParams& p) {
  const int64_t dim = max_of(p.head_dim, p.head_dim_v);
  return dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
}

inline BackwardWork take_backward_work(const AttentionBackwardParams& params, Scratch* scratch) {
  const AttentionParams& p = params.forward;
  const int64_t heads = p.batch * p.num_heads;
  BackwardWork work = {};
  work.table = take_row_table(p, scratch), work.listing = ListingQueries(p, scratch);
  work.heads = scratch->take<BackwardHead>(heads);
  BackwardRows& rows = work.rows;
  rows = BackwardRows(p);
  rows.lse = scratch->take<float>(rows.count);
  rows.minus_delta = scratch->take<float>(rows.count);
  if (needs_features(p)) rows.shift = scratch->take<float>(rows.count);
  if (!hides_nothing(p)) rows.not_finite = scratch->take<uint8_t>(rows.count / kStatRows);
  if (params.grad_sinks) work.sink_parts = scratch->take<float>(rows.count / kStatRows);
  if (params.grad_alibi_slopes) {
    work.slope_tiles = (p.seqlen_q + kSlopeRows - 1) / kSlopeRows;
    work.slope_parts = scratch->take<float>(p.cu_seqlens_q ? rows.count / kSlopeRows : heads * work.slope_tiles);
  }
  if (!params.grad_bias.data) return work;
  work.bias_elements = bias_elements(p, params.grad_bias), work.full_bias = bias_is_full(params);
  if (!bias_has_columns(params)) {
    work.bias_rows = scratch->take<float>(heads * (params.grad_bias.row_stride != 0 ? p.seqlen_q : rows.padded / kStatRows));
  } else if (is_by_distance(params.grad_bias)) {
    const DistanceGrid grid(p, kBiasRows, bias_keys(padded_head_dim(p)));
    work.bias_parts = scratch->take<float>(heads * grid.diagonals * grid.width);
  } else if (!work.full_bias) {
    work.bias_splits = BiasGrid(p, params.grad_bias, bias_keys(padded_head_dim(p))).splits;
    if (work.bias_splits > 1) work.bias_parts = scratch->take<float>(work.bias_splits * work.bias_elements);
  }
  return work;
}

// 8 elements of a row that lie in a chunk of 16 bytes; 0 beyond the columns.
template <class T>
SIMT_DEVICE void read_chunk(float (&x)[8], const TileMatrix<const T>& source, int64_t row, int chunk) {
  const int left = source.cols - chunk * 8;
  const T* from = source.m.row(row) + chunk * 8 * source.m.col_stride;
  if (source.aligned && left >= 8) {
    const uint4 words = *(const uint4*)from;
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = simt::to_float(T{uint16_t(w[j / 2] >> (16 * (j & 1)))});
  } else {
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = j < left ? simt::to_float(from[j * source.m.col_stride]) : 0.0f;
  }
}

template <class T_, int D_>
struct RowStatTile {
  using T = T_;
  static constexpr int D = D_;
};

namespace {

constexpr int kStatThreads = 128, kStatWarps = kStatThreads / 32;

// A maximum, and the sum of exp(x - maximum).
struct ExpSum {
  float max = minus_infinity(0.0f), sum = 0;
  SIMT_DEVICE void add(float other_max, float other_sum) {
    if (other_max == minus_infinity(0.0f)) return;
    const float top = fmaxf(max, other_max);
    sum = (max == minus_infinity(0.0f) ? 0.0f : sum * expf(max - top)) + other_sum * expf(other_max - top);
    max = top;
  }
};

// The last bit of lse is as large as lse makes it: beyond 1024 log 2 it shows beside the rounding of a weight, and 10 scores of -1e9 have the lse
// -1e9. Such a row is summed again by its warp. Only where there are features: without them a score is as inexact as its lse.
SIMT_DEVICE bool lse_is_coarse(float lse) { return fabsf(lse) > 1024 * kLn2 && lse - lse == 0; }

template <class T>
SIMT_DEVICE ExpSum sum_again(const AttentionParams& p, const BackwardHead& head, const RowEntry& visible, int64_t row, int lane) {
  const Matrix<const T> query = matrix_at<const T>(p.query, head.query), key = matrix_at<const T>(p.key, head.key);
  ExpSum all;
  RowBounds bounds;
  bounds.add(visible);
  for (int tile = head.list.template next_tile<kListTile>(bounds, row, 0); tile >= 0; tile = head.list.template next_tile<kListTile>(bounds, row, tile + 1)) {
    const uint64_t word = head.list.word_at(row, int64_t(tile) * kListTile);
    for (int in_tile = lane; in_tile < kListTile; in_tile += 32) {
      const int64_t j = int64_t(tile) * kListTile + in_tile;
      if (!visible.contains(int(j)) || !(word >> in_tile & 1)) continue;
      float product = 0;
      for (int64_t d = 0; d < p.head_dim; d++)
        product = fmaf(simt::to_float(query.row(row)[d * query.col_stride]), simt::to_float(key.row(j)[d * key.col_stride]), product);
      float derivative;
      all.add(head.features.score(product, row, j, &derivative), 1);
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float max = __shfl_xor_sync(0xffffffffu, all.max, step), sum = __shfl_xor_sync(0xffffffffu, all.sum, step);
    all.add(max, sum);
  }
  return all;
}

__global__ void __launch_bounds__(kStatThreads, 4)
    attention_bwd_heads_kernel(const __grid_constant__ AttentionBackwardParams params, const __grid_constant__ BackwardWork work) {
  const int index = int(blockIdx.x) * kStatThreads + int(threadIdx.x);
  const AttentionParams& p = params.forward;
  if (index < p.batch * p.num_heads) work.heads[index].fill(params, work.rows, work.slope_tiles, index / int(p.num_heads), index % int(p.num_heads));
}

// One block per kStatRows rows of a head.
template <class Tile>
__global__ void __launch_bounds__(kStatThreads, 4)
    attention_bwd_rows_kernel(const __grid_constant__ AttentionBackwardParams params, const __grid_constant__ BackwardWork work) {
  using T = typename Tile::T;
  constexpr int kLanes = Tile::D / 8, kRowsAtOnce = kStatThreads / kLanes, kWarpRows = kStatRows / kStatWarps;
  SIMT_SHARED(float, deltas, [kStatRows]);
  SIMT_SHARED(float, sink_terms, [kStatRows]);
  SIMT_SHARED(float, bias_terms, [kStatRows]);
  SIMT_SHARED(int, found, [kStatWarps]);
  const AttentionParams& p = params.forward;
  const BackwardRows& rows = work.rows;
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int blocks = int(rows.padded / kStatRows), block = int(blockIdx.x) % blocks;
  const int64_t index = int(blockIdx.x) / blocks, first = int64_t(block) * kStatRows;
  const int batch = int(index) / int(p.num_heads), head = int(index) % int(p.num_heads);
  const BackwardHead& at_head = work.heads[index];
  const int seqlen_q = at_head.seqlen_q;
  if (first >= (seqlen_q + kPaddedRows - 1) / kPaddedRows * kPaddedRows) return;

  // delta without grad_lse: kLanes lanes a row.
  const TileMatrix<const T> grad_out(matrix_at<const T>(params.grad_out, at_head.grad_out), seqlen_q, p.head_dim_v);
  const TileMatrix<const T> out(matrix_at<const T>(p.out, at_head.out), seqlen_q, p.head_dim_v);
  const TileMatrix<const T> residual(matrix_at<const T>(p.residual, at_head.residual), seqlen_q, p.head_dim_v);
  const TileMatrix<const T> query(matrix_at<const T>(p.query, at_head.query), seqlen_q, p.head_dim);
  bool bad = false;
#pragma unroll 2
  for (int in_block = thread / kLanes; in_block < kStatRows; in_block += kRowsAtOnce) {
    const int64_t row = first + in_block;
    const int chunk = thread % kLanes;
    float sum = 0;
    if (row < seqlen_q) {
      float grad[8], x[8];
      read_chunk(grad, grad_out, row, chunk);
      read_chunk(x, out, row, chunk);
#pragma unroll
      for (int j = 0; j < 8; j++) sum = fmaf(grad[j], x[j], sum), bad |= !is_finite(grad[j]);
      if (p.residual.data) {
        read_chunk(x, residual, row, chunk);
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(grad[j], x[j], sum);
      }
      if (rows.not_finite) {
        read_chunk(x, query, row, chunk);
#pragma unroll
        for (int j = 0; j < 8; j++) bad |= !is_finite(x[j]);
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (chunk == 0) deltas[in_block] = sum;
  }
  const bool any = __ballot_sync(0xffffffffu, bad) != 0;
  if (lane == 0) found[warp] = any;
  __syncthreads();
  if (thread == 0 && rows.not_finite) {
    int sum = 0;
    for (int i = 0; i < kStatWarps; i++) sum += found[i];
    rows.not_finite[at_head.stats / kStatRows + block] = sum != 0;
  }

  // One lane a row, and a warp for a row whose lse is coarse.
  const int in_block = warp * kWarpRows + lane % kWarpRows;
  const int64_t row = first + in_block, at = at_head.lse + row, to = at_head.stats + row;
  const bool inside = row < seqlen_q;
  const float lse = inside ? ((const float*)p.lse)[at] : minus_infinity(0.0f),
              grad_lse = inside && params.grad_lse ? ((const float*)params.grad_lse)[at] : 0.0f;
  const float sink = p.sinks ? ((const float*)p.sinks)[head] : minus_infinity(0.0f);
  const bool empty = lse == minus_infinity(0.0f);
  const float delta = empty ? 0.0f : deltas[in_block] - grad_lse;
  float lse2 = empty ? -minus_infinity(0.0f) : lse * kLog2E, shift = 0, log2_sink = sink * kLog2E - lse2;
  if (rows.shift) {
    const unsigned coarse = __ballot_sync(0xffffffffu, inside && lse_is_coarse(lse));
    for (int i = 0; i < kWarpRows; i++) {
      if (!(coarse >> i & 1)) continue;
      const int64_t again_row = first + warp * kWarpRows + i;
      ExpSum again = sum_again<T>(p, at_head, work.table.rows_of(batch)[again_row], again_row, lane);
      again.add(sink, 1);
      if (i == lane % kWarpRows) shift = again.max, lse2 = log2f(again.sum), log2_sink = (sink - shift) * kLog2E - lse2;
    }
  }
  // What the row adds to the gradient of its sink, and of a bias that is the same for all its keys: the sum of its score gradients, free of the
  // rounding that the sum over the keys would collect.
  const float sink_term = empty || sink == minus_infinity(0.0f) ? 0.0f : -exp2f(log2_sink) * delta;
  const float bias_term = empty ? 0.0f : grad_lse - sink_term + (delta - delta);
  if (lane < kWarpRows) {
    rows.lse[to] = lse2, rows.minus_delta[to] = -delta;
    if (rows.shift) rows.shift[to] = shift;
    sink_terms[in_block] = sink_term, bias_terms[in_block] = bias_term;
    if (work.bias_rows && params.grad_bias.row_stride != 0 && inside) work.bias_rows[at] = bias_term;
  }
  __syncthreads();
  if (thread != 0) return;
  float sinks_sum = 0, bias_sum = 0;
  for (int i = 0; i < kStatRows; i++) sinks_sum += sink_terms[i], bias_sum += bias_terms[i];
  if (work.sink_parts) work.sink_parts[at_head.stats / kStatRows + block] = sinks_sum;
  if (work.bias_rows && params.grad_bias.row_stride == 0) work.bias_rows[index * blocks + block] = bias_sum;
}

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
