// zeros_changed on the CPU.
#include "sparse/zeros_changed.h"

#include <torch/library.h>

#include <type_traits>

namespace weft::sparse {
namespace {

// All formats but half are compared as numbers; a half is zero where its bits are, but for the sign.
template <typename T>
bool differs(const StoredZeros& part) {
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

void run_cpu(const std::vector<StoredZeros>& parts, int element_size, int* changed) {
  for (const StoredZeros& part : parts) {
    const bool found = element_size == 2   ? differs<uint16_t>(part)
                       : element_size == 4 ? differs<float>(part)
                                           : differs<double>(part);
    if (found) *changed = 1;
  }
}

at::Tensor forward_cpu(at::TensorList weights, at::TensorList stored) {
  return zeros_changed_forward(run_cpu, weights, stored);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("zeros_changed", forward_cpu);
}

}  // namespace weft::sparse
