#pragma once
// Who computes: class Backend runs the kernels of one call and has the same members for every backend (device.h lists them).

#if defined(TILED_ATTENTION_BACKEND_CUDA) || defined(TILED_ATTENTION_BACKEND_EMULATED)
#include "backend_cuda.h"
#else
#define TILED_ATTENTION_BACKEND_CPU
#include "backend_cpu.h"
#endif
