// The element types of tensors, as kernels are told of them when they run. Torch- and CUDA-free.
#pragma once
#include <cstddef>
#include <cstdint>

namespace weft {

enum class DType : int32_t { f16, bf16, f32, f64, c64, c128 };  // c: pairs of f32, of f64

constexpr size_t element_size(DType dtype) {
  constexpr size_t kSizes[] = {2, 2, 4, 8, 8, 16};
  return kSizes[int(dtype)];
}
constexpr bool is_half(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16;
}
constexpr bool is_complex(DType dtype) {
  return dtype == DType::c64 || dtype == DType::c128;
}

// Calls f with a null pointer of a real element type; the half types are those of the host or of the device.
template <typename Half, typename BFloat16, typename F>
void with_element(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f(static_cast<Half*>(nullptr));
    case DType::bf16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    default:
      return f(static_cast<double*>(nullptr));
  }
}

}  // namespace weft
