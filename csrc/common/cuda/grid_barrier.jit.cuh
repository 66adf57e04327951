// A barrier of all blocks of a cooperative launch; 0.95 us on an H200.
#pragma once

namespace weft {

// All blocks of a cooperative launch are here, and see what all have written. `expected` is what the counter, 0 at the
// launch, has then; before a thread's first barrier it is 0. The barriers of the block carry what its other threads
// wrote to the release and what the acquire saw to them; a fence of its own before or after would wait once more.
__device__ __forceinline__ void meet(unsigned* arrived, unsigned& expected) {
  expected += gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    } while (int(seen - expected) < 0);
  }
  __syncthreads();
}

// What a flag is that threads set before a barrier.
__device__ __forceinline__ unsigned seen(const unsigned* flag) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

}  // namespace weft
