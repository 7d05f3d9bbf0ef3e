#pragma once
// The launches of exact attention that instances/ compiles, one file each.

#include "kernels.h"

namespace tiled_attention {
namespace cuda {

struct RowTable;

template <class T, int D, bool kFeatures>
void launch_attention_fwd(const AttentionParams&, const RowTable&, Stream);

}  // namespace cuda
}  // namespace tiled_attention
