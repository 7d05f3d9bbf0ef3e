#pragma once
// The only place that knows which compiler is reading the core headers.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HOST_DEVICE inline
#endif

// Every core header lives in `inline namespace KERNEL_ISA`, so the copies compiled for different instruction sets have
// different symbols and the linker cannot hand one of them to a CPU that lacks the instructions.
#ifndef KERNEL_ISA
#define KERNEL_ISA baseline
#endif
