// Integer arithmetic of sizes. Torch-free, for hosts and kernels, those that NVRTC compiles among them.
#pragma once
#ifdef __CUDACC_RTC__
using int64_t = long;  // there are no headers
static_assert(sizeof(int64_t) == 8);
#else
#include <cstdint>
#endif

namespace weft {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace weft
