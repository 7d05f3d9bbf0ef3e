#pragma once
// Backward of the key side: one block per (batch item, KV head, kKeys keys), the query heads of the group and their queries in tiles of kQueries
// through shared memory. Everything is transposed, rows are keys, so that weights and gradients of scores are A fragments of the products
// that sum over queries, and leave the registers never. The sums of all heads of the group stay in registers and are rounded once.

#include "attention_bwd_tile.cuh"

namespace tiled_attention {
namespace cuda {

// kKey, kValue: which of the gradients a block adds up. Both where their accumulators fit in registers, otherwise in two passes.
template <class T_, int D_, bool kFeatures_, bool kKey_, bool kValue_>
struct KeyGradTile {
  using T = T_;
  static constexpr int D = D_, kWarps = 4, kThreads = 32 * kWarps;
  static constexpr bool kFeatures = kFeatures_, kKey = kKey_, kValue = kValue_;
  static constexpr int kSets = D == 64 && !kFeatures ? 2 : 1, kKeys = 16 * kSets * kWarps;
  // 64 queries where one set of rows reads all fragments of queries by itself and there are registers for its scores.
  static constexpr int kQueries = D == 128 && !kFeatures ? 64 : 32;
  static constexpr int kQueryStages = D <= 128 ? 2 : 1;
  // Of each query: lse, -delta, with features the shift of the scores.
  static constexpr int kStats = kFeatures ? 3 : 2;
  // Blocks on a multiprocessor of 228 KB: with features at D 128 shared memory leaves room for a third, if registers do.
  static constexpr int kBlocks = D == 128 && kFeatures && kKey ? 3 : 1;
  static constexpr int kValueElements = kKey ? kKeys * D : 0;
  static constexpr int kSharedBytes =
      (kKeys * D + kValueElements + (kQueryStages + 1) * kQueries * D) * int(sizeof(T)) + kQueryStages * kStats * kQueries * int(sizeof(float));
};

// The blocks of a call, and the query tiles of a head.
struct KeyGrid {
  Divisor items, heads_kv, tiles;  // batch * num_heads_kv
  int group;                       // query heads of a KV head
  KeyGrid(const AttentionParams& p, int queries)
      : items(p.batch * p.num_heads_kv), heads_kv(p.num_heads_kv), tiles((p.seqlen_q + queries - 1) / queries), group(int(p.num_heads / p.num_heads_kv)) {}
};

// Which keys a block works for. Early ones are seen by most queries where the mask is causal: they start first.
struct KeyPlace {
  int batch, first_key, first_head;  // first_head: of the group, among those of all batch items
  SIMT_DEVICE KeyPlace(const KeyGrid& grid, int block, int keys) {
    const int item = grid.items.rest(block);
    batch = grid.heads_kv.divide(item), first_key = grid.items.divide(block) * keys, first_head = item * grid.group;
  }
};

// The query tiles of the heads of a group that see some of the keys [begin, end), head by head: head * tiles + tile, and -1 behind the last.
// kLists: heads may have lists.
template <int kQueries, bool kLists>
struct QuerySteps {
  const RowTable& table;
  const ListingQueries& listing;
  const KeyGrid& grid;
  SIMT_DEVICE int tiles() const { return grid.tiles.value; }
  SIMT_DEVICE int head(int step) const { return grid.tiles.divide(step); }
  SIMT_DEVICE int first_query(int step) const { return grid.tiles.rest(step) * kQueries; }

  SIMT_DEVICE int after(int step, int batch, int first_head, int begin, int end, int lane) const {
    int in_group = step < 0 ? 0 : head(step), tile = find(step < 0 ? 0 : grid.tiles.rest(step) + 1, batch, first_head + in_group, begin, end, lane);
    if (kLists && listing.is_given()) {
      while (tile < 0 && ++in_group < grid.group) tile = find(0, batch, first_head + in_group, begin, end, lane);
      return tile < 0 ? -1 : in_group * tiles() + tile;
    }
    if (tile >= 0) return in_group * tiles() + tile;
    // Without lists all heads have the same rows: where the first finds none there are none.
    if (step < 0 || in_group + 1 == grid.group) return -1;
    return (in_group + 1) * tiles() + find(0, batch, first_head, begin, end, lane);
  }

