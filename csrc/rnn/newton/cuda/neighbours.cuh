// What the walkers of a sequence's chunks tell each other, in global memory that begins as zeros: words that carry half
// of a number, or all of a float, beside a tag that says which message they are of, so that nothing has to be ordered
// before anything else; and a counter where all of a sequence meet.
#pragma once
#include <cstdint>

namespace weft::rnn {

__device__ __forceinline__ uint64_t tagged(uint32_t tag, uint32_t bits) {
  return uint64_t(tag) << 32 | bits;
}
__device__ __forceinline__ void put_tagged(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ uint64_t look_at_tagged(const uint64_t* from) {
  uint64_t seen;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory");
  return seen;
}

__device__ __forceinline__ void add_to_counter(uint64_t* counter, uint64_t x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(counter), "l"(x) : "memory");
}

// Between two looks: whoever waits leaves the multiprocessor to those who walk.
template <int kNanoseconds>
__device__ __forceinline__ void rest() {
  __nanosleep(kNanoseconds);
}

}  // namespace weft::rnn
