// Argument checks: TORCH_CHECK_VALUE is a ValueError in Python, TORCH_CHECK_TYPE a TypeError. Every message names the
// op, the argument, what was expected and what came.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace weft {

// The shape must be `expected`, described to the user as `layout`, e.g. "(T, B, H)".
inline void check_shape(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef expected,
                        const char* layout) {
  TORCH_CHECK_VALUE(t.sizes() == expected, op, ": ", name, " must be ", layout, " = ", expected, ", got ", t.sizes());
}

// Floating dtype among fp16, bf16, fp32 and fp64.
inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble, op, ": ",
                   name, " must be float16, bfloat16, float32 or float64, got ", type);
}

// Same dtype and device as `like`.
inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* like_name,
                       const at::Tensor& like) {
  TORCH_CHECK_TYPE(t.scalar_type() == like.scalar_type(), op, ": ", name, " must have the dtype of ", like_name, ", ",
                   like.scalar_type(), ", got ", t.scalar_type());
  TORCH_CHECK(t.device() == like.device(), op, ": ", name, " must be on the device of ", like_name, ", ", like.device(),
              ", got ", t.device());
}

}  // namespace weft
