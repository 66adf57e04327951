// csrc/sparse/cuda/grid_barrier.cuh on a processor.
#pragma once

namespace weft::sparse {

struct GridBarrier {
  unsigned* counter;
  unsigned round = 0;

  void arrive() {
    if (!counter) return;
    __syncthreads();
    round += gridDim.x;
    if (threadIdx.x == 0) ++*counter;
  }

  void wait() {
    if (!counter) return emulator::meet(emulator::current->block->cluster->meeting);
    while (threadIdx.x == 0 && *counter < round) emulator::yield();
    __syncthreads();
  }
};

}  // namespace weft::sparse
