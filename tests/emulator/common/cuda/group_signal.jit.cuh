// csrc/common/cuda/group_signal.jit.cuh on a processor.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

inline void group_signal(unsigned* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) ++*arrived;
}

inline void group_wait(unsigned* arrived, unsigned expected) {
  if (threadIdx.x == 0) {
    while (*arrived < expected) emulator::yield();
  }
  __syncthreads();
}

// Here at once, because the block itself reads it after its next barrier; other blocks find it missing for as long as
// this one is slow.
template <typename Bits>
inline void store_bits(void* to, Bits bits) {
  if (bits == Bits(~Bits(0))) bits = Bits(~Bits(0)) >> 1;
  std::memcpy(to, &bits, sizeof(bits));
}
inline void store_published(float* to, float x) {
  store_bits<unsigned>(to, __float_as_uint(x));
}
inline void store_published(unsigned short* to, unsigned short bits) {
  store_bits<unsigned short>(to, bits);
}
template <typename E, typename Bits>
inline bool load_bits(const E* from, E (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(x) != 0) emulator::fail("misaligned access to what is published");
  std::memcpy(x, from, sizeof(x));
  Bits bits[4];
  std::memcpy(bits, x, sizeof(x));
  return std::any_of(bits, bits + 4, [](Bits b) { return b == Bits(~Bits(0)); });
}
inline bool load_published(const float* from, float (&x)[4]) {
  return load_bits<float, unsigned>(from, x);
}
inline bool load_published(const unsigned short* from, unsigned short (&x)[4]) {
  return load_bits<unsigned short, unsigned short>(from, x);
}

}  // namespace weft
