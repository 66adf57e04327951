// csrc/vertex/exec/cuda/body.jit.cuh on a processor.
#pragma once
#include "common/cuda/grid_barrier.jit.cuh"
#include "common/elementwise.jit.cuh"
#include "vertex/exec/cuda/frontier.jit.cuh"

using T = WEFT_VERTEX_TYPE;
using namespace weft;
using weft::vertex::BufferArgument;
using weft::vertex::FrontierArguments;
using weft::vertex::Many;

inline T from_lane(T x, int apart) {
  uint32_t words[sizeof(T) / 4];
  std::memcpy(words, &x, sizeof(T));
  std::memcpy(&x, emulator::gather(words, sizeof(T) / 4)[emulator::current->lane ^ apart], sizeof(T));
  return x;
}

#define data(type, b) (static_cast<type*>(buffers.of[b].data))
#define stride(b) (buffers.of[b].stride)
