// zeros_changed on the CPU.
#include "sparse/zeros_changed.h"

#include <torch/library.h>

#include <type_traits>

namespace weft::sparse {
namespace {

// All formats but half are compared as numbers; a half is zero where its bits are, but for the sign.
template <typename T>
bool zeros_differ(const StoredZeros& part) {
  const T* weight = static_cast<const T*>(part.weight);
  int64_t different = 0;
  for (int64_t i = 0; i < part.size; ++i) {
    bool nonzero;
    if constexpr (std::is_same_v<T, uint16_t>) {
      nonzero = (weight[i] & 0x7fff) != 0;
    } else {
      nonzero = weight[i] != 0;
    }
    different += nonzero != part.stored[i];
  }
  return different > 0;
}

void compare_cpu(const std::vector<StoredZeros>& parts, int element_size, int* changed) {
  for (const StoredZeros& part : parts) {
    const bool found = element_size == 2   ? zeros_differ<uint16_t>(part)
                       : element_size == 4 ? zeros_differ<float>(part)
                                           : zeros_differ<double>(part);
    if (found) *changed = 1;
  }
}

at::Tensor zeros_cpu(at::TensorList weights, at::TensorList stored) {
  return zeros_changed_forward(compare_cpu, weights, stored);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("zeros_changed", zeros_cpu);
}

}  // namespace weft::sparse
