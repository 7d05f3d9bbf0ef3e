#pragma once
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and how dropout counts with it.
//
// Key words: low and high half of the seed. Counter words: (key position / 4, query position / 2, head, batch item). Element (query, key)
// takes word `key % 4`, its low 16 bits where the query position is even and its high 16 bits where it is odd, and is dropped where
// these are below round(p * 65536).

#include <stdint.h>
#include "host_device.h"
#include "params.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

HOST_DEVICE void philox(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; round++, key0 += kPhiloxW0, key1 += kPhiloxW1) {
    const uint64_t p0 = uint64_t(kPhiloxM0) * counter[0], p1 = uint64_t(kPhiloxM1) * counter[2];
    counter[0] = uint32_t(p1 >> 32) ^ counter[1] ^ key0;
    counter[1] = uint32_t(p1);
    counter[2] = uint32_t(p0 >> 32) ^ counter[3] ^ key1;
    counter[3] = uint32_t(p0);
  }
}

// How many of 65536 values of the 16 bits mean "dropped".
HOST_DEVICE int64_t dropped_of_65536(double p) { return int64_t(p * 65536 + 0.5); }
// What kept weights are multiplied by: 1 / (1 - p) of the quantised p, and 0 where everything is dropped.
HOST_DEVICE double inverse_keep_of(double p) {
  const int64_t dropped = dropped_of_65536(p);
  return dropped >= 65536 ? 0.0 : 65536.0 / double(65536 - dropped);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
