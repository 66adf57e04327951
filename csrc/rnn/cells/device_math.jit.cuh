// The math of a cell's step for one number of a GPU, see cells.h.
#pragma once

#include "common/math.jit.cuh"

namespace weft::rnn {

__device__ __forceinline__ double exponential(double x) {
  return exp(x);
}
__device__ __forceinline__ double logarithm_of_sigmoid(double x) {
  return (x < 0.0 ? x : 0.0) - log1p(exp(-fabs(x)));
}
__device__ __forceinline__ double quotient(double a, double b) {
  return a / b;
}
__device__ __forceinline__ float exponential(float x) {
  return fast_exp2(1.4426950408889634f * x);
}
// log(1 + u) of u = exp(-|x|) is 2 atanh(r) with r = u / (2 + u); above the square root of 2 half of 1 + u is taken, so
// that |r| < 0.172 and five terms do.
__device__ __forceinline__ float logarithm_of_sigmoid(float x) {
  const float u = fast_exp2(-1.4426950408889634f * fabsf(x));
  const bool large = u > 0.41421356f;
  const float r = (large ? u - 1.0f : u) * fast_reciprocal(large ? u + 3.0f : u + 2.0f), z = r * r;
  float p = fmaf(z, 0.22222222f, 0.28571429f);
  p = fmaf(z, p, 0.4f);
  p = fmaf(z, p, 0.66666667f);
  p = fmaf(z, p, 2.0f);
  return (x < 0.0f ? x : 0.0f) - fmaf(r, p, large ? 0.69314718f : 0.0f);
}
__device__ __forceinline__ float quotient(float a, float b) {
  return a * fast_reciprocal(b);
}

template <typename S>
struct DeviceMath {
  static constexpr S kOne = S(1);
  __device__ __forceinline__ static S like(S, double number) { return S(number); }
  __device__ __forceinline__ static S sigmoid(S x) { return weft::sigmoid(x); }
  __device__ __forceinline__ static S tanh(S x) { return hyperbolic_tangent(x); }
  // The comparisons are false for NaN, which then passes.
  __device__ __forceinline__ static S relu(S x) { return x <= S(0) ? S(0) : x; }
  __device__ __forceinline__ static S where_positive(S y, S x) { return y <= S(0) ? S(0) : x; }
  __device__ __forceinline__ static S positive(S y, S a, S b) { return y > S(0) ? a : b; }
  __device__ __forceinline__ static S exp(S x) { return exponential(x); }
  __device__ __forceinline__ static S log_sigmoid(S x) { return logarithm_of_sigmoid(x); }
  __device__ __forceinline__ static S ratio(S a, S b) { return quotient(a, b); }
};

}  // namespace weft::rnn
