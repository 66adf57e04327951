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
  __device__ __forceinline__ Float16(float x) : bits(float_to_half(x)) {}
  __device__ __forceinline__ operator float() const { return half_to_float(bits); }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16() = default;
  __device__ __forceinline__ BFloat16(float x) : bits(float_to_bfloat16(x)) {}
  __device__ __forceinline__ operator float() const { return bfloat16_to_float(bits); }
};

}  // namespace weft
