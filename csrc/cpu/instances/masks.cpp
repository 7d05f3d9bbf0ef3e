#include "../dispatch.h"
#include "../dropout.h"
#include "../workers.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

void dropout_mask(const DropoutParams& p, int64_t batch, int64_t num_heads, int64_t seqlen_q, int64_t seqlen_kv, const ThreadPool& pool, bool* keep) {
  for_each_item(pool, batch * num_heads, [&](int, int64_t item) {
    constexpr int kCols = 256;
    uint32_t words[Dropout::row_bits_size(kCols)];
    const Dropout dropout(p, item / num_heads, item % num_heads, nullptr);
    const bool all = dropped_of_65536(p.p) >= 65536;
    for (int64_t i = 0; i < seqlen_q; i++)
      for (int64_t j = 0; j < seqlen_kv; j += kCols) {
        const int cols = int(min_of(int64_t(kCols), seqlen_kv - j));
        bool* to = keep + (item * seqlen_q + i) * seqlen_kv + j;
        if (p.p <= 0) {
          memset(to, 1, cols);
          continue;
        }
        const uint32_t* bits = dropout.row_bits(i, j, cols, words);
        for (int k = 0; k < cols; k++) to[k] = !all && bits[k] >= dropout.threshold;
      }
  });
}

void mask_dense(const MaskParams& p, int64_t batch, int64_t seqlen_q, int64_t seqlen_kv, bool* visible) {
  for (int64_t b = 0; b < batch; b++) {
    const RowMask mask(p, b, seqlen_q, seqlen_kv);
    for (int64_t i = 0; i < seqlen_q; i++) {
      const RowKeys row = mask.row(i);
      for (int64_t j = 0; j < seqlen_kv; j++) *visible++ = contains(row, int(j));
    }
  }
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
