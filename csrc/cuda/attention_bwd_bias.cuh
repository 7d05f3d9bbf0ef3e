#pragma once
// The gradient of a bias that is broadcast over batch items, heads or rows: one block per tile of the bias, and per split of what is summed in it. The
// scores of all summed pairs are computed again, so that every element is one sum in registers and nothing is added in memory. By distance: one block
// per head and diagonal of tiles, whose tiles have the same distances at the same places.

#include "attention_bwd_tile.cuh"

namespace tiled_attention {
namespace cuda {

template <class T_, int D_>
struct BiasGradTile {
  using T = T_;
  static constexpr int D = D_, kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps, kKeys = bias_keys(D);
  static constexpr int kSharedBytes = 2 * (kRows + kKeys) * D * int(sizeof(T));
  // The tile of sums by distance: in the place of the queries where it fits.
  static constexpr int kStride = kKeys + 1, kSumBytes = kRows * kStride * int(sizeof(float));
  static constexpr bool kSumsOverQueries = kSumBytes <= kRows * D * int(sizeof(T));
};

namespace {

template <class Tile, bool kByDistance>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_bwd_bias_kernel(const __grid_constant__ AttentionBackwardParams params, const __grid_constant__ BackwardWork work) {
  using T = typename Tile::T;
  constexpr int D = Tile::D, kKeys = Tile::kKeys, kRows = Tile::kRows, kThreads = Tile::kThreads, kTiles = kKeys / 8;
  static_assert(kRows == kBiasRows, "BiasGrid");
  SIMT_DYNAMIC_SHARED(shared);
  SIMT_SHARED(float, column_sums, [Tile::kWarps][kKeys]);
  simt::Carver carve{shared};
  T* const queries = carve.template take<T>(kRows * D);
  T* const grad_outs = carve.template take<T>(kRows * D);
  T* const keys = carve.template take<T>(kKeys * D);
  T* const values = carve.template take<T>(kKeys * D);
  float* const tile_sums = !kByDistance             ? nullptr
                           : Tile::kSumsOverQueries ? reinterpret_cast<float*>(queries)
                                                    : carve.template take<float>(kRows * Tile::kStride);

  const AttentionParams& p = params.forward;
  const RowTable& table = work.table;
  const bool has_rows = params.grad_bias.row_stride != 0;
  const BiasGrid grid(p, params.grad_bias, kKeys);
  const DistanceGrid distances(p, kRows, kKeys);
  const int64_t query_tiles = (p.seqlen_q + kRows - 1) / kRows;
  int64_t index = blockIdx.x, first_step, last_step;
  int column_of_tile = 0;  // its first key; by distance that of the first tile of queries, and may be negative
  if (kByDistance) {
    column_of_tile = int(index % distances.diagonals - distances.first) * kKeys;
    index /= distances.diagonals;
    first_step = max_of(int64_t(0), (-int64_t(column_of_tile) + kRows - 1) / kRows);
    last_step = query_tiles;
  } else {
    column_of_tile = int(index % grid.key_tiles) * kKeys;
    index /= grid.key_tiles;
  }
  const int64_t row_tile = kByDistance ? 0 : index % grid.row_tiles;
  if (!kByDistance) index /= grid.row_tiles;
  const int64_t slice = kByDistance ? index : index % grid.slices, split = kByDistance ? 0 : index / grid.slices;
  if (!kByDistance) first_step = split * grid.steps / grid.splits, last_step = (split + 1) * grid.steps / grid.splits;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4;

  PairTile<1, kTiles> sum;
  clear<1, kTiles>(sum);
  const Fragments<D> query_rows = Fragments<D>::a(queries, warp * 16, lane), grad_out_rows = Fragments<D>::a(grad_outs, warp * 16, lane);
  const Fragments<D> key_columns = Fragments<D>::b_transposed(keys, lane), value_columns = Fragments<D>::b_transposed(values, lane);

  int64_t loaded_key = -1, loaded_value = -1;  // where the keys and values in shared memory begin
  for (int64_t step = first_step; step < last_step; step++) {
    const int64_t first_query = (kByDistance ? step : has_rows ? row_tile : step % query_tiles) * kRows;
    int64_t batch, head;
    if (kByDistance) batch = slice / p.num_heads, head = slice % p.num_heads;
    else BiasSlices::find(p, params.grad_bias, slice, has_rows ? step : step / query_tiles, &batch, &head);
    const int64_t first_key = kByDistance ? column_of_tile + first_query : column_of_tile, last_key = min_of(first_key + kKeys, p.seqlen_kv);
    if (kByDistance && first_key >= p.seqlen_kv) break;
    if (!table.bounds_of(batch, first_query, kRows).sees(first_key, last_key)) continue;
    const int64_t item = batch * p.num_heads + head;
    const BackwardHead& at_head = work.heads[item];
    static_assert(kRows == kListTile && kListTile % kKeys == 0, "inside a tile of a list");
    const int shown = at_head.list.state(first_query, first_key);
    if (shown == kListHidden) continue;
    __syncthreads();
    load_tile<D, kRows, kThreads>(queries, {matrix_at<const T>(p.query, at_head.query), p.seqlen_q, p.head_dim}, first_query);
    load_tile<D, kRows, kThreads>(grad_outs, {matrix_at<const T>(params.grad_out, at_head.grad_out), p.seqlen_q, p.head_dim_v}, first_query);
    if (kByDistance || loaded_key < 0 || at_head.key != loaded_key || at_head.value != loaded_value) {
      load_tile<D, kKeys, kThreads>(keys, {matrix_at<const T>(p.key, at_head.key), p.seqlen_kv, p.head_dim}, first_key);
      load_tile<D, kKeys, kThreads>(values, {matrix_at<const T>(p.value, at_head.value), p.seqlen_kv, p.head_dim_v}, first_key);
      loaded_key = at_head.key, loaded_value = at_head.value;
    }
    simt::cp_async_commit();
    simt::cp_async_wait<0>();
    __syncthreads();

    PairTile<1, kTiles> score, grad;
    clear<1, kTiles>(score);
    clear<1, kTiles>(grad);
    multiply_transposed<T, D, 1, kTiles>(score, query_rows, key_columns);
    multiply_transposed<T, D, 1, kTiles>(grad, grad_out_rows, value_columns);
    const PairFeatures features = at_head.features;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t row = first_query + warp * 16 + g + 8 * r, at = item * work.rows.padded + row;
      const bool inside = row < p.seqlen_q;
      const RowEntry visible = table.rows_of(batch)[inside ? row : p.seqlen_q - 1];
      const uint64_t word = at_head.list.word(shown, row) >> (first_key % kListTile + 2 * t);
      const float lse = work.rows.lse[at], minus_delta = work.rows.minus_delta[at], shift = work.rows.shift[at];
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const int column = int(first_key) + n * 8 + 2 * t;
        bool kept[2] = {true, true};
        if (features.dropout.active) features.dropout.keeps_two(row, column, kept[0], kept[1]);
#pragma unroll
        for (int c = 0; c < 2; c++) {
          if (!inside || !visible.contains(column + c) || !(word >> (n * 8 + c) & 1)) continue;
          float to_product;
          features(score[0][n][2 * r + c], grad[0][n][2 * r + c], to_product, row, column + c, lse, shift, minus_delta, kept[c]);
          sum[0][n][2 * r + c] += grad[0][n][2 * r + c];
        }
      }
    }
  }