 private:
  // A lane looks at a tile. All warps come to the same result.
  SIMT_DEVICE int find(int from, int batch, int head, int begin, int end, int lane) const {
#pragma unroll 1
    for (; from < tiles(); from += 32) {
      const int64_t query = int64_t(from + lane) * kQueries;
      const bool listed = from + lane < tiles() && (!kLists || listing.sees(batch, head, query, begin));
      unsigned sees = __ballot_sync(0xffffffffu, listed && table.bounds_of(batch, query, kQueries).sees(begin, end));
      if (sees == 0) continue;
      for (; !(sees & 1); sees >>= 1) from++;
      return from;
    }
    return -1;
  }
};

namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_bwd_key_kernel(const __grid_constant__ AttentionBackwardParams params, const __grid_constant__ BackwardWork work,
                             const __grid_constant__ KeyGrid grid) {
  using T = typename Tile::T;
  constexpr int D = Tile::D, kSets = Tile::kSets, kKeys = Tile::kKeys, kQueries = Tile::kQueries, kThreads = Tile::kThreads, kTiles = kQueries / 8;
  constexpr int kStages = Tile::kQueryStages, kStageBytes = kQueries * D * int(sizeof(T)), kStats = Tile::kStats;
  constexpr bool kKey = Tile::kKey, kValue = Tile::kValue;
  SIMT_DYNAMIC_SHARED(shared);
  simt::Carver carve{shared};
  T* const keys = carve.template take<T>(kKeys * D);
  T* const values = kKey ? carve.template take<T>(kKeys * D) : keys;
  T* const grad_outs = carve.template take<T>(kQueries * D);
  T* const queries = carve.template take<T>(kStages * kQueries * D);
  float* const stats = carve.template take<float>(kStages * kStats * kQueries);

  const AttentionParams& p = params.forward;
  const RowTable& table = work.table;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, g = lane / 4, t = lane % 4, warp_row = warp * kSets * 16;
  // Worked out again where it is needed: the accumulators leave few registers.
  const auto place = [&] { return KeyPlace(grid, int(block_index()), kKeys); };
  const QuerySteps<kQueries, Tile::kFeatures> steps{table, work.listing, grid};
  const bool wants_key = kKey && params.grad_key.data, wants_value = kValue && params.grad_value.data;
  SIMT_SHARED(int, lengths, [2]);  // of the item: seqlen_q and seqlen_kv
  {
    const KeyPlace at = place();
    const BackwardHead& head = work.heads[at.first_head];
    if (at.first_key >= head.seqlen_kv) return;
    if (threadIdx.x == 0) lengths[0] = head.seqlen_q, lengths[1] = head.seqlen_kv;
  }
  __syncthreads();

  const auto load_keys = [&] {
    const KeyPlace at = place();
    load_tile<D, kKeys, kThreads>(keys, TileMatrix<const T>(matrix_at<const T>(p.key, work.heads[at.first_head].key), lengths[1], p.head_dim), at.first_key);
  };
  const auto load_values = [&] {
    const KeyPlace at = place();
    load_tile<D, kKeys, kThreads>(values, TileMatrix<const T>(matrix_at<const T>(p.value, work.heads[at.first_head].value), lengths[1], p.head_dim_v),
                                  at.first_key);
  };
  const auto next_step = [&](int step) {
    const KeyPlace at = place();
    return steps.after(step, at.batch, at.first_head % int(p.num_heads), at.first_key, min_of(at.first_key + kKeys, lengths[1]), lane);
  };
  const auto load_queries = [&](int step, int stage) {
    const KeyPlace at = place();
    const int head = at.first_head + steps.head(step), first_query = steps.first_query(step);
    load_tile<D, kQueries, kThreads>(queries + stage * kQueries * D,
                                     TileMatrix<const T>(matrix_at<const T>(p.query, work.heads[head].query), lengths[0], p.head_dim), first_query);
    constexpr int kVectors = kQueries / 4;
    const int thread = thread_index(), vector = thread % kVectors, stat = thread / kVectors;
    if (stat < kStats) {
      const float* const from = stat == 0 ? work.rows.lse : stat == 1 ? work.rows.minus_delta : work.rows.shift;
      const int64_t row = work.heads[head].stats + first_query + vector * 4;
      simt::cp_async16(stats + (stage * kStats + stat) * kQueries + vector * 4, from + row, true);
    }
  };
  const auto load_grad_outs = [&](int step) {
    const KeyPlace at = place();
    load_tile<D, kQueries, kThreads>(
        grad_outs, TileMatrix<const T>(matrix_at<const T>(params.grad_out, work.heads[at.first_head + steps.head(step)].grad_out), lengths[0], p.head_dim_v),
        steps.first_query(step));
  };

  const float unit = float(p.scale) * kLog2E;
  PairTile<kSets, D / 8> grad_key, grad_value;
  clear<kSets, D / 8>(grad_key);
  clear<kSets, D / 8>(grad_value);
  const Fragments<D> key_rows = Fragments<D>::a(keys, warp_row, lane), value_rows = Fragments<D>::a(values, warp_row, lane);
  const Fragments<D> grad_out_columns = Fragments<D>::b_transposed(grad_outs, lane), grad_out_rows = Fragments<D>::b(grad_outs, lane);
  Fragments<D> query_columns = Fragments<D>::b_transposed(queries, lane), query_rows = Fragments<D>::b(queries, lane);

  int next = next_step(-1), stage = 0;
  load_keys();
  if (kKey) load_values();
  if (next >= 0) {
    load_queries(next, 0);
    load_grad_outs(next);
  }
  simt::cp_async_commit();

  while (next >= 0) {
    const int step = next;
    next = next_step(step);
    // The tiles are there, and all warps have left the queries of the tile before.
    simt::cp_async_wait<0>();
    __syncthreads();
    if (kStages == 2 && next >= 0) load_queries(next, stage ^ 1);
    simt::cp_async_commit();

    PairMask<kSets> visible = {};
    bool edge, bad = false;
    {
      const KeyPlace at = place();
      const int first_query = steps.first_query(step), warp_key = at.first_key + warp_row;
      const bool ragged = first_query + kQueries > lengths[0];
      const RowBounds bounds = table.bounds_of(at.batch, first_query, kQueries);
      edge = ragged || !bounds.covers(warp_key, warp_key + kSets * 16);
      int shown = kListFull;
      if constexpr (Tile::kFeatures) {
        static_assert(kListTile % kQueries == 0 && kKeys == kListTile, "inside a tile of the list");
        shown = work.heads[at.first_head + steps.head(step)].list.state(first_query, at.first_key), edge = edge || shown != kListFull;
      }
      if (edge) {
        const RowEntry* const rows = table.rows_of(at.batch);
#pragma unroll
        for (int n = 0; n < kTiles; n++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int query = first_query + n * 8 + 2 * t + c;
            RowEntry row = {0, 0, 0, 0};
            if (query < lengths[0]) row = rows[query];
#pragma unroll
            for (int s = 0; s < kSets; s++)
#pragma unroll
              for (int r = 0; r < 2; r++) visible[s] |= uint32_t(row.contains(warp_key + s * 16 + g + 8 * r)) << (4 * n + 2 * r + c);
            if constexpr (Tile::kFeatures) {
              if (shown == kListFull) continue;
              const uint64_t word = work.heads[at.first_head + steps.head(step)].list.word(shown, query) >> (warp_row + g);
#pragma unroll
              for (int r = 0; r < 2; r++) {
                if (!(word >> (8 * r) & 1)) visible[0] &= ~(1u << (4 * n + 2 * r + c));
              }
            }
          }
      }
      // Query and grad_out have inf or NaN, and keys of the block that do not see them.
      if (work.rows.not_finite && (Tile::kFeatures || ragged || !bounds.covers(at.first_key, at.first_key + kKeys))) {
        const int64_t head = at.first_head + steps.head(step);
        const uint8_t* const flags = work.rows.not_finite + (work.heads[head].stats + first_query) / kStatRows;
        bad = flags[0] != 0 || flags[kQueries / kStatRows - 1] != 0;
      }
    }

    // Scores, and gradients of the weights less delta.
    const float* const stats_of_tile = stats + stage * kStats * kQueries;
    PairTile<kSets, kTiles> score, grad;
    clear<kSets, kTiles>(score);
    multiply_transposed<T, D, kSets, kTiles>(score, key_rows, query_columns);
    if (wants_key) {
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const float2 minus_delta = *(const float2*)(stats_of_tile + kQueries + n * 8 + 2 * t);
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int i = 0; i < 4; i++) grad[s][n][i] = Tile::kFeatures ? 0.0f : i & 1 ? minus_delta.y : minus_delta.x;
      }
      multiply_transposed<T, D, kSets, kTiles>(grad, value_rows, grad_out_columns);
    } else {
      clear<kSets, kTiles>(grad);
    }

