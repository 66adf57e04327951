#pragma once
#include "emulator.h"
#include "rnn/cuda/types.jit.cuh"

#if TYPE == 0
inline float widen(Element x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return y;
}
inline Element narrow(float x) {
  const _Float16 y = x;
  Element z;
  std::memcpy(&z, &y, 2);
  return z;
}
#elif TYPE == 1
inline float widen(Element x) {
  return __uint_as_float(u32(x) << 16);
}
inline Element narrow(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : Element((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#else
inline float widen(Element x) {
  return x;
}
inline Element narrow(float x) {
  return x;
}
#endif

inline unsigned char* dynamic_shared_memory() {
  return emulator::current->block->shared;
}
inline u32 shared_address(const void* p) {
  return u32(static_cast<const unsigned char*>(p) - emulator::current->block->shared);
}
inline uint4 load_shared(u32 address) {
  uint4 v;
  std::memcpy(&v, emulator::shared_at(address, 16), 16);
  return v;
}
inline void store_shared(u32 address, uint4 v) {
  std::memcpy(emulator::shared_at(address, 16), &v, 16);
}

// The exchanged tensor, beyond which nothing may be published or polled.
inline const unsigned char *exchanged_begin = nullptr, *exchanged_end = nullptr;
inline void check_exchanged(const void* p) {
  const unsigned char* const at = static_cast<const unsigned char*>(p);
  if (at < exchanged_begin || at + 16 > exchanged_end) emulator::fail("access beyond the exchanged tensor");
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulator::fail("misaligned access to the exchanged tensor");
}
inline uint4 load_published(const Element* p) {
  check_exchanged(p);
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void publish(Element* p, uint4 v) {
  check_exchanged(p);
  emulator::messages.push_back([=] { std::memcpy(p, &v, 16); });
}
inline void prefetch_published(const Element* p) {
  check_exchanged(p);
}

// mma.m16n8k16, for fp32 m16n8k8: the fragments of the PTX manual.
inline void multiply_add(float (&sum)[4], const u32* a, u32 b0, u32 b1) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const emulator::Brought all = emulator::gather(mine, 6);
  const int row = emulator::current->lane / 4, pair = emulator::current->lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int upper = i / 2, column = pair + i % 2;
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const u32 x = all[row * 4 + lane][upper + 2 * half], y = all[column * 4 + lane][4 + half];
        if constexpr (sizeof(Element) == 2) {
          sum[i] += widen(Element(x)) * widen(Element(y)) + widen(Element(x >> 16)) * widen(Element(y >> 16));
        } else {
          sum[i] += __uint_as_float(x) * __uint_as_float(y);
        }
      }
    }
  }
}

inline u32 round_tf32(u32 x) {
  return (x + 0x1000) & 0xffffe000u;
}
