// csrc/common/cuda/mbarrier_arrivals.cuh for a processor; ptx.jit.cuh has mbarrier_init.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

inline void mbarrier_arrive(u32 barrier) {
  mbarrier_expect(barrier, 0);
  emulator::yield();
}
inline void mbarrier_wait_for_arrivals(u32 barrier, u32 parity) {
  mbarrier_wait(barrier, parity);
}

}  // namespace weft
