#pragma once
// The gradients of a tile of scores, which every kernel of the backward pass begins with.

#include "attention_fma_stats.cuh"

namespace tiled_attention {
namespace cuda {
namespace {

// What a tile becomes: the weights that multiply values, the gradients of the products q . k, or those of the scores.
enum class PairValue { kWeight, kGradProduct, kGradScore };

// In shared memory: one query head and the keys and values that it reads. Rows of a tile are queries, or keys.
template <class Tile, bool kKeyRows, class Product = DotProduct>
struct PairTiles {
  using T = typename Tile::T;
  using Real = typename Tile::Real;
  static constexpr int kQueries = kKeyRows ? Tile::kCols : Tile::kRows, kKeys = kKeyRows ? Tile::kRows : Tile::kCols;
  static constexpr int kProductBytes = Product::template kBytes<Tile>;
  using Kept = KeptTile<kQueries, kKeys>;

  Rows<const T> query, key, value, grad_out;
  HeadScores<Real> pairs;
  Dropout dropout;
  int64_t head_dim, head_dim_v, seqlen_q, seqlen_kv;
  const Real *shift, *lse, *delta;  // [seqlen_q]
  Real keep;
  int64_t head;

  SIMT_DEVICE PairTiles(const AttentionBackwardParams& params, const RowTable& table, const RowStats<Real>& stats, int64_t batch, int64_t head)
      : pairs(params.forward, table, batch, head), dropout(params.forward.dropout, batch, head) {
    const AttentionParams& p = params.forward;
    const Segment queries = query_segment(p, batch), keys = key_segment(p, batch);
    const int64_t kv_head = head / (p.num_heads / p.num_heads_kv), first = lse_offset(p, batch, head) + queries.begin;
    query = rows_from<const T>(p, p.query, batch, head, queries.begin), grad_out = rows_from<const T>(p, params.grad_out, batch, head, queries.begin);
    key = rows_from<const T>(p, p.key, batch, kv_head, keys.begin), value = rows_from<const T>(p, p.value, batch, kv_head, keys.begin);
    head_dim = p.head_dim, head_dim_v = p.head_dim_v, seqlen_q = queries.length, seqlen_kv = keys.length;
    shift = stats.shift + first, lse = stats.lse + first, delta = stats.delta + first;
    keep = Real(dropout.inverse_keep), this->head = head;
  }

  // What a list shows of the tile. As all that looks at lists, by whole warps.
  SIMT_DEVICE int shown(int64_t first_query, int64_t first_key) const {
    static_assert(kListTile % kQueries == 0 && kListTile % kKeys == 0, "inside a tile of the list");
    return pairs.list.state(first_query, first_key);
  }
  // Whether some pair of the tile is hidden or beyond the queries; pairs beyond the keys are hidden.
  SIMT_DEVICE bool edge(const RowBounds& bounds, int64_t first_query, int64_t first_key) const {
    return pairs.hides || !bounds.covers(first_key, first_key + kKeys) || first_query + kQueries > seqlen_q || shown(first_query, first_key) != kListFull;
  }

