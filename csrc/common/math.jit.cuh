// Nonlinearities and exact power-of-two scaling for the recurrent kernels, those that NVRTC compiles among them.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

__device__ __forceinline__ double sigmoid(double x) {
  return 1.0 / (1.0 + exp(-x));
}
__device__ __forceinline__ double hyperbolic_tangent(double x) {
  return tanh(x);
}

// Two ulp each from exp2 and the reciprocal. exp(-x) = inf gives 0, NaN stays NaN.
__device__ __forceinline__ float sigmoid(float x) {
  return fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * x));
}

// 1 - 2 / (1 + exp(2 x)) loses relative precision to cancellation near 0, where an odd polynomial (Cephes' tanhf) takes
// over. Both are computed: a branch would diverge, and a time step is one chain of latencies.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float large = fmaf(-2.0f, fast_reciprocal(1.0f + fast_exp2(2.8853900817779268f * x)), 1.0f);
  const float z = x * x;
  float p = fmaf(z, -5.70498872745e-3f, 2.06390887954e-2f);
  p = fmaf(z, p, -5.37397155531e-2f);
  p = fmaf(z, p, 1.33314422036e-1f);
  p = fmaf(z, p, -3.33332819422e-1f);
  const float small = fmaf(z * p, x, x);
  return fabsf(x) < 0.625f ? small : large;
}

// e with |x| in [2^e, 2^(e+1)), for normal x.
__device__ __forceinline__ int binary_exponent(float x) {
  return int((__float_as_uint(x) >> 23) & 255u) - 127;
}

}  // namespace weft
