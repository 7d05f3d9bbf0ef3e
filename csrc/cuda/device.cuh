#pragma once
// What a kernel asks of the device: tensor cores, ldmatrix, asynchronous copies, conversions. nvcc sees wrappers of inline PTX, any other compiler
// an emulator of the same names (tests/native/simt/simt.h), so that a kernel is one source for both.

#include <stddef.h>
#include <stdint.h>

namespace simt {
struct bf16 {
  uint16_t u;
};
struct f16 {
  uint16_t u;
};
}  // namespace simt
using simt::bf16;
using simt::f16;

#if !defined(__CUDACC__)
#include "simt.h"
#else

#define SIMT_EMULATED 0
#define SIMT_DEVICE __device__ __forceinline__
#define SIMT_DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define SIMT_SHARED(T, name, ...) __shared__ T name __VA_ARGS__
// More than 48 KB of shared memory have to be asked for.
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                                                               \
  do {                                                                                                                                            \
    auto simt_kernel = kernel;                                                                                                                    \
    if (shared_bytes > 48 * 1024) cudaFuncSetAttribute((const void*)simt_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)); \
    simt_kernel<<<grid, block, shared_bytes, (cudaStream_t)(stream)>>>(__VA_ARGS__);                                                              \
  } while (0)

namespace simt {

SIMT_DEVICE uint32_t smem_u32(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Four 8 x 8 matrices of 16-bit elements, lane = 4 g + t: lane i gives the address of row i % 8 of matrix i / 8; r[j] receives, of matrix j,
// row g, columns 2 t + {0, 1}, or with _trans rows 2 t + {0, 1}, column g.
SIMT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
SIMT_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
SIMT_DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void* p) { ldmatrix_x4(r, smem_u32(p)); }
SIMT_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void* p) { ldmatrix_x4_trans(r, smem_u32(p)); }

// d += A B for A of 16 x 16, B of 16 x 8. a[j]: row g + 8 (j % 2), columns 2 t + 8 (j / 2) + {0, 1}; b0, b1: rows 2 t + {0, 1} and 2 t + {8, 9}, column g;
// d[i]: row g + 8 (i / 2), column 2 t + i % 2.
template <class T> SIMT_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> SIMT_DEVICE void mma_16816<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> SIMT_DEVICE void mma_16816<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += A B for A of 16 x 8, B of 8 x 8. a[j]: row g + 8 (j % 2), column t + 4 (j / 2); b0, b1: rows t and t + 4, column g; d as above.
SIMT_DEVICE void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes; pred == false writes zeros and does not read src.
SIMT_DEVICE void cp_async16(void* dst, const void* src, bool pred) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;\n" ::"r"(smem_u32(dst)), "l"(src), "r"(pred ? 16 : 0) : "memory");
}
SIMT_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most the N youngest groups are on their way.
template <int N> SIMT_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }

// 2^x and log2(x); what is below the normal numbers is 0.
SIMT_DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
SIMT_DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within one unit of the last place; 0 where that is below the normal numbers.
SIMT_DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

SIMT_DEVICE float to_float(bf16 h) { return __uint_as_float((uint32_t)h.u << 16); }
SIMT_DEVICE float to_float(f16 h) {
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(h.u));
  return f;
}
SIMT_DEVICE float to_float(float x) { return x; }
SIMT_DEVICE double to_float(double x) { return x; }
// To nearest, ties to even.
template <class T> SIMT_DEVICE T from_float(float x);
template <> SIMT_DEVICE bf16 from_float<bf16>(float x) {
  bf16 h;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(h.u) : "f"(x));
  return h;
}
template <> SIMT_DEVICE f16 from_float<f16>(float x) {
  f16 h;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(h.u) : "f"(x));
  return h;
}
template <> SIMT_DEVICE float from_float<float>(float x) { return x; }
template <class T> SIMT_DEVICE uint32_t pack2(float lo, float hi);
template <> SIMT_DEVICE uint32_t pack2<bf16>(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
template <> SIMT_DEVICE uint32_t pack2<f16>(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
// To nearest, ties away from zero; the low 13 bits are 0 but for NaN.
SIMT_DEVICE uint32_t to_tf32(float x) {
  uint32_t u;
  asm("cvt.rna.tf32.f32 %0,%1;" : "=r"(u) : "f"(x));
  return u;
}

// Cuts the dynamic shared memory into arrays, one behind the other.
struct Carver {
  unsigned char* p;
  SIMT_DEVICE explicit Carver(unsigned char* base) : p(base) {}
  template <class T> SIMT_DEVICE T* take(size_t count) {
    T* array = (T*)p;
    p += count * sizeof(T);
    return array;
  }
};

}  // namespace simt
#endif
