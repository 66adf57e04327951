// Exchange between the blocks of a cluster, through distributed shared memory, in rounds. In each round every block
// receives kBytes, in messages of 16 bytes to addresses that its senders choose, from itself too.
//
// Memory for two rounds suffices: a block that sends in round r + 2 has received all of round r + 1, which the others
// sent after they had read what came in round r. A round costs 0.4 to 1 us on an H200.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// kFirst: the number of the first round.
template <int kBytes, int kFirst = 0>
struct ClusterExchange {
  u32 barriers;  // shared memory of two barriers, 8 bytes each

  // start, wait and end are for all threads of all blocks.
  __device__ __forceinline__ void start() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        mbarrier_init(barrier(i));
        mbarrier_expect(barrier(i), kBytes);
      }
    }
    __syncthreads();
    cluster::barrier();
  }

  // Of this block in a round, for cluster::send, which takes its address in the block that receives.
  __device__ __forceinline__ u32 barrier(int round) const { return barriers + u32(round & 1) * 8; }

  // What has come in the round is seen after.
  __device__ __forceinline__ void wait(int round) const {
    mbarrier_wait<true>(barrier(round), u32((round - kFirst) >> 1) & 1);
    if (threadIdx.x == 0) mbarrier_expect(barrier(round), kBytes);
  }

  // A block must not leave while others may send to it.
  __device__ __forceinline__ void end() const { cluster::barrier(); }
};

}  // namespace weft