    // Weights and gradients of the scores, 0 where hidden.
    if constexpr (Tile::kFeatures) {
      const KeyPlace at = place();
      const int first_query = steps.first_query(step), warp_key = at.first_key + warp_row;
      const PairFeatures features = work.heads[at.first_head + steps.head(step)].features;
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const float *lse = stats_of_tile + n * 8 + 2 * t, *minus_delta = lse + kQueries, *shift = minus_delta + kQueries;
        const int query = first_query + n * 8 + 2 * t;
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int row = warp_key + s * 16 + g + 8 * r;
            bool kept[2] = {true, true};
            if (features.dropout.active) features.keeps_two_queries(query, row, kept[0], kept[1]);
#pragma unroll
            for (int c = 0; c < 2; c++) {
              const int i = 2 * r + c;
              if (edge && !(visible[s] >> (4 * n + i) & 1)) {
                score[s][n][i] = grad[s][n][i] = 0;
                continue;
              }
              float to_product;
              features(score[s][n][i], grad[s][n][i], to_product, query + c, row, lse[c], shift[c], minus_delta[c], kept[c]);
              if (grad[s][n][i] != 0) grad[s][n][i] *= to_product;
            }
          }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        const float2 lse = *(const float2*)(stats_of_tile + n * 8 + 2 * t);
#pragma unroll
        for (int s = 0; s < kSets; s++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            score[s][n][i] = simt::ex2(fmaf(score[s][n][i], unit, i & 1 ? -lse.y : -lse.x));
            if (kKey) grad[s][n][i] *= score[s][n][i];
          }
      }
      if (edge) {
        hide<kSets, kTiles>(score, visible);
        hide<kSets, kTiles>(grad, visible);
      }
    }
    PackedTile<kSets, kTiles> weights, grads;
    pack<T, kSets, kTiles>(weights, score);
    pack<T, kSets, kTiles>(grads, grad);

    if (bad) {
      // The weights lie where values do (keys where there are none), which are loaded again.
      const KeyPlace at = place();
      const RowEntry* const rows = table.rows_of(at.batch);
      const BackwardHead& head = work.heads[at.first_head + steps.head(step)];
      const int first_query = steps.first_query(step);
      const auto sees = [&](int row, int column) {
        return at.first_key + row < lengths[1] && sees_pair<Tile::kFeatures>(lengths[0], rows, head, first_query + column, at.first_key + row);
      };
      __syncthreads();
      if (wants_value) {
        put_weights<T, kSets, kTiles>(values, weights, warp_row, lane, sees);
        add_not_finite_rows<T, D, kSets, kQueries, kThreads>(grad_value, values, grad_outs, warp_row, lane);
      }
      if (wants_key) {
        put_weights<T, kSets, kTiles>(values, grads, warp_row, lane, sees);
        add_not_finite_rows<T, D, kSets, kQueries, kThreads>(grad_key, values, queries + stage * kQueries * D, warp_row, lane);
      }
      if (kKey) load_values();
      else load_keys();
      simt::cp_async_commit();
    }

    if (wants_value) multiply<T, D, kSets, kTiles>(grad_value, weights, grad_out_rows);
    // All warps have left grad_out.
    __syncthreads();
    if (next >= 0) load_grad_outs(next);
    if (kStages == 2) simt::cp_async_commit();
    if (wants_key) multiply<T, D, kSets, kTiles>(grad_key, grads, query_rows);
    if (kStages == 1) {
      if (kKey) __syncthreads();
      if (next >= 0) load_queries(next, 0);
      simt::cp_async_commit();
    } else {
      stage ^= 1;
      query_columns.lane_address += stage ? kStageBytes : -kStageBytes, query_rows.lane_address += stage ? kStageBytes : -kStageBytes;
    }
  }
  simt::cp_async_wait<0>();
  __syncthreads();

  if (wants_key) put_rounded<T, D, kSets>(keys, grad_key, float(p.scale), warp_row, lane);
  T* const rounded_values = kKey ? values : keys;
  if (wants_value) {
    const float factor = Tile::kFeatures && p.dropout.p > 0 ? float(inverse_keep_of(p.dropout.p)) : 1.0f;
    put_rounded<T, D, kSets>(rounded_values, grad_value, factor, warp_row, lane);
  }
  __syncthreads();
  const KeyPlace at = place();
  if (wants_key)
    store_tile<D, kKeys, kThreads>(keys, TileMatrix<T>(matrix_at<T>(params.grad_key, work.heads[at.first_head].grad_key), lengths[1], p.head_dim),
                                   at.first_key);
  if (wants_value)
    store_tile<D, kKeys, kThreads>(
        rounded_values, TileMatrix<T>(matrix_at<T>(params.grad_value, work.heads[at.first_head].grad_value), lengths[1], p.head_dim_v), at.first_key);
}

template <class Tile>
void launch_key_tile(const AttentionBackwardParams& params, const BackwardWork& work, void* stream) {
  const AttentionParams& p = params.forward;
  const KeyGrid grid(p, Tile::kQueries);
  SIMT_LAUNCH(attention_bwd_key_kernel<Tile>, blocks_of(p.seqlen_kv, Tile::kKeys) * unsigned(p.batch * p.num_heads_kv), Tile::kThreads, Tile::kSharedBytes,
              stream, params, work, grid);
}

}  // namespace

template <class T, int D, bool kFeatures>
void launch_key_grads(const AttentionBackwardParams& params, const BackwardWork& work, void* stream) {
  if constexpr (D <= (kFeatures ? 64 : 128)) {
    launch_key_tile<KeyGradTile<T, D, kFeatures, true, true>>(params, work, stream);
  } else {
    if (params.grad_value.data) launch_key_tile<KeyGradTile<T, D, kFeatures, false, true>>(params, work, stream);
    if (params.grad_key.data) launch_key_tile<KeyGradTile<T, D, kFeatures, true, false>>(params, work, stream);
  }
}

}  // namespace cuda
}  // namespace tiled_attention
