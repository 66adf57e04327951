// csrc/vertex/exec/cuda/body.jit.cuh on a processor.
#pragma once
#include <cmath>

#include "common/cuda/ptx.jit.cuh"
#include "vertex/exec/cuda/frontier.jit.cuh"

using std::erf, std::exp, std::fabs, std::log, std::log1p, std::sqrt, std::sin, std::cos;

namespace weft {
template <typename T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
template <typename T>
T hyperbolic_tangent(T x) {
  return std::tanh(x);
}
}  // namespace weft

using T = WEFT_VERTEX_TYPE;
using weft::vertex::BufferArgument;
using weft::vertex::FrontierArguments;
using weft::vertex::Many;

inline float infinite() {
  return INFINITY;
}
inline float not_a_number() {
  return NAN;
}
inline T from_lane(T x, int apart) {
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof(T));
  std::memcpy(&x, emulator::gather(words, sizeof(T) / 4)[emulator::current->lane ^ apart], sizeof(T));
  return x;
}

struct Float16 {
  unsigned short bits;
  Float16(float x) : bits(weft::float_to_half(x)) {}
  operator float() const { return weft::half_to_float(bits); }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16(float x) : bits(weft::float_to_bfloat16(x)) {}
  operator float() const { return weft::bfloat16_to_float(bits); }
};

inline void meet(unsigned* arrived, unsigned& expected) {
  expected += gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    ++*arrived;
    while (*arrived < expected) emulator::yield();
  }
  __syncthreads();
}

#define data(type, b) (static_cast<type*>(buffers.of[b].data))
#define stride(b) (buffers.of[b].stride)
