// csrc/sparse/cuda/grid_barrier.cuh on a processor.
#pragma once

namespace weft::sparse {

struct GridBarrier {
  unsigned* counter;
  unsigned round = 0;

  void arrive() {
    __syncthreads();
    round += gridDim.x;
    if (threadIdx.x == 0) ++*counter;
  }

  void wait() {
    while (threadIdx.x == 0 && *counter < round) emulator::yield();
    __syncthreads();
  }
};

}  // namespace weft::sparse
