// Element types: bfloat16 as a type of the processor's.
#pragma once
#include <type_traits>

#include "emulator.h"

namespace weft {

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float to_acc(float x) {
  return x;
}
inline double to_acc(double x) {
  return x;
}
inline float to_acc(BFloat16 x) {
  return __uint_as_float(uint32_t(x.bits) << 16);
}

template <typename T>
inline T from_acc(acc_t<T> x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t bits = __float_as_uint(x);
    return {uint16_t(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0)};
  } else {
    return x;
  }
}

}  // namespace weft
