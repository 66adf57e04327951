// csrc/common/cuda/wide_product.jit.cuh for a processor.
#pragma once

namespace weft {

inline long long wide_product(int x, int y) {
  return static_cast<long long>(x) * y;
}

}  // namespace weft
