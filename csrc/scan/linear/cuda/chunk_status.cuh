// What blocks that take tiles in turn tell each other in global memory that begins as zeros: words, each of which says
// by itself whether it is there, and one status per tile that says which of them to ask for.
#pragma once
#include <cstdint>

namespace weft::scan {

constexpr uint32_t kTotal = 1;  // the tile's total is on its way
constexpr uint32_t kState = 2;  // so is the state after it

// The bits of a signalling NaN, which no arithmetic makes: a word with these turned is never zero.
constexpr uint64_t kTurned = 0x7ff0'5765'6674'0001;

__device__ __forceinline__ void put_word(uint64_t* to, double word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(__double_as_longlong(word)) ^ kTurned));
}
// Zero where there is nothing yet.
__device__ __forceinline__ uint64_t look_at_word(const uint64_t* from) {
  uint64_t seen;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(from));
  return seen;
}
__device__ __forceinline__ double to_word(uint64_t seen) {
  return __longlong_as_double(int64_t(seen ^ kTurned));
}
// The word, of which `seen` has been seen.
__device__ __forceinline__ double wait_for_word(const uint64_t* from, uint64_t seen) {
  while (seen == 0) seen = look_at_word(from);
  return to_word(seen);
}
__device__ __forceinline__ void publish_status(uint32_t* status, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(status), "r"(value));
}
__device__ __forceinline__ uint32_t look_at_status(const uint32_t* status) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(status));
  return value;
}
// The next tile in turn. Whoever has one is running, so that all tiles before it are taken by blocks that run, too.
__device__ __forceinline__ int64_t take_tile(unsigned long long* counter) {
  return int64_t(atomicAdd(counter, 1ull));
}

}  // namespace weft::scan
