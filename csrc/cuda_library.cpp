// What the CUDA library tells about itself. It is loaded beside the CPU's, which has the schemas of all operators.

#include <string>

#include "backend.h"

namespace tiled_attention {
namespace {

std::string architectures() { return cuda::architectures(); }

void poison(bool on) { poison_buffers = on; }

}  // namespace
}  // namespace tiled_attention

STABLE_TORCH_LIBRARY_FRAGMENT(tiled_attention, m) {
  m.def("_cuda_architectures() -> str");
  m.def("_cuda_poison(bool on) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tiled_attention, CompositeExplicitAutograd, m) {
  m.impl("_cuda_architectures", TORCH_BOX(&tiled_attention::architectures));
  m.impl("_cuda_poison", TORCH_BOX(&tiled_attention::poison));
}
