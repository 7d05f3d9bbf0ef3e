#pragma once
// Packed sequences in linear attention: which tokens a chunk holds. Chunks of kTile tokens count over all sequences, each from its own first token
// on, so that every sequence is cut as it is alone. Their number is bounded without a look at the offsets; chunks behind the last one hold nothing.
//
// Offsets come from the caller and are not checked: the first is taken as 0, the last as the total, and none as less than those before it or more
// than the total. So every row lies in exactly one chunk.

#include "../core/mask.h"
#include "../core/scratch.h"
#include "kernels.h"
#include "linear_tile.cuh"

namespace tiled_attention {
namespace cuda {

struct PackedChunk {
  int64_t begin, sequence;  // the first row; num_sequences where the chunk is not used
  int count;                // of tokens, 0: not used
};
struct PackedChunks {
  PackedChunk* chunks = nullptr;  // null: nothing is packed
  int64_t *first = nullptr, *rows = nullptr;  // of sequences, [num_sequences + 1]: the first chunk, the first row
};

// No fewer than the sum of blocks_of(length) over the sequences.
HOST_DEVICE int64_t most_chunks(int64_t num_sequences, int64_t total) { return (total + (kTile - 1) * min_of(num_sequences, total)) / kTile; }

inline PackedChunks take_chunks(int64_t num_sequences, int64_t chunks, Scratch* scratch) {
  PackedChunks packed;
  packed.chunks = scratch->take<PackedChunk>(chunks);
  packed.first = scratch->take<int64_t>(num_sequences + 1);
  packed.rows = scratch->take<int64_t>(num_sequences + 1);
  return packed;
}

namespace {

constexpr int kSequenceThreads = 256, kChunkThreads = 128;

// One thread block; a thread takes a run of sequences.
__global__ void __launch_bounds__(kSequenceThreads)
    linear_sequences_kernel(const int64_t* cu_seqlens, int64_t num_sequences, int64_t total, PackedChunks packed) {
  SIMT_DYNAMIC_SHARED(memory);
  simt::Carver carver(memory);
  int64_t* const of_threads = carver.take<int64_t>(kSequenceThreads);
  const int thread = int(threadIdx.x);
  const int64_t each = (num_sequences + kSequenceThreads - 1) / kSequenceThreads;
  const int64_t first = min_of(thread * each, num_sequences), last = min_of(first + each, num_sequences);

  int64_t end = 0;
  for (int64_t b = first; b < last; b++) end = max_of(end, min_of(cu_seqlens[b + 1], total));
  of_threads[thread] = end;
  __syncthreads();
  int64_t begin = 0;
  for (int i = 0; i < thread; i++) begin = max_of(begin, of_threads[i]);
  __syncthreads();

  int64_t chunks = 0;
  end = begin;
  for (int64_t b = first; b < last; b++) {
    packed.rows[b] = end;
    const int64_t row = end;
    end = b + 1 == num_sequences ? total : max_of(end, min_of(cu_seqlens[b + 1], total));
    chunks += blocks_of(end - row);
  }
  of_threads[thread] = chunks;
  __syncthreads();
  chunks = 0;
  for (int i = 0; i < thread; i++) chunks += of_threads[i];
  for (int64_t b = first; b < last; b++) {
    packed.first[b] = chunks;
    chunks += blocks_of((b + 1 < last ? packed.rows[b + 1] : end) - packed.rows[b]);
  }
  if (first < last && last == num_sequences) packed.first[num_sequences] = chunks, packed.rows[num_sequences] = total;
}

__global__ void __launch_bounds__(kChunkThreads) linear_chunks_kernel(int64_t num_sequences, int64_t count, PackedChunks packed) {
  const int64_t chunk = int64_t(blockIdx.x) * kChunkThreads + threadIdx.x;
  if (chunk >= count) return;
  PackedChunk found{0, num_sequences, 0};
  if (chunk < packed.first[num_sequences]) {
    // The last sequence that begins at or before the chunk: those before it that do have no tokens.
    int64_t low = 0, high = num_sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (packed.first[middle] <= chunk) low = middle;
      else high = middle;
    }
    found.begin = packed.rows[low] + (chunk - packed.first[low]) * kTile;
    found.sequence = low;
    found.count = int(min_of(int64_t(kTile), packed.rows[low + 1] - found.begin));
  }
  packed.chunks[chunk] = found;
}

}  // namespace

inline void launch_chunks(const int64_t* cu_seqlens, int64_t num_sequences, int64_t total, int64_t chunks, const PackedChunks& packed, Stream stream) {
  constexpr auto sequences = &linear_sequences_kernel;
  SIMT_LAUNCH(sequences, 1, kSequenceThreads, kSequenceThreads * sizeof(int64_t), stream, cu_seqlens, num_sequences, total, packed);
  constexpr auto find = &linear_chunks_kernel;
  SIMT_LAUNCH(find, unsigned((chunks + kChunkThreads - 1) / kChunkThreads), kChunkThreads, 0, stream, num_sequences, chunks, packed);
}

}  // namespace cuda
}  // namespace tiled_attention
