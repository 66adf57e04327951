// Numbers of matrices that nobody has written, from what their layers have kept: see csr_chain.h, layer_chain.
#pragma once
#include "common/element.cuh"

namespace weft::sparse {

// Of a diagonal.
template <typename T>
__device__ __forceinline__ T diagonal_number(const T* values, int64_t at, int64_t reads) {
  const T number = values[at];
  return reads == 0 ? number : from_acc<T>(to_acc(number) <= acc_t<T>(0) ? acc_t<T>(0) : acc_t<T>(1));
}

// Of the output at `at`, and an element in `row`.
template <typename T>
__device__ __forceinline__ T picked(const void* values, int64_t at, int64_t row, int64_t plane) {
  return from_acc<T>(static_cast<const int64_t*>(values)[at] == row % plane ? acc_t<T>(1) : acc_t<T>(0));
}

}  // namespace weft::sparse
