#pragma once
// Tiles of packed keys and values, and which of them are kept.

#include "pack.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// Which tiles of packed keys are kept at a time: all of them, or under a narrow window, which every tile of queries leaves behind soon, the first
// ones where there are sinks and as many others as a tile of queries sees. They then stay in L2.
struct KeptTiles {
  int count, fixed, ring;

  // All of `count`.
  explicit KeptTiles(int count) : count(count), fixed(0), ring(count) {}
  static KeptTiles of(const AttentionParams& p, int tile_q, int tile_kv) {
    const MaskParams& mask = p.mask;
    KeptTiles all(int((p.seqlen_kv + tile_kv - 1) / tile_kv));
    const int64_t band = min_of(mask.window_left, mask.limit_left) + min_of(mask.window_right, mask.limit_right) + 1;
    const int64_t width = max_of(int64_t(1), mask.chunk > 0 ? min_of(band, mask.chunk) : band) + tile_q - 1;
    // Some tiles of keys, beginning anywhere in the first.
    const int64_t fixed = (mask.num_sinks + tile_kv - 1) / tile_kv, ring = (width + tile_kv - 2) / tile_kv + 1;
    if (p.blocks.rows.data || fixed + ring >= all.count) return all;
    all.fixed = int(fixed), all.ring = int(ring);
    return all;
  }
  int slots() const { return fixed + ring; }
  bool are_all() const { return slots() == count; }
  int slot(int tile) const { return tile < fixed ? tile : fixed + (tile - fixed) % ring; }
};

// Packed keys and values of one kv head, tile by tile: key panels [head_dim][kPanel], then value panels [kTileKV][kPanel].
template <class Unit, int kTileKV>
struct PackedTiles {
  Unit *key, *value;
  int* tiles;    // [slots] the tile that a slot holds, -1: none
  bool* finite;  // [slots] whether its values are
  int64_t key_tile, value_tile;  // units of one tile
  int key_panel, value_panel;    // units of one panel
  KeptTiles kept;

  PackedTiles(const AttentionParams& p, const KeptTiles& kept, Scratch& scratch) : kept(kept) {
    const int rows = min_of(kTileKV, round_up(int(p.seqlen_kv), kPanel<Unit>));
    const int64_t slots = kept.slots();
    key_panel = units<Unit>(int(p.head_dim)) * kPanel<Unit>;
    value_panel = units<Unit>(rows) * kPanel<Unit>;
    key_tile = int64_t(rows / kPanel<Unit>) * key_panel;
    value_tile = int64_t(round_up(int(p.head_dim_v), kPanel<Unit>) / kPanel<Unit>) * value_panel;
    key = scratch.take<Unit>(slots * key_tile);
    value = scratch.take<Unit>(slots * value_tile);
    tiles = scratch.take<int>(slots);
    finite = scratch.take<bool>(slots);
  }
  void clear() const {
    for (int i = 0; i < kept.slots(); i++) tiles[i] = -1;
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
