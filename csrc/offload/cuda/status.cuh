// What blocks that take tiles in turn tell each other: one 64-bit word per tile, which says all there is to say, so
// that no other memory has to be ordered with it.
#pragma once
#include <cstdint>

namespace weft::offload {

// A tile's word: what `bits` say of a count below 2^62.
constexpr uint64_t kOwnCount = uint64_t(1) << 62;  // of the tile alone
constexpr uint64_t kSumCount = uint64_t(2) << 62;  // of all tiles up to it
constexpr uint64_t kCountBits = kOwnCount - 1;

// Of a pair of tiles; each word by itself is whole. `p` is aligned to 16 bytes.
__device__ __forceinline__ void load_statuses(const uint64_t* p, uint64_t& first, uint64_t& second) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
__device__ __forceinline__ void store_status(uint64_t* p, uint64_t status) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(status) : "memory");
}
__device__ __forceinline__ void pause() {
  __nanosleep(100);
}
// The next tile in turn. Whoever has one is running, so that all tiles before it are taken by blocks that run, too.
__device__ __forceinline__ int64_t take_tile(uint64_t* counter) {
  return int64_t(atomicAdd(reinterpret_cast<unsigned long long*>(counter), 1ull));
}

}  // namespace weft::offload
