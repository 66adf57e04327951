// One time step of a recurrent cell, forward and backward. No torch header.
//
// Forward, few sequences. A warp has one hidden unit of up to NB sequences: its lanes divide the depth of the dot
// products of input and state with the unit's rows of the weights, vectors of 16 bytes at a time where everything is
// aligned; sums are in registers and meet in butterflies, after which lane b runs the gates of sequence b. Weights are
// read once for NB sequences, from L2 or memory, which is what the step takes: 32 MiB of an lstm with H = I = 1024 in
// float32. Summed in the same order each time.
//
// Forward of many sequences, behind cuBLAS: a thread has one unit of one sequence. Bound by bytes, and for few of them
// by the launch.
//
// Backward: a warp has 8 units and takes 4 sequences at a time, so that a row of a warp is a sector of 32 bytes in
// float32. Where the sums of the columns are asked for, a warp takes all sequences and adds in registers, then across
// its lanes.
#pragma once
#include "common/element.cuh"
#include "rnn/cells/cells.h"
#include "rnn/cells/device_math.jit.cuh"
#include "rnn/step/cell_step.h"

namespace weft::rnn {

constexpr int kCellWarps = 4;                         // of a block
constexpr int kBackwardUnits = 8, kBackwardRows = 4;  // of a warp

template <typename scalar, int N>
struct alignas(sizeof(scalar) * N) CellVector {
  scalar values[N];
};

// The gates of unit j of sequence b. sum: of each gate block, without biases; where a gate's sides stay apart
// the recurrent side's, and input_n its input side's.
template <Cell C, typename scalar>
__device__ __forceinline__ void cell_finish(const CellForwardArgs& a, int64_t b, int64_t j,
                                            const acc_t<scalar> (&sum)[gate_blocks(C)], acc_t<scalar> input_n) {
  using S = acc_t<scalar>;
  constexpr int G = gate_blocks(C);
  const int64_t at = b * a.H + j;
  const auto bias = [&](const void* p, int g) {
    return p == nullptr ? S(0) : S(to_acc(static_cast<const scalar*>(p)[g * a.H + j]));
  };
  using Tr = Traits<C>;
  constexpr int kOthers = Tr::kStates - 1;
  S pre[G], kept[Tr::kSaved + 1], h = 0, c[kOthers + 1] = {};
#pragma unroll
  for (int g = 0; g < G; ++g) {
    pre[g] = sum[g] + bias(a.b_hh, g);
    if (g != Tr::kApart) pre[g] += bias(a.b_ih, g);
  }
  const S apart = Tr::kApart >= 0 ? input_n + bias(a.b_ih, G - 1) : S(0);
  if constexpr (Tr::kBefore == StateName::kH) h = to_acc(static_cast<const scalar*>(a.h)[at]);
  const int64_t at_c = b * kOthers * a.H + j;
#pragma unroll
  for (int s = 0; s < kOthers; ++s) c[s] = to_acc(static_cast<const scalar*>(a.c)[at_c + s * a.H]);
  const S next = Tr::template forward<DeviceMath<S>>(pre, apart, h, c, kept);
  if (Tr::kSaved > 0 && a.gates != nullptr) {
    scalar* const saved = static_cast<scalar*>(a.gates) + b * Tr::kSaved * a.H + j;
#pragma unroll
    for (int g = 0; g < Tr::kSaved; ++g) saved[g * a.H] = from_acc<scalar>(kept[g]);
  }
#pragma unroll
  for (int s = 0; s < kOthers; ++s) static_cast<scalar*>(a.c_next)[at_c + s * a.H] = from_acc<scalar>(c[s]);
  static_cast<scalar*>(a.h_next)[at] = from_acc<scalar>(next);
}

// sums[slot(g)][b] += this lane's part of x's rows times rows g * H + j of w. x: (NB rows, depth) by `rows`.
template <typename scalar, int G, int NB, int N, int kSums, typename Slot>
__device__ __forceinline__ void cell_products(const scalar* w, int64_t block, const scalar* const (&rows)[NB],
                                              int64_t depth, int lane, acc_t<scalar> (&sums)[kSums][NB], Slot slot) {
  using Vector = CellVector<scalar, N>;
  for (int64_t k = lane * N; k < depth; k += 32 * N) {
    Vector x[NB];
#pragma unroll
    for (int b = 0; b < NB; ++b) x[b] = *reinterpret_cast<const Vector*>(rows[b] + k);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const Vector left = *reinterpret_cast<const Vector*>(w + g * block + k);
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int b = 0; b < NB; ++b) sums[slot(g)][b] += to_acc(left.values[i]) * to_acc(x[b].values[i]);
      }
    }
  }
}

// Block `block_index` of ceil(H / kCellWarps) * ceil(B / NB). N elements in a vector divide I and P.
template <Cell C, typename scalar, int NB, int N>
__device__ __forceinline__ void cell_forward_few(const CellForwardArgs& a, int64_t block_index, int thread) {
  using S = acc_t<scalar>;
  constexpr int G = gate_blocks(C), kSums = G + (Traits<C>::kApart >= 0);  // the last: an input side apart
  const int64_t tiles = (a.H + kCellWarps - 1) / kCellWarps;
  const int64_t j = block_index % tiles * kCellWarps + thread / 32, b0 = block_index / tiles * NB;
  const int lane = thread % 32;
  if (j >= a.H) return;
  const scalar *x[NB], *h[NB];
  for (int b = 0; b < NB; ++b) {
    const int64_t row = b0 + b < a.B ? b0 + b : a.B - 1;
    x[b] = static_cast<const scalar*>(a.input) + row * a.I;
    h[b] = static_cast<const scalar*>(a.h) + row * a.H + j / a.P * a.P;
  }
  S sums[kSums][NB] = {};
  cell_products<scalar, G, NB, N>(static_cast<const scalar*>(a.w_ih) + j * a.I, a.H * a.I, x, a.I, lane, sums,
                                  [](int g) { return g == Traits<C>::kApart ? G : g; });
  cell_products<scalar, G, NB, N>(static_cast<const scalar*>(a.w_hh) + j * a.P, a.H * a.P, h, a.P, lane, sums,
                                  [](int g) { return g; });
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int b = 0; b < NB; ++b) {
      for (int other = 16; other > 0; other /= 2) sums[s][b] += __shfl_xor_sync(0xffffffffu, sums[s][b], other);
    }
  }
