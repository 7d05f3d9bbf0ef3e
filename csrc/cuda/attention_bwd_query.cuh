#pragma once
// Backward of the query side: one block per (batch item, query head, kRows queries), keys and values in tiles of kKeys through shared memory. The
// gradients of query and slopes, and that of a bias with an element for each pair.

#include "attention_bwd_tile.cuh"

namespace tiled_attention {
namespace cuda {

// D is head_dim and head_dim_v, rounded up. kFeatures: needs_features().
template <class T_, int D_, bool kFeatures_>
struct QueryGradTile {
  using T = T_;
  static constexpr int D = D_, kWarps = 4, kThreads = 32 * kWarps, kKeys = !kFeatures_ || D == 128 ? 32 : D == 64 ? 64 : 16;
  static constexpr bool kFeatures = kFeatures_;
  // Two sets of 16 rows a warp share every fragment of keys and values, where their accumulators fit in registers.
  static constexpr int kSets = D <= 128 && !kFeatures ? 2 : 1;
  static constexpr int kRows = 16 * kSets * kWarps;
  // Keys are in use to the end of a tile: a second stage where two blocks still share a multiprocessor of 164 KB.
  static constexpr int kKeyStages = D == 64 ? 2 : 1;
  // Blocks that the registers must leave room for; 0 asks for nothing. Two allow all 255 of a thread, but asking makes ptxas spill on sm_120.
  static constexpr int kBlocks = D == 128 && !kFeatures ? 0 : 2;
  // What is needed once per tile of keys lies in shared memory: the accumulators leave few registers.
  struct Block {
    Matrix<const T> key, value;
    RowBounds bounds;                              // of all rows
    int full_begin[kWarps], full_end[kWarps];      // the keys that all rows of a warp see
    const RowEntry* rows;
    const uint8_t* not_finite;                     // RowTable::flags_of()
    int seqlen_q, seqlen_kv;
    int next;                                      // tile of keys that follows, with features
  };
  static constexpr int kSharedBytes = (2 * kRows + (kKeyStages + 1) * kKeys) * D * int(sizeof(T)) + (int(sizeof(Block)) + 15) / 16 * 16;
};

struct QueryGrid {
  Divisor tiles, heads;  // query tiles of a head, num_heads
  int group;             // query heads of a KV head
  QueryGrid(const AttentionParams& p, int rows) : tiles((p.seqlen_q + rows - 1) / rows), heads(p.num_heads), group(int(p.num_heads / p.num_heads_kv)) {}
};

// Which queries a block works for. Late ones see most keys where the mask is causal: they start first.
struct QueryPlace {
  int item, batch, head, tile, first_query;
  SIMT_DEVICE QueryPlace(const QueryGrid& grid, int block, int rows) {
    item = grid.tiles.divide(block), tile = grid.tiles.value - 1 - grid.tiles.rest(block), first_query = tile * rows;
    batch = grid.heads.divide(item), head = grid.heads.rest(item);
  }
};

namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_bwd_query_kernel(const __grid_constant__ AttentionBackwardParams params, const __grid_constant__ BackwardWork work,
                               const __grid_constant__ QueryGrid grid) {
  using T = typename Tile::T;
  constexpr int D = Tile::D, kSets = Tile::kSets, kKeys = Tile::kKeys, kRows = Tile::kRows, kThreads = Tile::kThreads, kTiles = kKeys / 8;
  constexpr int kStages = Tile::kKeyStages, kStageBytes = kKeys * D * int(sizeof(T));
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  T* const queries = carve.template take<T>(kRows * D);
  T* const grad_outs = carve.template take<T>(kRows * D);
  T* const values = carve.template take<T>(kKeys * D);
  T* const keys = carve.template take<T>(kStages * kKeys * D);
  typename Tile::Block* const block = carve.template take<typename Tile::Block>(1);

  const AttentionParams& p = params.forward;
  const RowTable& table = work.table;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4, warp_row = warp * kSets * 16;
  // Worked out again where it is needed: the accumulators leave few registers.
  const auto place = [&] { return QueryPlace(grid, int(block_index()), kRows); };
  const bool wants_query = params.grad_query.data != nullptr;
  if (place().first_query >= work.heads[place().item].seqlen_q) return;
  if (lane == 0) {
    const QueryPlace at = place();
    const RowBounds bounds = table.bounds_of(at.batch, at.first_query + warp_row, kSets * 16);
    block->full_begin[warp] = bounds.full_begin;
    block->full_end[warp] = at.first_query + warp_row + kSets * 16 > work.heads[at.item].seqlen_q ? 0 : bounds.full_end;
  }
  if (threadIdx.x == 0) {
    const QueryPlace at = place();
    const BackwardHead& head = work.heads[at.item];
    const int kv_head = at.head / grid.group;
    block->key = matrix_at<const T>(p.key, head.key), block->value = matrix_at<const T>(p.value, head.value);
    block->seqlen_q = head.seqlen_q, block->seqlen_kv = head.seqlen_kv;
    block->bounds = table.bounds_of(at.batch, at.first_query, kRows);
    block->rows = table.rows_of(at.batch), block->not_finite = table.flags_of(at.batch * p.num_heads_kv + kv_head);
  }
  __syncthreads();
  const auto load_keys = [&](T* to, int tile) {
    load_tile<D, kKeys, kThreads>(to, TileMatrix<const T>(block->key, block->seqlen_kv, p.head_dim), int64_t(tile) * kKeys);
  };
  const auto load_values = [&](int tile) {
    load_tile<D, kKeys, kThreads>(values, TileMatrix<const T>(block->value, block->seqlen_kv, p.head_dim_v), int64_t(tile) * kKeys);
  };
  const auto load_grad_outs = [&] {
    const QueryPlace at = place();
    const TileMatrix<const T> grad_out(matrix_at<const T>(params.grad_out, work.heads[at.item].grad_out), block->seqlen_q, p.head_dim_v);
    load_tile<D, kRows, kThreads>(grad_outs, grad_out, at.first_query);
  };
  const QueryPlace first = place();
  float lse[kSets][2], minus_delta[kSets][2], slope_sum = 0;
#pragma unroll
  for (int s = 0; s < kSets; s++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t at = work.heads[first.item].stats + first.first_query + warp_row + s * 16 + g + 8 * r;
      lse[s][r] = work.rows.lse[at], minus_delta[s][r] = work.rows.minus_delta[at];
    }
  const float unit = float(p.scale) * kLog2E;
  PairTile<kSets, D / 8> grad_query;
  clear<kSets, D / 8>(grad_query);

  const Fragments<D> query_rows = Fragments<D>::a(queries, warp_row, lane), grad_out_rows = Fragments<D>::a(grad_outs, warp_row, lane);
  const Fragments<D> value_columns = Fragments<D>::b_transposed(values, lane);
  Fragments<D> key_columns = Fragments<D>::b_transposed(keys, lane), key_rows = Fragments<D>::b(keys, lane);

  // Of keys, at or behind `from`.
  const auto next_tile = [&](int from) {
    if constexpr (Tile::kFeatures) {
      const QueryPlace at = place();
      return work.heads[at.item].list.template next_tile<kKeys>(block->bounds, at.first_query, from);
    } else {
      return block->bounds.next_tile(from, kKeys);
    }
  };
  int tile = next_tile(0), stage = 0;
  load_tile<D, kRows, kThreads>(queries, TileMatrix<const T>(matrix_at<const T>(p.query, work.heads[first.item].query), block->seqlen_q, p.head_dim),
                                first.first_query);
  load_grad_outs();
  if (tile >= 0) {
    load_keys(keys, tile);
    load_values(tile);
  }
  simt::cp_async_commit();

  while (tile >= 0) {
    const int first_key = tile * kKeys, next = next_tile(tile + 1);
    // Keys and values are there, and all warps have left the keys of the tile before.
    simt::cp_async_wait<0>();
    __syncthreads();
    if (Tile::kFeatures && threadIdx.x == 0) block->next = next;
    const auto next_again = [&] { return Tile::kFeatures ? block->next : next; };  // behind the barrier that follows
    if (kStages == 2 && next >= 0) load_keys(keys + (stage ^ 1) * kKeys * D, next);
    simt::cp_async_commit();

    bool edge = !(block->full_begin[warp] <= first_key && first_key + kKeys <= block->full_end[warp]);
    int shown = kListFull;
    if constexpr (Tile::kFeatures) {
      const QueryPlace at = place();
      shown = work.heads[at.item].list.state(at.first_query, first_key), edge = edge || shown != kListFull;
    }
    PairMask<kSets> visible = {};
    if (edge) {
      const int warp_query = place().first_query + warp_row;
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int query = warp_query + s * 16 + g + 8 * r;
          RowEntry row = {0, 0, 0, 0};
          if (query < block->seqlen_q) row = block->rows[query];
#pragma unroll
          for (int n = 0; n < kTiles; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) visible[s] |= uint32_t(row.contains(first_key + n * 8 + 2 * t + c)) << (4 * n + 2 * r + c);
          if constexpr (Tile::kFeatures) {
            if (shown == kListFull) continue;
            const uint64_t word = work.heads[place().item].list.word(shown, query) >> (first_key % kListTile + 2 * t);
#pragma unroll
            for (int n = 0; n < kTiles; n++)
#pragma unroll
              for (int c = 0; c < 2; c++) {
                if (!(word >> (n * 8 + c) & 1)) visible[s] &= ~(1u << (4 * n + 2 * r + c));
              }
          }
        }
    }

    // Scores, and gradients of the weights less delta.
    PairTile<kSets, kTiles> score, grad;
    clear<kSets, kTiles>(score);
#pragma unroll
    for (int s = 0; s < kSets; s++)
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) grad[s][n][i] = Tile::kFeatures ? 0.0f : minus_delta[s][i >> 1];
    multiply_transposed<T, D, kSets, kTiles>(score, query_rows, key_columns);
    multiply_transposed<T, D, kSets, kTiles>(grad, grad_out_rows, value_columns);

