#pragma once
// Exact attention, backward. Nothing of size n x n is kept: the probabilities of a tile are computed again from query, key and lse. Five
// products per tile. grad_key and grad_value are summed over query tiles in the order of the loops and over chunks of queries in order;
// how a head is cut into chunks follows from the shape and the mask, so the result does not depend on the threads.

#include "backward_queries.h"
#include "next_tile.h"
#include "score_gradient.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T, class Unit, bool kDrop>
struct Backward : BackwardQueries<T, Unit, kDrop> {
  using Queries = BackwardQueries<T, Unit, kDrop>;
  using Real = Accumulator<Unit>;
  using V = NativeVec<Real>;
  using Buffers = BackwardBuffers<T, Unit, kDrop>;
  using Packed = BackwardPacked<Unit>;
  using Sums = BackwardSums<Real>;
  using Doubles = BackwardDoubles;
  static constexpr int kSize = kUnitSize<Unit>, kTileQ = kBwdTileQ, kTileKV = kBwdTileKV, kBlocks = kTileQ / kBlockRows;

  using Queries::p;
  using Queries::params;
  ThreadPool pool;
  const BackwardPlan plan;
  int group, chunks;
  int64_t heads;
  KeptTiles kept;
  bool adds = false;  // to the gradients that are there

  Backward(const AttentionBackwardParams& params, const ThreadPool& all)
      : Queries{params, params.forward}, pool(with_workers(all, p)), plan(params), chunks(plan.chunks), kept(KeptTiles::of(p, kTileQ, kTileKV)) {
    group = int(p.num_heads / p.num_heads_kv);
    heads = p.batch * p.num_heads_kv;
    const int64_t items = by_chunks() ? max_of(int64_t(chunks), (p.seqlen_kv + kTileKV - 1) / kTileKV) : plan.groups;
    pool.num_workers = int(min_of(int64_t(pool.num_workers), max_of(items, int64_t(1))));
  }

  bool by_chunks() const { return plan.groups == 0; }
  // Chunks read the same packed keys, all of them. Otherwise a worker packs what it sees.
  bool packs_first() const { return by_chunks() && kept.are_all(); }

  size_t worker_bytes() const {
    Scratch s(nullptr);
    Buffers(params, s);
    return s.used;
  }
  size_t packed_bytes() const {
    Scratch s(nullptr);
    Packed(p, kept, s);
    return s.used;
  }
  size_t sums_bytes() const {
    Scratch s(nullptr);
    Sums(params, s);
    return s.used;
  }
  size_t doubles_bytes() const {
    Scratch s(nullptr);
    Doubles(params, chunks, s);
    return s.used;
  }
  size_t scratch_bytes() const {
    const int workers = pool.num_workers;
    return doubles_bytes() + workers * worker_bytes() + (packs_first() ? 1 : workers) * packed_bytes() + (by_chunks() ? chunks : workers) * sums_bytes();
  }

