// From tensors to what kernels take.
#pragma once
#include <ATen/core/Tensor.h>

#include "common/dtype.h"

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

// Of a tensor of one of these types.
inline DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kComplexFloat:
      return DType::c64;
    default:
      return DType::c128;
  }
}
constexpr at::ScalarType scalar_type(DType dtype) {
  constexpr at::ScalarType kTypes[] = {at::kHalf,   at::kBFloat16,     at::kFloat,
                                       at::kDouble, at::kComplexFloat, at::kComplexDouble};
  return kTypes[int(dtype)];
}

}  // namespace weft
