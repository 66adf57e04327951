// What the bodies of kernels (csrc/vertex/program/source.h) read.
//   WEFT_VERTEX_TYPE   float or double, of registers; buffers may be narrower
#pragma once

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/elementwise.jit.cuh"
#include "vertex/exec/cuda/frontier.jit.cuh"

namespace {

using T = WEFT_VERTEX_TYPE;
using namespace weft;
using weft::vertex::BufferArgument;
using weft::vertex::FrontierArguments;
using weft::vertex::Many;

__device__ __forceinline__ T from_lane(T x, int apart) {
  return __shfl_xor_sync(0xffffffffu, x, apart);
}

}  // namespace

#define data(type, b) (static_cast<type*>(buffers.of[b].data))
#define stride(b) (buffers.of[b].stride)
