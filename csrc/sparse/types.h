// Element and index types of the sparse room's kernels, chosen when they run. Torch-free.
#pragma once
#include <cstdint>
#include <type_traits>

namespace weft::sparse {

enum class DType { f16, bf16, f32, f64 };

// Calls f with a null pointer of the index type.
template <typename F>
void with_index(bool wide, F&& f) {
  if (wide) {
    f(static_cast<int64_t*>(nullptr));
  } else {
    f(static_cast<int32_t*>(nullptr));
  }
}

// Calls f with a null pointer of the element type; the half types are those of the host or of the device.
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

}  // namespace weft::sparse
