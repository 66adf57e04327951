// What both passes of pointwise_scan share.
//   WEFT_ELEMENT     float, double, Float16 or BFloat16, of tensors
//   WEFT_TYPE        float, for doubles double, of what is computed
//   WEFT_STATES, WEFT_INPUTS, WEFT_PARAMETERS   how many there are
//   WEFT_BATCH       steps that are loaded at once
#pragma once

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/elementwise.jit.cuh"
#include "scan/pointwise/pointwise_args.h"

namespace {

using namespace weft;
using scan::PointwiseArgs;
using scan::PointwiseOperand;

using T = WEFT_TYPE;
using E = WEFT_ELEMENT;

constexpr int S = WEFT_STATES, I = WEFT_INPUTS, P = WEFT_PARAMETERS, U = WEFT_BATCH;
constexpr int kInputs = S, kParameters = S + I;  // where they begin among the operands
constexpr bool kHalf = sizeof(E) == 2;

__device__ __forceinline__ T absolute(T x) {
  return x < T(0) ? -x : x;
}
__device__ __forceinline__ bool finite(T x) {
  return x - x == T(0);
}

// The place of channel n at a step.
template <typename Element>
__device__ __forceinline__ Element* at(const PointwiseOperand& o, long long n, long long step) {
  return static_cast<Element*>(o.data) + step * o.step + n / o.inner * o.outer + n % o.inner;
}

__device__ __forceinline__ long long in_memory(const PointwiseArgs& a, long long t) {
  return a.reverse ? a.T - 1 - t : t;
}

// A number of one of `count` for each channel of a chunk.
__device__ __forceinline__ T& element(const PointwiseArgs& a, void* data, int turn, int chunk, int count, int i,
                                      long long n) {
  return static_cast<T*>(data)[((((long long)turn * a.chunks + chunk) * count) + i) * a.N + n];
}

// A warp's work: 32 channels of a chunk.
struct Task {
  long long n;  // the lane's channel
  bool valid;   // else n is the last channel, read and not written
  int chunk;
};

// Of warps that count through the chunks of all groups of 32 channels, neighbours side by side.
__device__ __forceinline__ Task task_of(const PointwiseArgs& a, long long index, long long groups) {
  const long long n = index % groups * 32 + threadIdx.x % 32;
  return {n < a.N ? n : a.N - 1, n < a.N, int(index / groups)};
}

__device__ __forceinline__ void load_parameters(const PointwiseArgs& a, long long n, T (&p)[P + 1]) {
#pragma unroll
  for (int i = 0; i < P; ++i) p[i] = T(*at<const E>(a.operands[kParameters + i], n, 0));
}

}  // namespace
