// What blocks that take tiles in turn tell each other in global memory that begins as zeros: words, each of which says
// by itself whether it is there, and one status per tile that says which of them to ask for.
#pragma once
#include "common/cuda/tile_status.cuh"

namespace weft::scan {

constexpr uint32_t kTotal = 1;  // the tile's total is on its way
constexpr uint32_t kState = 2;  // so is the state after it

// The bits of a signalling NaN, which no arithmetic makes: a word with these turned is never zero.
constexpr uint64_t kTurned = 0x7ff0'5765'6674'0001;

__device__ __forceinline__ void put_word(uint64_t* to, double word) {
  store_word(to, uint64_t(__double_as_longlong(word)) ^ kTurned);
}
__device__ __forceinline__ double to_word(uint64_t seen) {
  return __longlong_as_double(int64_t(seen ^ kTurned));
}
// The word, of which `seen` has been seen.
__device__ __forceinline__ double wait_for_word(const uint64_t* from, uint64_t seen) {
  while (seen == 0) seen = load_word(from);
  return to_word(seen);
}

}  // namespace weft::scan
