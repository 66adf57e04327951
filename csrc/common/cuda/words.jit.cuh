// What blocks that run at the same time tell each other through global memory, in PTX, for nvcc and for NVRTC.
// tests/emulator has the same names for a processor, where words arrive late.
#pragma once

#include "common/cuda/ptx.jit.cuh"

namespace weft {

// Words of 32 or 64 bits, each of which says by itself whether it is there, so that nothing is ordered with it.
template <typename W>
__device__ __forceinline__ W load_word(const W* p) {
  W word;
  if constexpr (sizeof(W) == 8) {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(p) : "memory");
  } else {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(p) : "memory");
  }
  return word;
}
// Two neighbours of 64 bits, aligned to 16 bytes; each by itself is whole.
template <typename W>
__device__ __forceinline__ void load_words(const W* p, W& first, W& second) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}
template <typename W>
__device__ __forceinline__ void store_word(W* p, W word) {
  if constexpr (sizeof(W) == 8) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(word) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(word) : "memory");
  }
}
template <typename W>
__device__ __forceinline__ void add_to_word(W* p, W x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

// One more at a counter; who acquires it sees what this thread has written or seen.
__device__ __forceinline__ void release_one(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ unsigned acquire(const unsigned* counter) {
  unsigned seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}
// Both: how many there were before.
__device__ __forceinline__ unsigned arrive(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Elements that are waited for themselves: memory is filled with ones bits beforehand, and a reader repeats its loads
// until no element has them. What is stored may be anything: a NaN of these bits becomes another. Of 4 or 2 bytes.
__device__ __forceinline__ void store_published(float* to, float x) {
  u32 bits = __float_as_uint(x);
  if (bits == ~0u) bits = 0x7fffffffu;
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits) : "memory");
}
__device__ __forceinline__ void store_published(unsigned short* to, unsigned short bits) {
  if (bits == 0xffffu) bits = 0x7fffu;
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(bits) : "memory");
}

// Four neighbours, aligned to their size; whether one is missing.
__device__ __forceinline__ bool load_published(const float* from, float (&x)[4]) {
  const uint4 v = load_relaxed(from);
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}
__device__ __forceinline__ bool load_published(const unsigned short* from, unsigned short (&x)[4]) {
  u32 low, high;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "l"(from) : "memory");
  x[0] = low & 0xffffu, x[1] = low >> 16, x[2] = high & 0xffffu, x[3] = high >> 16;
  return x[0] == 0xffffu || x[1] == 0xffffu || x[2] == 0xffffu || x[3] == 0xffffu;
}

}  // namespace weft
