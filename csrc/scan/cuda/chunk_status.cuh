// What blocks that take tiles in turn tell each other: words in global memory, and one status per tile that says which
// of them are there.
#pragma once
#include <cstdint>

namespace weft::scan {

constexpr uint32_t kTotal = 1;  // the tile's totals are there
constexpr uint32_t kState = 2;  // the state after the tile is

// Through L2: a line of L1 could be older than the status.
__device__ __forceinline__ double get_word(const double* from) {
  return __ldcg(from);
}
__device__ __forceinline__ void put_word(double* to, double word) {
  __stcg(to, word);
}
// By one lane behind a __syncwarp: what the warp has put before is there for whoever sees the status.
__device__ __forceinline__ void publish_status(uint32_t* status, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(status), "r"(value) : "memory");
}
// The warp may get what a status says behind another __syncwarp.
__device__ __forceinline__ uint32_t look_at_status(const uint32_t* status) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(status) : "memory");
  return value;
}
// The next tile in turn. Whoever has one is running, so that all tiles before it are taken by blocks that run, too.
__device__ __forceinline__ int64_t take_tile(unsigned long long* counter) {
  return int64_t(atomicAdd(counter, 1ull));
}

}  // namespace weft::scan
