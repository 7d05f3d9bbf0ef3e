#pragma once
// Rotary positions: reads and writes each row once, and a block of the table once for all heads.

#include "turn.h"
#include "workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

template <class T>
struct Rotate {
  using Real = ComputeType<T>;
  static constexpr int kBlock = 32;
  const RotateParams& p;

  void run(const ThreadPool& pool) const {
    const Turn<T> turn = {int(p.rotary_dim), int(p.head_dim), p.interleaved, p.transposed};
    const int64_t blocks = (p.seqlen + kBlock - 1) / kBlock;
    ThreadPool workers = pool;
    // Waking a thread costs as much as some 10^4 elements.
    if (p.batch * p.num_heads * p.seqlen * p.head_dim < 20000) workers.num_workers = 1;
    for_each_item(workers, p.batch * blocks, [&](int, int64_t item) {
      const int64_t batch = item / blocks, begin = item % blocks * kBlock, end = min_of(p.seqlen, begin + kBlock);
      for (int64_t head = 0; head < p.num_heads; head++) {
        const Matrix<const T> rows = matrix<const T>(p, p.rows, batch, head);
        const Matrix<T> out = matrix<T>(p, p.out, batch, head);
        const Matrix<const Real> table = matrix<const Real>(p, p.table, batch, head);
        for (int64_t i = begin; i < end; i++) turn.row({rows.row(i), 0, rows.col_stride}, table.row(i), {out.row(i), 0, out.col_stride});
      }
    });
  }
};

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
