// Anything of up to 32 bytes between the lanes of a warp.
#pragma once
#include <cstdint>
#include <cstring>

#include "emulator.h"

// The number of one lane.
template <typename T>
inline T shuffled(T x, int lane) {
  uint32_t words[emulator::kWords] = {};
  static_assert(sizeof(T) <= sizeof(words));
  std::memcpy(words, &x, sizeof(T));
  const emulator::Brought all = emulator::gather(words, (sizeof(T) + 3) / 4);
  std::memcpy(&x, all[lane], sizeof(T));
  return x;
}
template <typename T>
inline T __shfl_sync(unsigned, T x, int lane) {
  return shuffled(x, lane);
}
