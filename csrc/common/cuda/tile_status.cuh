// What blocks tell each other that take tiles in turn: words of global memory (words.jit.cuh),
// each of which says all there is to say.
#pragma once
#include <cstdint>

#include "common/cuda/words.jit.cuh"

namespace weft {

// The next tile in turn. Whoever has one is running, so that all tiles before it are taken by blocks that run, too.
__device__ __forceinline__ int64_t take_tile(void* counter) {
  return int64_t(atomicAdd(static_cast<unsigned long long*>(counter), 1ull));
}
// Between two looks: constant polling delays the word that it polls, and takes the multiprocessor from those who work.
template <int kNanoseconds>
__device__ __forceinline__ void rest() {
  __nanosleep(kNanoseconds);
}

}  // namespace weft
