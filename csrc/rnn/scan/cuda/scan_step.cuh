// One step of the backward pass: where its saved activations lie, and the derivatives they give.
#pragma once
#include <cstdint>

#include "common/math.jit.cuh"
#include "rnn/scan/cuda/scan_kernels.h"

namespace weft::rnn {
namespace {

// Vectors that a step multiplies by W_hh: gru dr, dz, dm; lstm di, df, dg, do.
template <Cell cell>
constexpr int vectors_per_step = cell == Cell::kGru    ? 3
                                 : cell == Cell::kLstm ? 4
                                                       : 1;

// What a step's Jacobian needs of one unit's saved activations: rnn y; gru r, z, n, m, h_prev; lstm i, f, g, o, c,
// c_prev.
template <Cell cell>
constexpr int kSaved = cell == Cell::kGru    ? 5
                       : cell == Cell::kLstm ? 6
                                             : 1;

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
    state = (cell == Cell::kLstm ? a.cells : a.output) + row * H + unit + (cell == Cell::kGru ? state_step : 0);
    first_previous = (cell == Cell::kLstm ? a.c0 : a.h0) + b * H + unit;
    gradient = a.grad_output ? a.grad_output + row * H + unit : nullptr;
  }

  // `first`: the present step is 0, whose previous state is not in the array.
  __device__ __forceinline__ void sources(bool first, const scalar* (&from)[kSaved<cell>]) const {
    if constexpr (cell == Cell::kGru || cell == Cell::kLstm) {
#pragma unroll
      for (int g = 0; g < 4; ++g) from[g] = gates + g * H;
    }
    if constexpr (cell == Cell::kGru) {
      from[4] = first ? first_previous : state;
    } else if constexpr (cell == Cell::kLstm) {
      from[4] = state;
      from[5] = first ? first_previous : state + state_step;
    } else {
      from[0] = state;
    }
  }

  __device__ __forceinline__ void down() {
    state += state_step;
    if constexpr (cell == Cell::kGru || cell == Cell::kLstm) gates += 4 * state_step;
    if (gradient) gradient += state_step;
  }
};

// Derivatives of the gates of one unit: with dh the gradient at h[s] and, in an LSTM, q at c[s].
template <Cell cell, typename scalar>
struct Derivative;
template <typename scalar>
struct Derivative<Cell::kRnnTanh, scalar> {
  scalar d;  // da = d dh
  __device__ Derivative(const scalar (&y)[1]) : d(scalar(1) - y[0] * y[0]) {}
};
template <typename scalar>
struct Derivative<Cell::kRnnRelu, scalar> {
  scalar d;
  __device__ Derivative(const scalar (&y)[1]) : d(y[0] <= scalar(0) ? scalar(0) : scalar(1)) {}
};
template <typename scalar>
struct Derivative<Cell::kGru, scalar> {
  scalar r, z, n, m, carry;  // dr = r dh, dz = z dh, dn = n dh, dm = m dh, and carry dh flows on directly
  __device__ Derivative(const scalar (&saved)[5]) {
    const auto [r_, z_, n_, m_, h_prev] = saved;
    n = (scalar(1) - z_) * (scalar(1) - n_ * n_);
    r = n * m_ * r_ * (scalar(1) - r_);
    z = (h_prev - n_) * z_ * (scalar(1) - z_);
    m = n * r_;
    carry = z_;
  }
};
template <typename scalar>
struct Derivative<Cell::kLstm, scalar> {
  scalar i, f, g, o, to_cell, carry;  // q = dc + to_cell dh; di = i q, df = f q, dg = g q, do = o dh; dc <- carry q
  __device__ Derivative(const scalar (&saved)[6]) {
    const auto [i_, f_, g_, o_, c, c_prev] = saved;
    const scalar y = hyperbolic_tangent(c);
    i = g_ * i_ * (scalar(1) - i_);
    f = c_prev * f_ * (scalar(1) - f_);
    g = i_ * (scalar(1) - g_ * g_);
    o = y * o_ * (scalar(1) - o_);
    to_cell = o_ * (scalar(1) - y * y);
    carry = f_;
  }
};

// What the gradient dh at h[s] of one unit makes of its gates: publish(n, x) takes the n-th vector that W_hh is
// multiplied by, write(n, x) the n-th block of dgates. gc, lstm only: the gradient at c[s], then at c[s-1]. Returns
// what flows to h[s-1] directly.
template <Cell cell, typename scalar, typename Publish, typename Write>
__device__ __forceinline__ scalar send(const Derivative<cell, scalar>& j, scalar dh, scalar& gc, const Publish& publish,
                                       const Write& write) {
  scalar direct = scalar(0);
  if constexpr (cell == Cell::kGru) {
    const scalar dr = j.r * dh, dz = j.z * dh, dn = j.n * dh, dm = j.m * dh;
    direct = j.carry * dh;
    publish(0, dr), publish(1, dz), publish(2, dm);
    write(0, dr), write(1, dz), write(2, dn), write(3, dm);
  } else if constexpr (cell == Cell::kLstm) {
    const scalar q = gc + j.to_cell * dh;
    const scalar di = j.i * q, df = j.f * q, dg = j.g * q, d_o = j.o * dh;
    gc = j.carry * q;
    publish(0, di), publish(1, df), publish(2, dg), publish(3, d_o);
    write(0, di), write(1, df), write(2, dg), write(3, d_o);
  } else {
    // ReLU selects: what arrives at a unit that is off is dropped even where it is inf.
    const scalar da = cell == Cell::kRnnRelu ? (j.d == scalar(0) ? scalar(0) : dh) : j.d * dh;
    publish(0, da);
    write(0, da);
  }
  return direct;
}

}  // namespace
}  // namespace weft::rnn