#pragma unroll
  for (int b = 0; b < NB; ++b) {
    if (lane != b || b0 + b >= a.B) continue;
    S sum[G];
    for (int g = 0; g < G; ++g) sum[g] = sums[g][b];
    cell_finish<C, scalar>(a, b0 + b, j, sum, sums[kSums - 1][b]);
  }
}

// Element `index` of B * H, from the products.
template <Cell C, typename scalar>
__device__ __forceinline__ void cell_forward_gates(const CellForwardArgs& a, int64_t index) {
  using S = acc_t<scalar>;
  constexpr int G = gate_blocks(C);
  if (index >= a.B * a.H) return;
  const int64_t b = index / a.H, j = index % a.H;
  const scalar* const in = static_cast<const scalar*>(a.in) + b * G * a.H + j;
  const scalar* const rec = static_cast<const scalar*>(a.rec) + b * G * a.H + j;
  S sum[G], input_n = 0;
  for (int g = 0; g < G; ++g) {
    sum[g] = to_acc(rec[g * a.H]);
    if (g == Traits<C>::kApart) {
      input_n = to_acc(in[g * a.H]);
    } else {
      sum[g] += to_acc(in[g * a.H]);
    }
  }
  cell_finish<C, scalar>(a, b, j, sum, input_n);
}

// Warp `warp` of ceil(H / kBackwardUnits) times, without sums, ceil(B / kBackwardRows).
template <Cell C, typename scalar>
__device__ __forceinline__ void cell_backward_step(const CellBackwardArgs& a, int64_t warp, int lane) {
  using S = acc_t<scalar>;
  constexpr int G = gate_blocks(C), K = chain_blocks(C);
  const bool sum = a.b_ih != nullptr || a.b_hh != nullptr;
  const int64_t H = a.H, tiles = (H + kBackwardUnits - 1) / kBackwardUnits;
  if (sum && warp >= tiles) return;  // of the last block
  const int64_t j = warp % tiles * kBackwardUnits + lane % kBackwardUnits;
  const int64_t first = warp / tiles * kBackwardRows + lane / kBackwardUnits;
  const int64_t end = j >= H ? 0 : sum ? a.B : first < a.B ? first + 1 : 0;
  const auto load = [&](const void* p, int64_t at) {
    return p == nullptr ? S(0) : S(to_acc(static_cast<const scalar*>(p)[at]));
  };
  const auto store = [](void* p, int64_t at, S value) { static_cast<scalar*>(p)[at] = from_acc<scalar>(value); };
  S sums[K] = {};
  for (int64_t b = first; b < end; b += kBackwardRows) {
    const int64_t at = b * H + j, out = b * G * H + j, saved = b * 4 * H + j;
    const S grad = load(a.grad_h_next, at);
    using Tr = Traits<C>;
    constexpr int kOthers = Tr::kStates - 1, kRead = states_read(C);
    const int64_t at_c = b * kOthers * H + j;
    S d[K], kept[Tr::kSaved + 1], after[Tr::kKept + 1] = {}, before[kRead + 1] = {}, direct[kOthers + 1] = {};
#pragma unroll
    for (int g = 0; g < Tr::kSaved; ++g) kept[g] = load(a.gates, saved + g * H);
    if constexpr (Tr::kAfter == StateName::kH) after[0] = load(a.h_next, at);
    if constexpr (Tr::kBefore == StateName::kH) before[0] = load(a.h, at);
#pragma unroll
    for (int s = 0; s < Tr::kKept; ++s) {
      if constexpr (Tr::kAfter == StateName::kC) after[s] = load(a.c_next, at_c + s * H);
      if constexpr (Tr::kBefore == StateName::kC) before[s] = load(a.c, at_c + s * H);
    }
    const auto arrive = [&](S from_h, int s = 0) { return load(a.grad_c_next, at_c + s * H) + from_h; };
    Tr::template backward<DeviceMath<S>>(grad, arrive, kept, after, before, d, direct);
    if constexpr (Tr::kBefore == StateName::kH) store(a.grad_h, at, direct[0]);
#pragma unroll
    for (int s = 0; s < kOthers; ++s) store(a.grad_c, at_c + s * H, direct[s]);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      store(a.in, out + g * H, d[g]);
      if (Traits<C>::kApart >= 0) store(a.rec, out + g * H, d[g == Traits<C>::kApart ? K - 1 : g]);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) sums[k] += d[k];
  }
  if (!sum) return;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    for (int other = kBackwardUnits; other < 32; other *= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], other);
  }
  if (j >= H || lane >= kBackwardUnits) return;
#pragma unroll
  for (int g = 0; g < G; ++g) {
    if (a.b_ih != nullptr) store(a.b_ih, g * H + j, sums[g]);
    if (a.b_hh != nullptr) store(a.b_hh, g * H + j, sums[g == Traits<C>::kApart ? K - 1 : g]);
  }
}

}  // namespace weft::rnn
