// What both passes of pointwise_scan share.
//   WEFT_ELEMENT     float, double, Float16 or BFloat16, of tensors
//   WEFT_TYPE        float, for doubles double, of what is computed
//   WEFT_STATES, WEFT_INPUTS, WEFT_PARAMETERS   how many there are
//   WEFT_BATCH       steps that are loaded at once
#pragma once

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/cuda/wide_product.jit.cuh"
#include "common/elementwise.jit.cuh"
#include "scan/newton/counters.jit.cuh"
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

// The numbers of a channel of a chunk.
template <int count>
__device__ __forceinline__ T* elements(const PointwiseArgs& a, void* data, int turn, int chunk, long long n) {
  return static_cast<T*>(data) + ((long long)turn * a.chunks + chunk) * count * a.N + n;
}
template <int count>
__device__ __forceinline__ void get(const PointwiseArgs& a, void* data, int turn, int chunk, long long n,
                                    T (&to)[count]) {
  const T* const from = elements<count>(a, data, turn, chunk, n);
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = from[i * a.N];
}
template <int count>
__device__ __forceinline__ void put(const PointwiseArgs& a, void* data, int turn, int chunk, long long n,
                                    const T (&from)[count]) {
  T* const to = elements<count>(a, data, turn, chunk, n);
#pragma unroll
  for (int i = 0; i < count; ++i) to[i * a.N] = from[i];
}

template <int count>
__device__ __forceinline__ void set(T (&to)[count], const T (&from)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = from[i];
}
template <int count>
__device__ __forceinline__ void clear(T (&to)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = T(0);
}
__device__ __forceinline__ void set_identity(T (&to)[S * S]) {
#pragma unroll
  for (int i = 0; i < S * S; ++i) to[i] = T(i % (S + 1) == 0);
}
// left * right; where `transposed`, left^T * right.
template <bool transposed>
__device__ __forceinline__ void set_product(T (&to)[S * S], const T (&left)[S * S], const T (&right)[S * S]) {
  T product[S * S];
#pragma unroll
  for (int i = 0; i < S; ++i) {
#pragma unroll
    for (int j = 0; j < S; ++j) {
      T sum = T(0);
#pragma unroll
      for (int k = 0; k < S; ++k) sum += left[transposed ? k * S + i : i * S + k] * right[k * S + j];
      product[i * S + j] = sum;
    }
  }
  set(to, product);
}

// f of the steps of a whole batch, in their order or from the last, without branches: loads and arithmetic overlap.
template <bool from_last, typename F>
__device__ __forceinline__ void all_steps(const F& f) {
#pragma unroll
  for (int u = 0; u < U; ++u) f(from_last ? U - 1 - u : u);
}
// The same of the first `count` of them.
template <bool from_last, typename F>
__device__ __forceinline__ void some_steps(int count, const F& f) {
  if (count == U) return all_steps<from_last>(f);
  all_steps<from_last>([&](int u) {
    if (u < count) f(u);
  });
}

__device__ __forceinline__ const E* moved_by(const E* p, long long bytes) {
  return reinterpret_cast<const E*>(reinterpret_cast<const char*>(p) + bytes);
}
__device__ __forceinline__ E* moved_by(E* p, long long bytes) {
  return reinterpret_cast<E*>(reinterpret_cast<char*>(p) + bytes);
}
// By a few steps of less than 2 GB: one instruction.
template <typename Pointer>
__device__ __forceinline__ Pointer moved_near(Pointer p, long long step, int steps) {
  return moved_by(p, wide_product(static_cast<int>(step), steps));
}
__device__ __forceinline__ bool is_near(long long step) {
  return step == static_cast<int>(step);
}

// Channels, of which a scheduler of an H200 has four warps. Of so many that are not cut instructions bound a walk, and
// not how long it waits: steps are loaded one by one where the step a batch before is done, so that nothing is moved
// between registers, and by addresses of one instruction.
constexpr long long kMany = 1 << 16;

// The steps of a chunk.
struct Span {
  long long first, end;
};
__device__ __forceinline__ Span span_of(const PointwiseArgs& a, int chunk) {
  const long long first = chunk * a.chunk, end = first + a.chunk;
  return {first, end < a.T ? end : a.T};
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
