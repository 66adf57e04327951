// Barriers in shared memory, 8 bytes each, whose phase ends when so many threads have arrived (mbarrier). Who waits
// does not arrive, so that the warps of a block need not be at the same place, nor run at the same speed. From compute
// capability 8.0. tests/emulator has the same names for a processor.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What the thread has written, or seen, before is seen after the wait.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of this parity, the first being even: of the present one, or of the one before.
__device__ __forceinline__ void mbarrier_wait_for_arrivals(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  }
}

}  // namespace weft
