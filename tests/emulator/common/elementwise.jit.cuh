// csrc/common/elementwise.jit.cuh on a processor.
#pragma once
#include <cmath>

#include "common/cuda/ptx.jit.cuh"

using std::erf, std::exp, std::fabs, std::log, std::log1p, std::sqrt, std::sin, std::cos;

namespace weft {
template <typename T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
template <typename T>
T hyperbolic_tangent(T x) {
  return std::tanh(x);
}
inline float infinite() {
  return INFINITY;
}
inline float not_a_number() {
  return NAN;
}

struct Float16 {
  unsigned short bits;
  Float16() = default;
  Float16(float x) : bits(float_to_half(x)) {}
  operator float() const { return half_to_float(bits); }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16() = default;
  BFloat16(float x) : bits(float_to_bfloat16(x)) {}
  operator float() const { return bfloat16_to_float(bits); }
};

}  // namespace weft