  void run(void* memory) const {
    if (heads == 0) return;
    Scratch first(memory);
    Doubles doubles(params, chunks, first);
    memset(doubles.parts, 0, doubles.num_parts * sizeof(double));
    memset(doubles.bias, 0, doubles.num_bias * sizeof(double));
    char* workers_at = (char*)memory + doubles_bytes();
    char* packed_at = workers_at + pool.num_workers * worker_bytes();
    const size_t worker_size = worker_bytes(), packed_size = packed_bytes(), sums_size = sums_bytes();
    const auto buffers = [&](int worker) {
      Scratch s(workers_at + worker * worker_size);
      return Buffers(params, s);
    };
    const auto packed = [&](int worker) {
      Scratch s(packed_at + worker * packed_size);
      return Packed(p, kept, s);
    };
    char* sums_at = packed_at + (packs_first() ? 1 : pool.num_workers) * packed_size;
    const auto sums = [&](int64_t index) {
      Scratch s(sums_at + index * sums_size);
      return Sums(params, s);
    };
    if (by_chunks()) {
      for (int64_t head = 0; head < heads; head++) {
        if (packs_first()) {
          packed(0).clear();
          for_each_item(pool, kept.count, [&](int worker, int64_t tile) { pack_keys(head, int(tile), packed(0), buffers(worker)); });
        }
        for_each_item(pool, chunks, [&](int worker, int64_t chunk) {
          const Packed keys = packed(packs_first() ? 0 : worker);
          if (!packs_first()) keys.clear();
          run_chunk(head, int(chunk), keys, sums(chunk), buffers(worker), doubles, -1);
        });
        for_each_item(pool, kept.count, [&](int, int64_t tile) { store_keys(head, int(tile), sums); });
        for (int chunk = 0; chunk < chunks; chunk++) add_bias_columns(head, sums(chunk), doubles.bias);
      }
    } else {
      for_each_item(pool, plan.groups, [&](int worker, int64_t group) {
        const Packed keys = packed(worker);
        const Buffers buf = buffers(worker);
        for (int64_t i = 0; i < plan.heads_of_group; i++) {
          const int64_t head = plan.head(group, i);
          keys.clear();
          const int64_t next = group + pool.num_workers;  // if the workers go on in step
          run_chunk(head, 0, keys, sums(worker), buf, doubles, plan.heads_of_group == 1 && next < plan.groups ? plan.head(next, 0) : -1);
          for (int tile = 0; tile < kept.count; tile++) store_keys(head, tile, [&](int) { return sums(worker); });
          add_bias_columns(head, sums(worker), doubles.bias);
        }
      });
    }
    store_sums(doubles);
  }

 private:
  void store_sums(const Doubles& doubles) const {
    const bool one_bias = params.grad_bias.data && params.grad_bias.row_stride == 0 && params.grad_bias.col_stride == 0;
    for (int64_t head = 0; head < p.num_heads; head++) {
      double slope = 0, sink = 0;
      for (int64_t batch = 0; batch < p.batch; batch++)
        for (int chunk = 0; chunk < chunks; chunk++) {
          const double* part = doubles.parts + ((batch * p.num_heads + head) * chunks + chunk) * 3;
          slope += part[0], sink += part[1];
          if (one_bias) doubles.bias[this->bias_offset(batch, head)] += part[2];
        }
      if (params.grad_alibi_slopes) {
        Real& sum = ((Real*)params.grad_alibi_slopes)[head];
        sum = Real(adds ? sum + slope : slope);
      }
      if (params.grad_sinks) ((Real*)params.grad_sinks)[head] = Real(sink);
    }
    Real* grad_bias = (Real*)params.grad_bias.data - Sums::bias_origin(params);
    for (int64_t i = 0; i < doubles.num_bias; i++) grad_bias[i] = Real(doubles.bias[i]);
  }

  void pack_keys(int64_t head, int tile, const Packed& packed, const Buffers& buf) const {
    const int slot = packed.kept.slot(tile);
    if (packed.tiles[slot] == tile) return;
    const int begin = tile * kTileKV, rows = min_of(kTileKV, int(p.seqlen_kv) - begin), head_dim = int(p.head_dim), head_dim_v = int(p.head_dim_v);
    const Matrix<const T> keys = matrix<const T>(p, p.key, head / p.num_heads_kv, head % p.num_heads_kv);
    const Matrix<const T> values = matrix<const T>(p, p.value, head / p.num_heads_kv, head % p.num_heads_kv);
    const auto key = turned_rows(p, p.key, p.rotary.key_table, head / p.num_heads_kv, head % p.num_heads_kv, begin, rows, buf.key_temp);
    const auto value = adjacent_columns(values, begin, rows, head_dim_v, buf.value_temp);
    const int next = begin + kTileKV;
    pack_transposed(key.data, key.row_stride, rows, head_dim, packed.key_transposed + packed.key_panel(tile, begin) * packed.key_transposed_stride,
                    packed.key_transposed_stride, Ahead::of(values, begin, rows, head_dim_v));
    pack_transposed(value.data, value.row_stride, rows, head_dim_v, packed.value_transposed + packed.key_panel(tile, begin) * packed.value_transposed_stride,
                    packed.value_transposed_stride, Ahead::of(keys, next, min_of(kTileKV, int(p.seqlen_kv) - next), head_dim));
    packed.key_finite[slot] = pack_finite_panels(key.data, key.row_stride, rows, head_dim, packed.key_row(tile, begin), packed.key_stride);
    packed.tiles[slot] = tile;
  }

