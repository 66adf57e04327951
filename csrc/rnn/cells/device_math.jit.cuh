// The math of a cell's step for one number of a GPU, see cells.h.
#pragma once

#include "common/math.jit.cuh"

namespace weft::rnn {

template <typename S>
struct DeviceMath {
  static constexpr S kOne = S(1);
  __device__ __forceinline__ static S sigmoid(S x) { return weft::sigmoid(x); }
  __device__ __forceinline__ static S tanh(S x) { return hyperbolic_tangent(x); }
  // The comparisons are false for NaN, which then passes.
  __device__ __forceinline__ static S relu(S x) { return x <= S(0) ? S(0) : x; }
  __device__ __forceinline__ static S where_positive(S y, S x) { return y <= S(0) ? S(0) : x; }
};

}  // namespace weft::rnn
