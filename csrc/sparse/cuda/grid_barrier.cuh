// Where all blocks of a cooperative launch meet: a counter in L2, about a microsecond.
#pragma once

namespace weft::sparse {

// `round` is what the counter, zero at the launch, has once all blocks are here; it is 0 before a block's first
// barrier. What a block has written is seen by loads that bypass L1 (ld.cg) of the others.
__device__ __forceinline__ void meet(unsigned* counter, unsigned& round) {
  __syncthreads();
  round += gridDim.x;
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < round);
  }
  __syncthreads();
}

}  // namespace weft::sparse
