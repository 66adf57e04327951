// What the kernels of chunk maps use of CUDA beyond emulator.h.
#pragma once
#include "emulator.h"

inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const emulator::Brought all = emulator::gather(&x, 1);
  unsigned largest = 0;
  for (int lane = 0; lane < 32; ++lane) largest = std::max(largest, all[lane][0]);
  return largest;
}
inline bool __all_sync(unsigned, bool x) {
  const unsigned mine = x;
  const emulator::Brought all = emulator::gather(&mine, 1);
  return std::all_of(all, all + 32, [](const auto& lane) { return lane[0] != 0; });
}
inline int __float_as_int(float x) {
  return int(__float_as_uint(x));
}
inline float __int_as_float(int x) {
  return __uint_as_float(unsigned(x));
}
struct alignas(16) double2 {
  double x, y;
};
using std::isfinite;
