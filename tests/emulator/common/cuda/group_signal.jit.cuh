// csrc/common/cuda/group_signal.jit.cuh on a processor.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

inline void group_signal(unsigned* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) ++*arrived;
}

inline void group_wait(unsigned* arrived, unsigned expected) {
  if (threadIdx.x == 0) {
    while (*arrived < expected) emulator::yield();
  }
  __syncthreads();
}

}  // namespace weft