  // The tile in `right`, hidden_weight() where hidden; each half warp may read its rows after a barrier of the warp. `left`, `right` and
  // `kept_bytes` are free for all threads, and what the caller has staged before is there afterwards.
  template <PairValue kWanted>
  SIMT_DEVICE void compute(int64_t first_query, int64_t first_key, bool edge, Real* left, Real* right, uint8_t* kept_bytes, typename Tile::Place at,
                           const Product& product = Product(), unsigned char* product_memory = nullptr) const {
    const RowRange query_rows{first_query, seqlen_q}, key_rows{first_key, seqlen_kv};
    const RowRange left_rows = kKeyRows ? key_rows : query_rows, right_rows = kKeyRows ? query_rows : key_rows;
    const Kept kept = Kept::template draw<Tile::kThreads>(dropout, first_query, first_key, kept_bytes);
    typename Tile::Scores scores;
    product.template add<Tile>(scores, head, kKeyRows ? key : query, left_rows, kKeyRows ? query : key, right_rows, head_dim, false, left, right,
                               product_memory, at);
    __syncthreads();
    if constexpr (kWanted == PairValue::kWeight) {
      put_scores<Tile>(right, scores, at);
    } else {
      typename Tile::Scores grads;
      row_products<Tile>(grads, kKeyRows ? value : grad_out, left_rows, kKeyRows ? grad_out : value, right_rows, head_dim_v, false, left, right, at);
      __syncthreads();
      put_scores<Tile>(left, scores, at);
      put_scores<Tile>(right, grads, at);
    }

    const HeadScores<Real> pair_score = pairs;
    const Real factor = keep;
    QueryStats of_column[kKeyRows ? Tile::kThreadCols : 1];
    if constexpr (kKeyRows) {
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) of_column[j] = stats_of(first_query + at.x + 16 * j, edge);
    }
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows; i++) {
      const int r = at.row(i);
      QueryStats of_row;
      if constexpr (!kKeyRows) of_row = stats_of(first_query + r, edge);
      Real* const to = right + r * Tile::kStride + at.x;
      const Real* const products = kWanted == PairValue::kWeight ? to : left + r * Tile::kStride + at.x;
#pragma unroll
      for (int j = 0; j < Tile::kThreadCols; j++) {
        const int c = at.x + 16 * j, q = kKeyRows ? c : r, k = kKeyRows ? r : c;
        const QueryStats& row = kKeyRows ? of_column[kKeyRows ? j : 0] : of_row;
        Real derivative = 0;
        const Real score = pair_score(products[16 * j], first_query + q, first_key + k, edge, row.visible, &derivative);
        const Real weight = exp((score - row.shift) - row.lse);
        const bool is_kept = kept(q, k);
        Real x;
        if constexpr (kWanted == PairValue::kWeight) x = is_kept ? Tile::operand(weight) : Real(0);
        else {
          x = weight * ((is_kept ? to[16 * j] * factor : Real(0)) - row.delta);
          if constexpr (kWanted == PairValue::kGradProduct) x = Tile::operand(x * derivative);
          x += Real(0);  // +0 for a visible -0
        }
        to[16 * j] = score == minus_infinity(Real()) ? hidden_weight<Real>() : x;
      }
    }
    if (edge && pairs.list.is_given()) hide_unlisted(first_query, first_key, right, at);
  }

 private:
  // Behind the loop over pairs, where words would take the registers of a block.
  SIMT_DEVICE void hide_unlisted(int64_t first_query, int64_t first_key, Real* right, typename Tile::Place at) const {
    const int state = shown(first_query, first_key);
    if (state == kListFull) return;
#pragma unroll 1
    for (int i = 0; i < Tile::kThreadRows * Tile::kThreadCols; i++) {
      const int r = at.row(i / Tile::kThreadCols), c = at.x + 16 * (i % Tile::kThreadCols);
      const uint64_t word = pairs.list.word(state, first_query + (kKeyRows ? c : r));
      if (!(word >> ((first_key + (kKeyRows ? r : c)) % kListTile) & 1)) right[r * Tile::kStride + c] = hidden_weight<Real>();
    }
  }

  struct QueryStats {
    Real shift = 0, lse = 0, delta = 0;
    RowEntry visible{0, 0, 0, 0};
  };
  SIMT_DEVICE QueryStats stats_of(int64_t query, bool edge) const {
    QueryStats s;
    if (query >= seqlen_q) return s;
    s.shift = shift[query], s.lse = lse[query], s.delta = delta[query];
    if (edge) s.visible = pairs.rows[query];
    return s;
  }
};

template <class Pairs, class Tile>
constexpr int kPairBytes = Pairs::kProductBytes + Tile::kScoreBytes + Pairs::Kept::kBytes + int(sizeof(Pairs));

}  // namespace
}  // namespace cuda
}  // namespace tiled_attention
