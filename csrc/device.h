#pragma once
// The same operators are compiled once per backend:
//   CPU        tensors in host memory, kernels of cpu/
//   CUDA       tensors in CUDA memory, kernels of cuda/            TILED_ATTENTION_BACKEND_CUDA
//   emulated   tensors in host memory, kernels of cuda/ run by g++  TILED_ATTENTION_BACKEND_EMULATED, for tests
// device_*.h is where tensors lie, backend_*.h who computes.

#ifdef TILED_ATTENTION_BACKEND_CUDA
#include "device_cuda.h"
#else
#include "device_cpu.h"
#endif