  if (kByDistance) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) tile_sums[(warp * 16 + g + 8 * (i >> 1)) * Tile::kStride + n * 8 + 2 * t + (i & 1)] = sum[0][n][i];
    __syncthreads();
    store_distances(tile_sums, kRows, kKeys, Tile::kStride, kThreads, work.bias_parts + int64_t(blockIdx.x) * distances.width);
    return;
  }
  int64_t batch, head;
  BiasSlices::find(p, params.grad_bias, slice, 0, &batch, &head);
  Matrix<float> to = matrix_at<float>(params.grad_bias, work.heads[batch * p.num_heads + head].grad_bias);
  if (work.bias_parts) to.data = work.bias_parts + split * work.bias_elements + (to.data - (float*)params.grad_bias.data);
  if (has_rows) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t row = row_tile * kRows + warp * 16 + g + 8 * (i >> 1), column = column_of_tile + n * 8 + 2 * t + (i & 1);
        if (row < p.seqlen_q && column < p.seqlen_kv) to.row(row)[column * to.col_stride] = sum[0][n][i];
      }
    return;
  }
  // Over the rows: those of a lane, of the lanes with the same columns, of the warps.
#pragma unroll
  for (int n = 0; n < kTiles; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float column = sum[0][n][c] + sum[0][n][2 + c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) column += __shfl_xor_sync(0xffffffffu, column, step);
      if (g == 0) column_sums[warp][n * 8 + 2 * t + c] = column;
    }
  __syncthreads();
  const int column = int(threadIdx.x);
  if (column < kKeys && column_of_tile + column < p.seqlen_kv)
    to.data[(column_of_tile + column) * to.col_stride] = (column_sums[0][column] + column_sums[1][column]) + (column_sums[2][column] + column_sums[3][column]);
}

}  // namespace

template <class T, int D>
void launch_bias_grad(const AttentionBackwardParams& params, const BackwardWork& work, void* stream) {
  using Tile = BiasGradTile<T, D>;
  const BiasGrid grid(params.forward, params.grad_bias, Tile::kKeys);
  constexpr auto kernel = &attention_bwd_bias_kernel<Tile, false>;
  SIMT_LAUNCH(kernel, unsigned(grid.key_tiles * grid.row_tiles * grid.slices * grid.splits), Tile::kThreads, Tile::kSharedBytes, stream, params, work);
}

template <class T, int D>
void launch_distance_grad(const AttentionBackwardParams& params, const BackwardWork& work, void* stream) {
  using Tile = BiasGradTile<T, D>;
  const AttentionParams& p = params.forward;
  const DistanceGrid grid(p, Tile::kRows, Tile::kKeys);
  constexpr auto kernel = &attention_bwd_bias_kernel<Tile, true>;
  constexpr int bytes = Tile::kSharedBytes + (Tile::kSumsOverQueries ? 0 : Tile::kSumBytes);
  SIMT_LAUNCH(kernel, unsigned(p.batch * p.num_heads * grid.diagonals), Tile::kThreads, bytes, stream, params, work);
  sum_distances<float>(p, params.grad_bias, grid, work.bias_parts, stream);
}

}  // namespace cuda
}  // namespace tiled_attention
