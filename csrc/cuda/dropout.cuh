#pragma once
// Which pairs dropout keeps: the counters of core/philox.h.

#include "../core/params.h"
#include "../core/philox.h"
#include "device.cuh"

namespace tiled_attention {
namespace cuda {

// Of one head of one batch item.
struct Dropout {
  bool active;
  uint32_t seed_low = 0, seed_high = 0, head = 0, batch = 0, dropped = 0;
  int64_t query_offset = 0, key_offset = 0;
  double inverse_keep = 1;

  SIMT_DEVICE Dropout(const DropoutParams& p, int64_t batch_item, int64_t head_index) : active(p.p > 0) {
    if (!active) return;
    const uint64_t seed = uint64_t(*p.seed);
    seed_low = uint32_t(seed), seed_high = uint32_t(seed >> 32);
    head = uint32_t(head_index + p.head_offset), batch = uint32_t(batch_item + p.batch_offset);
    dropped = uint32_t(dropped_of_65536(p.p));
    query_offset = p.query_offset, key_offset = p.key_offset;
    inverse_keep = inverse_keep_of(p.p);
  }

  // The four words of the pairs (query / 2 * 2 + {0, 1}, key / 4 * 4 + {0, 1, 2, 3}), positions being absolute.
  SIMT_DEVICE void words(int64_t query, int64_t key, uint32_t (&counter)[4]) const {
    counter[0] = uint32_t(key / 4), counter[1] = uint32_t(query / 2), counter[2] = head, counter[3] = batch;
    philox(counter, seed_low, seed_high);
  }
  SIMT_DEVICE bool keeps(uint32_t word, int64_t query) const { return (query % 2 ? word >> 16 : word & 0xffff) >= dropped; }

  SIMT_DEVICE bool keeps(int64_t query, int64_t key) const {
    uint32_t counter[4];
    query += query_offset, key += key_offset;
    words(query, key, counter);
    const int word = int(key % 4);
    return keeps(word == 0 ? counter[0] : word == 1 ? counter[1] : word == 2 ? counter[2] : counter[3], query);
  }
  // For key and key + 1.
  SIMT_DEVICE void keeps_two(int64_t query, int64_t key, bool& first, bool& second) const {
    if ((key + key_offset) % 4 == 3) {
      first = keeps(query, key), second = keeps(query, key + 1);
      return;
    }
    uint32_t counter[4];
    query += query_offset, key += key_offset;
    words(query, key, counter);
    const int word = int(key % 4);
    first = keeps(word == 0 ? counter[0] : word == 1 ? counter[1] : counter[2], query);
    second = keeps(word == 0 ? counter[1] : word == 1 ? counter[2] : counter[3], query);
  }
};

}  // namespace cuda
}  // namespace tiled_attention
