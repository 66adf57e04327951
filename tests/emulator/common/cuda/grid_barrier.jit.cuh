// csrc/common/cuda/grid_barrier.jit.cuh on a processor.
#pragma once

namespace weft {

inline void meet(unsigned* arrived, unsigned& expected) {
  expected += gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    ++*arrived;
    while (*arrived < expected) emulator::yield();
  }
  __syncthreads();
}

inline unsigned seen(const unsigned* flag) {
  return *flag;
}

}  // namespace weft
