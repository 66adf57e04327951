// A product of addresses, in PTX, for nvcc and for NVRTC. tests/emulator has the same name for a processor.
#pragma once

namespace weft {

// With what it is added to one instruction. Of a factor that it knows the compiler makes shifts and several sums.
__device__ __forceinline__ long long wide_product(int x, int y) {
  long long product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}

}  // namespace weft
