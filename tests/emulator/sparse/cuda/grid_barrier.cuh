// csrc/sparse/cuda/grid_barrier.cuh on a processor.
#pragma once

namespace weft::sparse {

inline void meet(unsigned* counter, unsigned& round) {
  __syncthreads();
  round += gridDim.x;
  if (threadIdx.x == 0) {
    ++*counter;
    while (*counter < round) emulator::yield();
  }
  __syncthreads();
}

}  // namespace weft::sparse
