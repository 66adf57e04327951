// What the kernels of slices' halves use of CUDA beyond warp_operations.h.
#pragma once
#include "shuffle.h"
#include "warp_operations.h"

inline int atomicAdd(int* to, int x) {
  emulator::yield();
  return (*to += x) - x;
}
inline void __threadfence() {}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return unsigned((uint64_t(high) << 32 | low) >> (bits % 32));
}
struct dim3 {
  int x;
  explicit dim3(int x_) : x(x_) {}
  operator int() const { return x; }
};
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
