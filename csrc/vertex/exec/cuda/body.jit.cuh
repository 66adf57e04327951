// What the bodies of kernels (csrc/vertex/program/source.h) read.
//   WEFT_VERTEX_TYPE   float or double, of registers; buffers may be narrower
#pragma once

#include "common/math.jit.cuh"
#include "vertex/exec/cuda/frontier.jit.cuh"

namespace {

using T = WEFT_VERTEX_TYPE;
using weft::vertex::BufferArgument;
using weft::vertex::FrontierArguments;
using weft::vertex::Many;

__device__ __forceinline__ float infinite() {
  return __int_as_float(0x7f800000);
}
__device__ __forceinline__ float not_a_number() {
  return __int_as_float(0x7fc00000);
}

__device__ __forceinline__ T from_lane(T x, int apart) {
  return __shfl_xor_sync(0xffffffffu, x, apart);
}

struct Float16 {
  unsigned short bits;
  __device__ __forceinline__ Float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct BFloat16 {
  unsigned short bits;
  __device__ __forceinline__ BFloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

// All blocks of a cooperative launch are here, and see what all have written. `expected` is what the counter, 0 at the
// launch, has then; before a thread's first barrier it is 0. The barriers of the block carry what its other threads
// wrote to the release and what the acquire saw to them; a fence of its own before or after would wait once more.
__device__ __forceinline__ void meet(unsigned* arrived, unsigned& expected) {
  expected += gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    } while (int(seen - expected) < 0);
  }
  __syncthreads();
}

}  // namespace

#define data(type, b) (static_cast<type*>(buffers.of[b].data))
#define stride(b) (buffers.of[b].stride)