  void run_chunk(int64_t head, int chunk, const Packed& packed, const Sums& sums, const Buffers& buf, const Doubles& doubles, int64_t next_head) const {
    const int64_t batch = head / p.num_heads_kv;
    const int head_kv = int(head % p.num_heads_kv);
    const RowMask mask(p.mask, batch, p.seqlen_q, p.seqlen_kv);
    const ScoreMods<Real> mods(p, mask, batch);
    sums.clear(group);
    const int rows_of_tile = query_tile_rows(p, kTileQ), step = p.blocks.rows.data ? rows_of_tile : kBlockRows;
    const int begin = chunk_begin(chunk, chunks, int(p.seqlen_q), mask, step), end = chunk_begin(chunk + 1, chunks, int(p.seqlen_q), mask, step);
    if (begin >= end) return;
    const QueryTiles tiles(group, begin, end - begin, rows_of_tile);
    for (int tile = 0; tile < tiles.count; tile++) {
      const int rows = tiles.fill(tile, head_kv * group, mask, buf.rows);
      NextTile<T> next(p, tiles, tile, tile + 1 == tiles.count, head, next_head, kept.count == 1);
      next.add(p, p.query, p.head_dim), next.add(p, params.grad_out, p.head_dim_v), next.add(p, p.out, p.head_dim_v);
      query_tile(batch, head_kv, rows, tiles.stacked, mods, packed, sums, buf, next);
      for (int i = 0; i < rows; i++) {
        double* part = doubles.parts + ((batch * p.num_heads + buf.rows[i].head) * chunks + chunk) * 3;
        part[0] += buf.row_slope[i], part[1] += buf.row_sink[i];
        if (!params.grad_bias.data || params.grad_bias.col_stride != 0) continue;
        double& bias = params.grad_bias.row_stride == 0
                           ? part[2]
                           : doubles.bias[this->bias_offset(batch, buf.rows[i].head) + buf.rows[i].query * params.grad_bias.row_stride];
        bias += this->bias_of_row(batch, i, buf);
      }
    }
  }

  // The sums of all chunks over the keys of a tile, in the order of the chunks.
  template <class GetSums>
  void store_keys(int64_t head, int tile, const GetSums& sums_of) const {
    const int64_t batch = head / p.num_heads_kv, head_kv = head % p.num_heads_kv;
    const int begin = tile * kTileKV, end = min_of(begin + kTileKV, int(p.seqlen_kv));
    int first = 0;
    while (first < chunks && !sums_of(first).seen->sees_some(begin, end)) first++;
    const Sums sums = sums_of(first < chunks ? first : 0);
    if (first == chunks) sums.clear_rows(begin, end);
    for (int chunk = first + 1; chunk < chunks; chunk++)
      if (sums_of(chunk).seen->sees_some(begin, end)) sums.add(sums_of(chunk), begin, end);
    const Ahead keys = params.grad_key.data ? Ahead::of(matrix<const T>(p, params.grad_key, batch, head_kv), begin, end - begin, int(p.head_dim)) : Ahead();
    const Ahead values =
        params.grad_value.data ? Ahead::of(matrix<const T>(p, params.grad_value, batch, head_kv), begin, end - begin, int(p.head_dim_v)) : Ahead();
    for (int j = begin; j < end; j++) {
      if ((j - begin) % 8 == 0) keys.fetch_to_write(j - begin + 8, j - begin + 16), values.fetch_to_write(j - begin + 8, j - begin + 16);
      if (params.grad_key.data) {
        const Matrix<T> to = matrix<T>(p, params.grad_key, batch, head_kv);
        store_turned_back(p, p.rotary.key_table, batch, head_kv, j, sums.grad_key + int64_t(j) * sums.key_stride, to, adds);
      }
      if (params.grad_value.data) {
        const Matrix<T> to = matrix<T>(p, params.grad_value, batch, head_kv);
        Real* const row = sums.grad_value + int64_t(j) * sums.value_stride;
        const Real keep = Real(kDrop ? inverse_keep_of(p.dropout.p) : 1);
        if (adds) add_row(row, int(p.head_dim_v), keep, to.row(j), to.col_stride, Real(1));
        store_row(row, int(p.head_dim_v), adds ? Real(1) : keep, to.row(j), to.col_stride);
      }
    }
  }

