// The choice of a kernel's types and of its lanes per row.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "sparse/types.h"

namespace weft::sparse {

// Calls f with null pointers of the index and the element type.
template <typename F>
void dispatch(bool wide, DType dtype, F&& f) {
  with_index(wide, [&](auto* i) { with_element<__half, __nv_bfloat16>(dtype, [&](auto* t) { f(i, t); }); });
}

// Calls f with an integral constant: 1, 4 or 32, the largest that is not above `lanes`.
template <typename F>
void with_lanes(int lanes, F&& f) {
  if (lanes >= 32) return f(std::integral_constant<int, 32>());
  if (lanes >= 4) return f(std::integral_constant<int, 4>());
  return f(std::integral_constant<int, 1>());
}

}  // namespace weft::sparse
