// Where all blocks of a grid meet whose blocks are resident at once: at a counter in L2, about a microsecond, or, where
// they are one cluster, at its barrier. What a block has written before it arrives is seen, by loads that bypass L1
// (ld.cg), of the others after they have waited.
#pragma once

namespace weft::sparse {

struct GridBarrier {
  unsigned* counter;  // zero at the launch; null: the grid is one cluster
  unsigned round = 0;

  __device__ __forceinline__ void arrive() {
    if (counter) {
      __syncthreads();
      round += gridDim.x;
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1u);
      }
    } else {
#if __CUDA_ARCH__ >= 900
      asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#else
      __trap();
#endif
    }
  }

  __device__ __forceinline__ void wait() {
    if (counter) {
      if (threadIdx.x == 0) {
        unsigned seen;
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < round);
      }
      __syncthreads();
    } else {
#if __CUDA_ARCH__ >= 900
      asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
      __trap();
#endif
    }
  }
};

}  // namespace weft::sparse
