#pragma once
// What is asked for while a tile of queries is computed: the rows that the next one reads.

#include "pack.h"
#include "schedule.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
class NextTile {
 public:
  NextTile() = default;
  // Of the tile behind `tile` of a head, or where that is the last one, of the first tile of `next_head`; -1: not known. Where the keys of a head are
  // one tile and the next head is known, its keys and values as well, during the first tile.
  NextTile(const AttentionParams& p, const QueryTiles& tiles, int tile, bool last, int64_t head, int64_t next_head, bool one_tile_of_keys) {
    if (!one_tile_of_keys) next_head = -1;
    const int64_t of = last ? next_head : head;
    if (of >= 0) {
      const QueryTiles::Rows rows = tiles.rows_of(last ? 0 : tile + 1);
      batch_ = of / p.num_heads_kv, head_ = of % p.num_heads_kv * tiles.group + rows.head;
      first_ = tiles.first_query + rows.query, count_ = min_of(rows.size, tiles.seqlen - rows.query);
    }
    if (next_head < 0 || tile != 0) return;
    const int64_t batch = next_head / p.num_heads_kv, head_kv = next_head % p.num_heads_kv;
    keys_[0] = Ahead::of(matrix<const T>(p, p.key, batch, head_kv), 0, int(p.seqlen_kv), int(p.head_dim));
    keys_[1] = Ahead::of(matrix<const T>(p, p.value, batch, head_kv), 0, int(p.seqlen_kv), int(p.head_dim_v));
  }
  // Rows of query, or of what is laid out by queries.
  void add(const AttentionParams& p, const TensorView& view, int64_t cols) {
    rows_[num_rows_++] = Ahead::of(matrix<const T>(p, view, batch_, head_), first_, count_, int(cols));
  }
  // The share of the block of rows i0 of a tile of `rows`.
  void fetch(int i0, int rows) const {
    for (int i = 0; i < num_rows_; i++) rows_[i].fetch(i0, i0 + kBlockRows);
    for (const Ahead& keys : keys_) keys.fetch(int(int64_t(keys.rows) * i0 / rows), int(int64_t(keys.rows) * min_of(i0 + kBlockRows, rows) / rows));
  }

 private:
  int64_t batch_ = 0, head_ = 0;
  int first_ = 0, count_ = 0, num_rows_ = 0;
  Ahead rows_[3], keys_[2];
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
