// Where all blocks of a grid meet whose blocks are resident at once: at a counter in L2, about a microsecond. What a
// block has written before it arrives is seen, by loads that bypass L1 (ld.cg), of the others after they have waited.
#pragma once

namespace weft::sparse {

struct GridBarrier {
  unsigned* counter;  // zero at the launch
  unsigned round = 0;

  __device__ __forceinline__ void arrive() {
    __syncthreads();
    round += gridDim.x;
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1u);
    }
  }

  __device__ __forceinline__ void wait() {
    if (threadIdx.x == 0) {
      unsigned seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      } while (seen < round);
    }
    __syncthreads();
  }
};

}  // namespace weft::sparse
