// Integer arithmetic of sizes. Torch-free, for hosts and kernels.
#pragma once
#include <cstdint>

namespace weft {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace weft
