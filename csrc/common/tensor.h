// From tensors to what kernels take.
#pragma once
#include <ATen/core/Tensor.h>

namespace weft {

// Null for a tensor that is undefined or has no elements: nothing may be read or written through it.
template <typename scalar>
const scalar* pointer(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.const_data_ptr<scalar>() : nullptr;
}
template <typename scalar>
scalar* mutable_pointer(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.mutable_data_ptr<scalar>() : nullptr;
}

}  // namespace weft
