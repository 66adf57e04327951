// One step of the backward pass: where its saved activations lie, and the derivatives they give.
#pragma once
#include <cstdint>

#include "rnn/cells/cells.h"
#include "rnn/cells/device_math.jit.cuh"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {
namespace {

// Vectors that a step multiplies by W_hh.
template <Cell cell>
constexpr int vectors_per_step = gate_blocks(cell);

// What a step's Jacobian needs of one unit's saved activations: the gates, then the states after and before the step.
template <Cell cell>
constexpr int kAfters = Traits<cell>::kAfter != StateName::kNone;
template <Cell cell>
constexpr int kBefores = Traits<cell>::kBefore != StateName::kNone;
template <Cell cell>
constexpr int kSaved = Traits<cell>::kSaved + kAfters<cell> + kBefores<cell>;

// The Jacobian's forms. The matrix is W_hh with its rows scaled, the same at every step but for that; or the gates'
// blocks of W_hh merged with their derivatives, beside what flows on directly, to h or, with two states, to c.
template <Cell cell>
constexpr bool kScaled = kBefores<cell> == 0;
template <Cell cell>
constexpr bool kTwoStates = Traits<cell>::kStates == 2;
template <Cell cell>
constexpr bool kDirect = !kScaled<cell> && !kTwoStates<cell>;

template <typename scalar>
__device__ __forceinline__ int64_t row_of(const ScanShape& shape, int64_t s, int64_t b) {
  return (shape.reverse ? shape.T - 1 - s : s) * shape.B + b;
}

// Walks down the steps of one unit of one batch row: where the saved activations of the present step are, and the
// gradient arriving at its output. Pointers move by constants: computing them anew from (s, b, unit) cost half of a
// step's instructions.
template <Cell cell, typename scalar>
struct Cursor {
  const scalar *gates, *state, *first_previous, *gradient;
  int64_t state_step;  // elements of an (T, B, H) array from one step to the one before
  int H;

  Cursor() = default;
  __device__ __forceinline__ Cursor(const ScanShape& shape, const ScanChain<scalar>& a, int64_t s, int64_t b,
                                    int unit) {
    const int64_t row = row_of<scalar>(shape, s, b);
    H = shape.H;
    state_step = (shape.reverse ? shape.B : -shape.B) * H;
    gates = a.gates + row * 4 * H + unit;
    // Two states: that after the step, and the one before it a step away; else the one that is read.
    state = (kTwoStates<cell> ? a.cells : a.output) + row * H + unit + (kDirect<cell> ? state_step : 0);
    first_previous = (kTwoStates<cell> ? a.c0 : a.h0) + b * H + unit;
    gradient = a.grad_output ? a.grad_output + row * H + unit : nullptr;
  }

  // `first`: the present step is 0, whose previous state is not in the array.
  __device__ __forceinline__ void sources(bool first, const scalar* (&from)[kSaved<cell>]) const {
    constexpr int kGatesSaved = Traits<cell>::kSaved;
#pragma unroll
    for (int g = 0; g < kGatesSaved; ++g) from[g] = gates + g * H;
    if constexpr (kAfters<cell> == 1) from[kGatesSaved] = state;
    if constexpr (kBefores<cell> == 1) {
      from[kSaved<cell> - 1] = first ? first_previous : state + (kTwoStates<cell> ? state_step : 0);
    }
  }

  __device__ __forceinline__ void down() {
    state += state_step;
    if constexpr (has_gates(cell)) gates += Traits<cell>::kSaved * state_step;
    if (gradient) gradient += state_step;
  }
};

// Derivatives of the gates of one unit: with dh the gradient at h[s] and, with two states, q at c[s].
template <Cell cell, typename scalar>
struct Derivative {
  using Tr = Traits<cell>;
  scalar gate[Tr::kChain];  // d = gate q for what comes by way of c, else gate dh
  scalar carry;             // carry q or carry dh flows on directly
  scalar to_cell;           // q = dc + to_cell dh

  // The derivative of a step that one in dh and one in q arrive at.
  __device__ Derivative(const scalar (&saved)[kSaved<cell>]) {
    const scalar one = 1;
    const auto arrive = [&](scalar from_h) {
      to_cell = from_h;
      return scalar(1);
    };
    Tr::template backward<DeviceMath<scalar>>(one, arrive, saved, saved + (kAfters<cell> == 1 ? Tr::kSaved : 0),
                                              saved + kSaved<cell> - 1, gate, &carry);
  }
  // Of gate g's recurrent side.
  __device__ __forceinline__ scalar recurrent(int g) const { return gate[g == Tr::kApart ? Tr::kChain - 1 : g]; }
};

// What the gradient dh at h[s] of one unit makes of its gates: publish(n, x) takes the n-th vector that W_hh is
// multiplied by, write(n, x) the n-th block of dgates. gc, with two states: the gradient at c[s], then at c[s-1].
// Returns what flows to h[s-1] directly.
template <Cell cell, typename scalar, typename Publish, typename Write>
__device__ __forceinline__ scalar send(const Derivative<cell, scalar>& j, scalar dh, scalar& gc, const Publish& publish,
                                       const Write& write) {
  using Tr = Traits<cell>;
  scalar direct = scalar(0), q = dh, d[Tr::kChain];
  if constexpr (kTwoStates<cell>) {
    q = gc + j.to_cell * dh;
    gc = j.carry * q;
  }
#pragma unroll
  for (int k = 0; k < Tr::kChain; ++k) {
    d[k] = j.gate[k] * (k == Tr::kThroughOutput ? dh : q);
    if constexpr (Tr::kSelects) d[k] = j.gate[k] == scalar(0) ? scalar(0) : dh;
  }
  if constexpr (kDirect<cell>) direct = j.carry * dh;
#pragma unroll
  for (int g = 0; g < Tr::kGates; ++g) publish(g, d[g == Tr::kApart ? Tr::kChain - 1 : g]);
#pragma unroll
  for (int k = 0; k < Tr::kChain; ++k) write(k, d[k]);
  return direct;
}

}  // namespace
}  // namespace weft::rnn
