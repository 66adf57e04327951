// Element types of what runs on a processor: without the half types, whose headers are CUDA's.
#pragma once
#include <type_traits>

namespace weft {

template <typename T>
using State = T;

inline float to_state(float x) {
  return x;
}
inline double to_state(double x) {
  return x;
}
template <typename T>
T from_state(State<T> x) {
  return x;
}

}  // namespace weft
