#pragma once
// Decays inside one chunk of linear attention with one decay per token, g_0 .. g_(rows-1):
//   P_ij = exp(g_(j+1) + .. + g_i), j <= i     in_i = exp(g_0 + .. + g_i)     out_j = P_(rows-1)j
// No sum of decays is ever subtracted from another: each is built term by term, so every exponent is a sum of terms <= 0, -inf
// resets exactly, and -3e37 does not swallow its neighbours.

#include "linear_rows.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class Real>
struct ChunkDecay {
  using V = NativeVec<Real>;
  Real *log_decay, *pairs, *run, *in, *out;  // pairs [chunk][stride], the others [stride]
  Real through = 1;                          // from the start of the chunk to its end
  int stride;

  ChunkDecay(int chunk, bool present, Scratch& scratch) : stride(round_up(chunk, V::kLanes)) {
    const int size = present ? stride : 0;
    log_decay = scratch.take<Real>(size);
    pairs = scratch.take<Real>(int64_t(chunk) * size);
    run = scratch.take<Real>(size);
    in = scratch.take<Real>(size);
    out = scratch.take<Real>(size);
  }
  // Takes the decays of tokens [begin, begin + rows) in, and leaves in, out and through.
  template <class Head>
  void build_ends(const Head& head, int64_t begin, int rows) {
    for (int i = 0; i < rows; i++) log_decay[i] = *head.log_decay.row(begin + i);
    Real before = 0, behind = 0;
    for (int i = 0; i < rows; i++) {
      in[i] = before += log_decay[i];
      out[rows - 1 - i] = behind;
      behind += log_decay[rows - 1 - i];
    }
    for (int j = 0; j < rows; j += V::kLanes) {
      exp(V::load(in + j)).store(in + j);
      exp(V::load(out + j)).store(out + j);
    }
    through = in[rows - 1];
  }
  // pairs[i][j] = P_ij, valid up to column i and not to be read beyond.
  void build_pairs(int rows) {
    for (int j = 0; j < rows; j += V::kLanes) V(Real(0)).store(run + j);
    for (int i = 0; i < rows; i++) {
      const V step(log_decay[i]);
      for (int j = 0; j <= i; j += V::kLanes) {
        V x = V::load(run + j) + step;
        if (j + V::kLanes > i) x = keep_lanes(x, 0, i - j, V(Real(0)));
        x.store(run + j);
        exp(x).store(pairs + i * stride + j);
      }
    }
  }
  // pairs[j][i] = P_ij, valid from column j on and not to be read before.
  void build_pairs_transposed(int rows) {
    for (int i = 0; i < rows; i += V::kLanes) V(Real(0)).store(run + i);
    for (int j = rows - 1; j >= 0; j--) {
      const V step(j + 1 < rows ? log_decay[j + 1] : Real(0));
      for (int i = j / V::kLanes * V::kLanes; i < rows; i += V::kLanes) {
        V x = V::load(run + i) + step;
        if (i <= j) x = keep_lanes(x, j + 1 - i, V::kLanes, V(Real(0)));
        x.store(run + i);
        exp(x).store(pairs + j * stride + i);
      }
    }
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
