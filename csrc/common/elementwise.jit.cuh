// What the CUDA text of element-wise instructions (elementwise.def) calls.
#pragma once

#include "common/math.jit.cuh"

namespace weft {

__device__ __forceinline__ float infinite() {
  return __int_as_float(0x7f800000);
}
__device__ __forceinline__ float not_a_number() {
  return __int_as_float(0x7fc00000);
}

struct Float16 {
  unsigned short bits;
  Float16() = default;
  __device__ __forceinline__ Float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16() = default;
  __device__ __forceinline__ BFloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

}  // namespace weft
