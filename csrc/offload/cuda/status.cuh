// What blocks that take tiles in turn tell each other of their counts: a word per tile.
#pragma once
#include "common/cuda/tile_status.cuh"

namespace weft::offload {

// A tile's word: what `bits` say of a count below 2^62.
constexpr uint64_t kOwnCount = uint64_t(1) << 62;  // of the tile alone
constexpr uint64_t kSumCount = uint64_t(2) << 62;  // of all tiles up to it
constexpr uint64_t kCountBits = kOwnCount - 1;

}  // namespace weft::offload
