// A lane's number to all lanes of the warp, of any type.
#pragma once
#include <cstdint>
#include <cstring>

#include "emulator.h"

template <typename T>
inline T __shfl_sync(unsigned, T x, int lane) {
  uint32_t words[2] = {};
  std::memcpy(words, &x, sizeof(T));
  const emulator::Brought all = emulator::gather(words, 2);
  std::memcpy(&x, all[lane], sizeof(T));
  return x;
}