    // Gradients of the scores, 0 where hidden.
    if constexpr (Tile::kFeatures) {
      const QueryPlace at = place();
      const int warp_query = at.first_query + warp_row;
      const PairFeatures& features = work.heads[at.item].features;
      const Matrix<float> grad_bias = matrix_at<float>(params.grad_bias, work.heads[at.item].grad_bias);
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = warp_query + s * 16 + g + 8 * r;
          const int64_t stat = work.heads[at.item].stats + row;
          const float row_lse = work.rows.lse[stat], row_minus_delta = work.rows.minus_delta[stat], shift = work.rows.shift[stat];
#pragma unroll
          for (int n = 0; n < kTiles; n++) {
            const int column = first_key + n * 8 + 2 * t;
            bool kept[2] = {true, true};
            if (features.dropout.active) features.dropout.keeps_two(row, column, kept[0], kept[1]);
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const int i = 2 * r + c;
              if (edge && !(visible[s] >> (4 * n + i) & 1)) {
                grad[s][n][i] = 0;
                continue;
              }
              float to_product;
              features(score[s][n][i], grad[s][n][i], to_product, row, column + c, row_lse, shift, row_minus_delta, kept[c]);
              if (work.slope_parts) slope_sum -= grad[s][n][i] * features.scores.distance(row, column + c);
              if (work.full_bias) grad_bias.row(row)[(column + c) * grad_bias.col_stride] = grad[s][n][i];
              // A hidden score may be NaN before it is hidden, its gradient is 0 and stays it.
              if (grad[s][n][i] != 0) grad[s][n][i] *= to_product;
            }
          }
        }
    } else {
#pragma unroll
      for (int s = 0; s < kSets; s++)
#pragma unroll
        for (int n = 0; n < kTiles; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) grad[s][n][i] *= simt::ex2(fmaf(score[s][n][i], unit, -lse[s][i >> 1]));
      if (edge) hide<kSets, kTiles>(grad, visible);
    }
    PackedTile<kSets, kTiles> grads;
    pack<T, kSets, kTiles>(grads, grad);

    // All warps have left the values.
    __syncthreads();
    if (next_again() >= 0) load_values(next_again());
    simt::cp_async_commit();

    if (wants_query) {
      T* const stage_keys = keys + stage * kKeys * D;
      const uint8_t* const flags = block->not_finite;
      if (flags && flags[first_key / kFlagKeys]) {
        // The weights lie where grad_out does, which is loaded again.
        const QueryPlace at = place();
        put_weights<T, kSets, kTiles>(grad_outs, grads, warp_row, lane, [&](int row, int column) {
          return sees_pair<Tile::kFeatures>(block->seqlen_q, block->rows, work.heads[at.item], at.first_query + row, first_key + column);
        });
        add_not_finite_rows<T, D, kSets, kKeys, kThreads>(grad_query, grad_outs, stage_keys, warp_row, lane);
        load_grad_outs();
        simt::cp_async_commit();
      }
      multiply<T, D, kSets, kTiles>(grad_query, grads, key_rows);
    }
    if (kStages == 1) {
      __syncthreads();
      if (next_again() >= 0) load_keys(keys, next_again());
      simt::cp_async_commit();
    } else {
      stage ^= 1;
      key_columns.lane_address += stage ? kStageBytes : -kStageBytes, key_rows.lane_address += stage ? kStageBytes : -kStageBytes;
    }
    tile = next_again();
  }
  simt::cp_async_wait<0>();
  __syncthreads();

  const QueryPlace last = place();
  if (wants_query) {
    put_rounded<T, D, kSets>(queries, grad_query, float(p.scale), warp_row, lane);
    __syncthreads();
    store_tile<D, kRows, kThreads>(queries, TileMatrix<T>(matrix_at<T>(params.grad_query, work.heads[last.item].grad_query), block->seqlen_q, p.head_dim),
                                   last.first_query);
  }
  if constexpr (Tile::kFeatures) {
    if (!work.slope_parts) return;
    SIMT_SHARED(double, parts, [Tile::kWarps]);
    const double sum = warp_sum(double(slope_sum));
    if (lane == 0) parts[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) work.slope_parts[work.heads[last.item].slope_parts + last.tile] = float(parts[0] + parts[1] + parts[2] + parts[3]);
  }
}

}  // namespace

template <class T, int D, bool kFeatures>
void launch_query_grad(const AttentionBackwardParams& params, const BackwardWork& work, void* stream) {
  using Tile = QueryGradTile<T, D, kFeatures>;
  static_assert(!kFeatures || Tile::kRows == kSlopeRows, "slope_parts");
  const AttentionParams& p = params.forward;
  const QueryGrid grid(p, Tile::kRows);
  SIMT_LAUNCH(attention_bwd_query_kernel<Tile>, blocks_of(p.seqlen_q, Tile::kRows) * unsigned(p.batch * p.num_heads), Tile::kThreads, Tile::kSharedBytes,
              stream, params, work, grid);
}

}  // namespace cuda
}  // namespace tiled_attention
