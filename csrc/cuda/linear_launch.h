#pragma once
// How linear attention is cut into launches, and the functions that instances/ compiles, one dtype a file.

#include "../core/mask.h"
#include "../core/scratch.h"
#include "kernels.h"

namespace tiled_attention {
namespace cuda {

// Kept at a time, in bytes, for the states of chunks and what else a chunk keeps: a longer sequence is done in segments.
#ifndef LINEAR_KEPT_BYTES
#define LINEAR_KEPT_BYTES (int64_t(256) << 20)
#endif

template <class T> size_t linear_fwd_scratch_of(const LinearAttentionParams&);
template <class T> const char* linear_fwd_of(const LinearAttentionParams&, void* scratch, Stream);
template <class T> size_t linear_bwd_scratch_of(const LinearAttentionBackwardParams&);
template <class T> const char* linear_bwd_of(const LinearAttentionBackwardParams&, void* scratch, Stream);
template <class T> const char* linear_step_of(const LinearAttentionParams&, Stream);

constexpr const char* kLinearTooLarge = "more than 2^31 blocks of 64 tokens, 64 features and 64 value columns over all heads";

}  // namespace cuda
}  // namespace tiled_attention