  // A bias of keys, the same for all rows, or by distance: what was summed over the rows, [group][bias_width].
  void add_bias_columns(int64_t head, const Sums& sums, double* bias) const {
    if (!sums.bias_columns) return;
    const TensorView& view = params.grad_bias;
    for (int g = 0; g < group; g++) {
      double* to = bias + this->bias_offset(head / p.num_heads_kv, head % p.num_heads_kv * group + g);
      for (int64_t j = 0; j < sums.bias_width; j++) to[j * view.col_stride] += sums.bias_columns[g * sums.bias_width + j];
    }
  }

  void query_tile(int64_t batch, int head_kv, int rows, bool stacked, const ScoreMods<Real>& mods, const Packed& packed, const Sums& sums, const Buffers& buf,
                  const NextTile<T>& next_tile) const {
    this->pack_queries(batch, rows, mods.factor() < 0, buf);
    if (params.grad_bias.data && !Sums::is_summed(params.grad_bias))
      for (int i = 0; i < rows; i++) this->clear_bias_row(batch, buf.rows[i]);
    memset(buf.grad_query, 0, int64_t(kTileQ) * sums.key_stride * sizeof(Real));
    BlockKeys blocks[kBlocks];
    Interval main = {0, 0}, sinks = {0, 0};
    for (int i = 0; i < rows; i += kBlockRows) {
      const BlockKeys& block = blocks[i / kBlockRows] = BlockKeys(buf.rows + i, min_of(kBlockRows, rows - i));
      main = hull(main, block.main), sinks = hull(sinks, block.sinks);
    }
    bool coarse = false;
    for (int i = 0; i < rows; i++) coarse = coarse || lse_is_coarse<T>(buf.row_lse[i]);
    ListedKeys listed_keys, *const listed = mods.list.is_given() ? &listed_keys : nullptr;
    if (coarse) normalise_again(batch, head_kv, rows, blocks, hull(main, sinks), mods, listed, packed, buf);
    sums.see(sinks, main, int(p.seqlen_kv));
    for (int i = 0; i < rows; i++) {
      buf.row_sink[i] = this->grad_sink(batch, i, buf);
    }
    const bool in_registers = sizeof(Real) == 4 && !stacked && Dropout::in_registers(p.dropout);
    const Dropout dropout(p.dropout, batch, buf.rows[0].head, buf.dropout_keys);
    int next = 0;
    bool asked = false;  // for what comes after
    const Interval ranges[] = {sinks, main};
    for (const Interval range : ranges)
      for (int kv_begin = max_of(next, round_down(range.begin, kTileKV)); kv_begin < range.end; kv_begin += kTileKV) {
        next = kv_begin + kTileKV;
        if (listed) {
          const int key = mods.next_listed(buf.rows, rows, kv_begin);
          if (key >= range.end) break;
          if (key >= next) {
            kv_begin = round_down(key, kTileKV) - kTileKV;
            continue;
          }
        }
        const int kv_end = min_of(kv_begin + kTileKV, max_of(main.end, sinks.end));
        if (kDrop && in_registers) dropout.begin_tile(kv_begin, kv_end);
        KeyRuns seen[kBlocks];
        for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
          const BlockKeys& block = blocks[i0 / kBlockRows];
          const int count = min_of(kBlockRows, rows - i0);
          if (!asked) next_tile.fetch(i0, rows);
          KeyRuns& runs = seen[i0 / kBlockRows];
          runs.count = 0;
          if (!listed || mods.look_up(buf.rows + i0, count, kv_begin, kv_end, listed))
            runs = mods.runs(buf.rows + i0, count, block.within(kv_begin, kv_end), kPanel<Unit>, listed);
          if (!runs.count) zero_block(buf, i0, count);
          if (runs.count) pack_keys(batch * p.num_heads_kv + head_kv, kv_begin / kTileKV, packed, buf);
          for (int r = 0; r < runs.count; r++) {
            // Zeros from the run before to this one, and behind the last.
            const Interval zeros = {r == 0 ? 0 : round_up(runs.run[r - 1].end - kv_begin, kPanel<Unit>),
                                    r + 1 == runs.count ? round_up(kv_end - kv_begin, kPanel<Unit>) : 0};
            block_of_rows(batch, head_kv, i0, count, kv_begin, zeros, runs.run[r], block, in_registers, coarse, mods, listed, dropout, packed, sums, buf);
          }
        }
        asked = true;
        // grad_value += probs^T grad_out, grad_key += grad_scores^T query: blocks of keys, reduction over the rows that see them.
        int seen_end = kv_begin;
        for (int i = 0; i < rows; i += kBlockRows) seen_end = max_of(seen_end, seen[i / kBlockRows].hull().end);
        for (int j = kv_begin; j < seen_end; j += kBlockRows) {
          const int count = min_of(kBlockRows, seen_end - j);
          int begin = 0, end = rows;
          while (begin < rows && !seen[begin / kBlockRows].sees_some(j, j + count)) begin += kBlockRows;
          while (end > begin && !seen[(end - 1) / kBlockRows].sees_some(j, j + count)) end = round_down(end - 1, kBlockRows);
          while (begin < end && !sees_some(buf.rows[begin].keys, j, j + count)) begin++;
          while (begin < end && !sees_some(buf.rows[end - 1].keys, j, j + count)) end--;
          if (begin >= end) continue;
          begin = round_down(begin, kSize);
          const int k0 = begin / kSize, k_size = units<Unit>(end - begin), at = k0 * kTileKV + j - kv_begin;
          if (params.grad_value.data)
            gemm<Left::Transposed, Store::Accumulate>(count, int(p.head_dim_v), k_size, buf.probs + at, kTileKV, buf.grad_out_panels + k0 * kPanel<Unit>,
                                                      buf.tile_stride, sums.grad_value + int64_t(j) * sums.value_stride, sums.value_stride);
          if (params.grad_key.data)
            gemm<Left::Transposed, Store::Accumulate>(count, int(p.head_dim), k_size, buf.grad_scores + at, kTileKV, buf.query_panels + k0 * kPanel<Unit>,
                                                      buf.tile_stride, sums.grad_key + int64_t(j) * sums.key_stride, sums.key_stride);
        }
      }
    if (!params.grad_query.data) return;
    for (int i = 0; i < rows; i++) {
      const Matrix<T> to = matrix<T>(p, params.grad_query, batch, buf.rows[i].head);
      store_turned_back(p, p.rotary.query_table, batch, buf.rows[i].head, buf.rows[i].query, buf.grad_query + int64_t(i) * sums.key_stride, to, adds);
    }
  }

  // Probabilities and grad_scores of the visible part of one block of rows; zero in the rest of `zeros`, columns from kv_begin. Adds to grad_query.
  void block_of_rows(int64_t batch, int head_kv, int i0, int rows, int kv_begin, Interval zeros, Interval seen, const BlockKeys& block, bool in_registers,
                     bool coarse, const ScoreMods<Real>& mods, const ListedKeys* listed, const Dropout& dropout, const Packed& packed, const Sums& sums,
                     const Buffers& buf) const {
    const int begin = round_down(seen.begin, kPanel<Unit>), end = seen.end;
    const int left = begin - kv_begin, cols = round_up(end - begin, kPanel<Unit>), tile = kv_begin / kTileKV;
    const int64_t panel = packed.key_panel(tile, begin);
    Real* scores = (kSize == 1 ? (Real*)buf.probs + i0 * kTileKV : buf.block_scores) + left;
    Real* grads = (kSize == 1 ? (Real*)buf.grad_scores + i0 * kTileKV : buf.block_grad_scores) + left;
    const TileRow* tile_rows = buf.rows + i0;
    gemm_from(seen.begin - begin, rows, end - begin, units<Unit>(int(p.head_dim)), buf.query_rows + i0 * buf.query_stride, buf.query_stride,
              packed.key_transposed + panel * packed.key_transposed_stride, packed.key_transposed_stride, scores, kTileKV);
    gemm_from(seen.begin - begin, rows, end - begin, units<Unit>(int(p.head_dim_v)), buf.grad_out_rows + i0 * buf.grad_out_stride, buf.grad_out_stride,
              packed.value_transposed + panel * packed.value_transposed_stride, packed.value_transposed_stride, grads, kTileKV);
    Real* tanhs = buf.tanhs + left;
    Real factor = hide_scores(tile_rows, rows, begin, end, cols, block, scores, tanhs, mods, listed);
    const bool full = covers(block.full, begin, begin + cols);
    if (coarse) {
      for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j += V::kLanes) (V::load(scores + i * kTileKV + j) * V(factor) - V(buf.row_shift[i0 + i])).store(scores + i * kTileKV + j);
      factor = Real(1);
    }

    const bool select = !full || mods.hides(), extra = params.grad_bias.col_stride != 0 || params.grad_alibi_slopes || p.softcap > 0;
    const bool in_pairs = kSize == 2 && !extra && (!kDrop || in_registers);
    if (select) gradients<true>(batch, i0, rows, begin, left, cols, factor, in_pairs, in_registers, scores, grads, dropout, buf);
    else gradients<false>(batch, i0, rows, begin, left, cols, factor, in_pairs, in_registers, scores, grads, dropout, buf);
    if (extra) extra_gradients(batch, i0, rows, begin, end, grads, tanhs, mods, sums, buf);
    finish_rows(i0, rows, left, cols, zeros, in_pairs, scores, grads, buf);

    if (!params.grad_query.data) return;
    const int first = round_down(seen.begin, kSize);
    const Unit* grad_rows = (kSize == 1 ? (const Unit*)grads : buf.grad_score_rows + left / kSize) + (first - begin) / kSize;
    Real* grad_query = buf.grad_query + i0 * sums.key_stride;
    gemm<Left::RowMajor, Store::Accumulate>(rows, int(p.head_dim), units<Unit>(end - first), grad_rows, kTileKV / kSize, packed.key_row(tile, first),
                                            packed.key_stride, grad_query, int(sums.key_stride));
    if (!packed.key_finite[packed.kept.slot(tile)])
      add_nonfinite(mods, tile_rows, rows, first, end, grad_rows, kTileKV / kSize,
                    turned_rows(p, p.key, p.rotary.key_table, batch, head_kv, first, end - first, buf.key_temp).from(-first), int(p.head_dim), grad_query,
                    int(sums.key_stride));
  }

  // Modifiers and row intervals of a block of scores. Returns what the scores are still to be multiplied by.
  Real hide_scores(const TileRow* tile_rows, int rows, int begin, int end, int cols, const BlockKeys& block, Real* scores, Real* tanhs,
                   const ScoreMods<Real>& mods, const ListedKeys* listed) const {
    const Real factor = mods.apply(tile_rows, rows, begin, end, scores, kTileKV, tanhs, listed);
    if (!covers(block.full, begin, begin + cols))
      for (int i = 0; i < rows; i++) mask_row(scores + i * kTileKV, cols, begin, tile_rows[i].keys);
    return factor;
  }

  // The maximum and sum of the rows whose lse is too coarse: row_shift and row_lse of a tile, from one more pass over its scores.
  __attribute__((noinline)) void normalise_again(int64_t batch, int head_kv, int rows, const BlockKeys* blocks, Interval keys, const ScoreMods<Real>& mods,
                                                 ListedKeys* listed, const Packed& packed, const Buffers& buf) const {
    buf.coarse.clear(kTileQ);
    for (int kv_begin = round_down(keys.begin, kTileKV); kv_begin < keys.end; kv_begin += kTileKV)
      for (int i0 = 0; i0 < rows; i0 += kBlockRows) {
        const BlockKeys& block = blocks[i0 / kBlockRows];
        const Interval seen = block.within(kv_begin, min_of(kv_begin + kTileKV, keys.end));
        const int begin = round_down(seen.begin, kPanel<Unit>), count = min_of(kBlockRows, rows - i0), cols = round_up(seen.end - begin, kPanel<Unit>);
        if (is_empty(seen) || (listed && !mods.look_up(buf.rows + i0, count, begin, seen.end, listed))) continue;
        const int tile = kv_begin / kTileKV;
        pack_keys(batch * p.num_heads_kv + head_kv, tile, packed, buf);
        Real* scores = kSize == 1 ? (Real*)buf.probs : buf.block_scores;
        gemm<Left::RowMajor, Store::Overwrite>(count, cols, units<Unit>(int(p.head_dim)), buf.query_rows + i0 * buf.query_stride, buf.query_stride,
                                               packed.key_transposed + packed.key_panel(tile, begin) * packed.key_transposed_stride,
                                               packed.key_transposed_stride, scores, kTileKV);
        const Real factor = hide_scores(buf.rows + i0, count, begin, seen.end, cols, block, scores, nullptr, mods, listed);
        softmax_block<Unit, false>(count, cols, kTileKV, scores, (Unit*)scores, factor, buf.coarse.from(i0), 0, BlockDropout<Real>());
      }
    for (int i = 0; i < rows; i++) {
      if (!lse_is_coarse<T>(buf.row_lse[i])) continue;
      if (p.sinks)
        add_sink(Real(((const Real*)p.sinks)[buf.rows[i].head] * kLog2e), buf.coarse.row_max[i], buf.coarse.row_sum + i * kLanes<Real>, buf.coarse.out, 0);
      buf.row_shift[i] = buf.coarse.row_max[i];
      buf.row_lse_low[i] = 0;
      buf.row_lse[i] = log2(V(reduce_add(V::load(buf.coarse.row_sum + i * kLanes<Real>)))).v[0];
    }
  }

