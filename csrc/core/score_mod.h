#pragma once
// Score modifiers, each formula once. `T` is float or double in a CUDA thread and a SIMD vector on the CPU; tanh and abs are found
// by argument-dependent lookup.

#include "host_device.h"

namespace tiled_attention {
inline namespace KERNEL_ISA {

// softcap * tanh(score / softcap), in two steps: the tanh is kept because the derivative is 1 - tanh^2.
template <class T>
HOST_DEVICE T softcap_tanh(T score_over_cap) {
  return tanh(score_over_cap);
}
template <class T>
HOST_DEVICE T softcap_gradient(T grad, T tanh_of_score) {
  return grad - grad * tanh_of_score * tanh_of_score;
}

// ALiBi adds -slope * |query position - key position|.
template <class T>
HOST_DEVICE T alibi_distance(T query_position, T key_position) {
  return abs(query_position - key_position);
}

}  // namespace KERNEL_ISA
}  // namespace tiled_attention
