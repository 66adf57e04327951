// Exchange between the blocks of a grid, through global memory that stays in L2, without flags or barriers: the memory
// is filled with all-ones words beforehand, a pattern that no arithmetic result has (a NaN from arithmetic has another
// payload), every chunk of 16 bytes is published once, and a reader repeats its loads until no word of them is missing.
// An exchange costs 0.7 to 2 us on an H200. All blocks must be resident: launch cooperatively.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

__device__ __forceinline__ bool is_missing(uint4 v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

__device__ __forceinline__ void publish(void* to, uint4 chunk) {
  store_relaxed(to, chunk);
}

// Until none of a warp's chunks is missing. missing(): whether one of the lane's is; reload(): asks for all that are,
// at once, because one after the other costs a round trip each.
template <typename Missing, typename Reload>
__device__ __forceinline__ void wait_for_published(const Missing& missing, const Reload& reload) {
  while (__any_sync(~0u, missing())) reload();
}

}  // namespace weft