#if defined(__AVX512BF16__)
  PairRows pair_rows(int row, int in_block, int left, const Buffers& buf) const {
    const int at = row / kSize * kTileKV + left;
    return {buf.probs + at, buf.grad_scores + at, buf.grad_score_rows + in_block * kTileKV / kSize + left / kSize, kTileKV / kSize};
  }
#endif

  template <bool kSelect>
  void gradients(int64_t batch, int i0, int rows, int begin, int left, int cols, Real factor, [[maybe_unused]] bool in_pairs,
                 [[maybe_unused]] bool in_registers, Real* scores, Real* grads, const Dropout& dropout, const Buffers& buf) const {
    const Real *lse = buf.row_lse + i0, *lse_low = buf.row_lse_low + i0, *delta = buf.row_delta + i0;
    const int first = buf.rows[i0].query, in_group = left / kPhiloxGroup;
#if defined(__AVX512BF16__)
    if constexpr (kSize == 2)
      if (in_pairs) {
        // What the products left in the row that only completes a pair may be NaN.
        if (rows % 2) memset(scores + rows * kTileKV, 0, cols * sizeof(Real)), memset(grads + rows * kTileKV, 0, cols * sizeof(Real));
        for (int i = 0; i < rows; i += 2)
          score_gradient_to_pairs<kSelect, kDrop>(scores + i * kTileKV, grads + i * kTileKV, kTileKV, cols, factor, lse + i, delta + i,
                                                  pair_rows(i0 + i, i, left, buf), dropout, first + i, in_group);
        return;
      }
#endif
    if constexpr (kDrop && kSize == 1 && sizeof(Real) == 4)
      if (in_registers) {
        for (int i = 0; i < rows; i += 2) {  // there is room for a row behind the last
          const float two_lse[2] = {lse[i], i + 1 < rows ? lse[i + 1] : Real(INFINITY)}, two_low[2] = {lse_low[i], i + 1 < rows ? lse_low[i + 1] : Real(0)},
                      two_delta[2] = {delta[i], i + 1 < rows ? delta[i + 1] : Real(0)};
          score_gradient_pair<kSelect>(scores + i * kTileKV, grads + i * kTileKV, kTileKV, cols, factor, two_lse, two_low, two_delta, dropout, first + i,
                                       in_group);
        }
        return;
      }
    for (int i = 0; i < rows; i++) {
      if constexpr (kDrop) {
        const Dropout of_row(p.dropout, batch, buf.rows[i0 + i].head, nullptr);
        const uint32_t* bits = of_row.row_bits(buf.rows[i0 + i].query, begin, cols, buf.dropout_bits);
        score_gradient_row<kSelect, true>(scores + i * kTileKV, grads + i * kTileKV, cols, factor, lse[i], lse_low[i], delta[i], &of_row, bits);
      } else score_gradient_row<kSelect, false>(scores + i * kTileKV, grads + i * kTileKV, cols, factor, lse[i], lse_low[i], delta[i], &dropout, nullptr);
    }
  }

  // What a block of grad_scores means for slopes, bias and, through the softcap, for the products.
  __attribute__((noinline)) void extra_gradients(int64_t batch, int i0, int rows, int begin, int end, Real* grads, const Real* tanhs,
                                                 const ScoreMods<Real>& mods, const Sums& sums, const Buffers& buf) const {
    const int count = end - begin;
    const TileRow* tile_rows = buf.rows + i0;
    if (params.grad_alibi_slopes)
      for (int i = 0; i < rows; i++) {
        V sum(Real(0));
        for (int j = 0; j < count; j += V::kLanes) {
          const V product = V::load(grads + i * kTileKV + j) * mods.distance(tile_rows[i], begin + j);
          sum = sum - keep_lanes(product, 0, count - j, V(Real(0)));
        }
        buf.row_slope[i0 + i] += reduce_add(sum);
      }
    if (sums.bias_columns)
      for_each_run(tile_rows, rows, [&](int first, int length) {
        double* to = sums.bias_columns + tile_rows[first].head % group * sums.bias_width + begin;
        if (is_by_distance(params.grad_bias)) add_distances(grads + first * kTileKV, kTileKV, length, count, to + p.seqlen_q - 1 - tile_rows[first].query);
        else add_columns(grads + first * kTileKV, kTileKV, length, count, to);
      });
    else if (params.grad_bias.col_stride != 0)
      for (int i = 0; i < rows; i++) add_bias_row(batch, tile_rows[i], begin, count, grads + i * kTileKV);
    if (p.softcap > 0)
      for (int i = 0; i < rows; i++)
        for (int j = i * kTileKV; j < i * kTileKV + count; j += V::kLanes) {
          // A hidden score may be NaN before it is hidden, its gradient is 0 and stays it.
          const V grad = V::load(grads + j), capped = softcap_gradient(grad, V::load(tanhs + j));
          V(grad.v == V(Real(0)).v ? grad.v : capped.v).store(grads + j);
        }
  }
  void add_bias_row(int64_t batch, const TileRow& row, int begin, int count, const Real* grads) const {
    Real* to = (Real*)params.grad_bias.data + this->bias_offset(batch, row.head) + row.query * params.grad_bias.row_stride + begin;
    int j = 0;
    for (; j + V::kLanes <= count; j += V::kLanes) (V::load(to + j) + V::load(grads + j)).store(to + j);
    for (; j < count; j++) to[j] += grads[j];
  }

  // Pairs where they are still rows, and zeros around the columns that were computed: the blocks of keys may read there.
  void finish_rows(int i0, int rows, int left, int cols, Interval zeros, [[maybe_unused]] bool in_pairs, [[maybe_unused]] Real* scores,
                   [[maybe_unused]] Real* grads, const Buffers& buf) const {
    for (int i = 0; i < rows; i += kSize) {
#if defined(__AVX512BF16__)
      if constexpr (kSize == 2)
        if (!in_pairs) {
          if (i + 1 == rows) memset(scores + (i + 1) * kTileKV, 0, cols * sizeof(Real)), memset(grads + (i + 1) * kTileKV, 0, cols * sizeof(Real));
          rows_to_pairs(scores + i * kTileKV, grads + i * kTileKV, kTileKV, cols, pair_rows(i0 + i, i, left, buf));
        }
#endif
      Unit* const outer_rows[] = {buf.probs + (i0 + i) / kSize * kTileKV, buf.grad_scores + (i0 + i) / kSize * kTileKV};
      for (Unit* row : outer_rows) {
        if (left > zeros.begin) memset(row + zeros.begin, 0, (left - zeros.begin) * sizeof(Unit));
        if (left + cols < zeros.end) memset(row + left + cols, 0, (zeros.end - left - cols) * sizeof(Unit));
      }
    }
  }
  static void zero_block(const Buffers& buf, int i0, int rows) {
    const int count = units<Unit>(rows) * kTileKV;
    memset(buf.probs + i0 / kSize * kTileKV, 0, count * sizeof(Unit));
    memset(buf.grad_scores + i0 / kSize * kTileKV, 0, count * sizeof(Unit));
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
