#pragma once
#include "emulator.h"

namespace weft {

inline float sigmoid(float x) {
  return 1 / (1 + std::exp(-x));
}
inline float hyperbolic_tangent(float x) {
  return std::tanh(x);
}

}  // namespace weft
