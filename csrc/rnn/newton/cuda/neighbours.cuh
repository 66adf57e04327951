// What the walkers of a sequence's chunks tell each other, in global memory that begins as zeros: words that carry half
// of a number, or all of a float, beside a tag that says which message they are of, so that nothing has to be ordered
// before anything else; and a counter where all of a sequence meet.
#pragma once
#include "common/cuda/tile_status.cuh"

namespace weft::rnn {

__device__ __forceinline__ uint64_t tagged(uint32_t tag, uint32_t bits) {
  return uint64_t(tag) << 32 | bits;
}

}  // namespace weft::rnn
