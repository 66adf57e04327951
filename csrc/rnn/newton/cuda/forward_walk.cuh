// A warp walks steps of one sequence, H <= 32: of the whole one in the forward pass of backward="scan", of a chunk with
// algorithm "newton".
//
// Lane i owns unit i and its rows of W_hh; h is exchanged through shared memory. The input of kAhead steps is in
// flight: a step takes about 0.1 us, a load from memory 0.7. A step is one dependent chain: the exchange (60 cycles),
// the products (25), the nonlinearity (100).
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "rnn/cells/cells.h"
#include "rnn/cells/device_math.jit.cuh"
#include "rnn/newton/chunks.h"
#include "rnn/scan/cuda/scan_kernels.h"
#include "scan/linear/cuda/chunk_maps.cuh"

namespace weft::rnn {
namespace {

using scan::warp::kWarp, scan::warp::load4;

// kMeeting: walks may look whether they meet what is stored.
template <Cell cell, int HP, typename scalar, bool kMeeting>
struct ForwardWalk {
  using Tr = Traits<cell>;
  static constexpr int G = gate_blocks(cell), kStates = states_of(cell);
  static constexpr int kAhead = kMeeting && sizeof(scalar) == 8 ? 8 : 16;
  static constexpr int kChains = G == 1 ? 4 : 2;  // independent sums per gate, to hide the latency of the FMA
  static constexpr int kColumns = G + (kMeeting ? kStates : 0);

  struct Shared {
    alignas(32) scalar exchange[2][HP];
    scalar ring[kAhead][kColumns][kWarp];
  };

  // How a walk ended: after so many steps, and whether by meeting what was stored.
  struct End {
    int64_t walked;
    bool met;
  };

  Shared& shared;
  int lane, unit, H;
  // A spare lane computes with the last unit's numbers, but loads and writes nothing: stores of several lanes to one
  // address take turns.
  bool own;
  scalar w[G][HP], bias[G];
  int64_t step;  // rows from one step to the next
  // Of the step that is walked next, of the one that is loaded next.
  scalar *output, *gates, *cells;
  const scalar* ahead;
  int64_t walked, loaded, length;

  __device__ __forceinline__ ForwardWalk(const ScanShape& shape, const WarpForward<scalar>& a, Shared& memory)
      : shared(memory), lane(threadIdx.x % kWarp), H(shape.H) {
    own = lane < H;
    unit = own ? lane : H - 1;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      bias[g] = a.b_hh ? a.b_hh[g * H + unit] : scalar(0);
#pragma unroll
      for (int k = 0; k < HP; ++k) w[g][k] = k < H ? a.w_hh[(g * H + unit) * H + k] : scalar(0);
    }
    if (lane < HP) shared.exchange[0][lane] = shared.exchange[1][lane] = scalar(0);  // the padding stays zero
    step = shape.reverse ? -shape.B : shape.B;
    __syncwarp();
  }

  // Begins to load what a walk over the steps [first, first + count) of sequence b reads.
  template <bool kMeets>
  __device__ __forceinline__ void begin(const ScanShape& shape, const WarpForward<scalar>& a, int64_t b, int64_t first,
                                        int64_t count) {
    const int64_t row = (shape.reverse ? shape.T - 1 - first : first) * shape.B + b;
    ahead = a.projected + row * G * H + unit;
    output = a.output + row * H + unit;
    gates = a.gates ? a.gates + row * 4 * H + unit : nullptr;
    cells = has_c(cell) && a.cells ? a.cells + row * H + unit : nullptr;
    walked = loaded = 0;
    length = count;
    copy_wait<0>();
    for (int d = 0; d < kAhead - 1; ++d) load<kMeets>();
  }

  template <bool kMeets>
  __device__ __forceinline__ void load() {
    if (own && loaded < length) {
      scalar(*to)[kWarp] = shared.ring[unsigned(loaded) % kAhead];
#pragma unroll
      for (int g = 0; g < G; ++g) copy_async<sizeof(scalar)>(&to[g][lane], ahead + g * H);
      if constexpr (kMeets) {
        // What the walk has stored itself it does not read again: its own steps are behind it.
        if (looks_at(loaded, length)) {
          const int64_t further = (loaded - walked) * step * H;
          copy_async<sizeof(scalar)>(&to[G][lane], output + further);
          if constexpr (has_c(cell)) copy_async<sizeof(scalar)>(&to[G + 1][lane], cells + further);
        }
      }
    }
    copy_commit();
    ++loaded;
    ahead += step * G * H;
  }

  // Walks these steps from (h, c), which it leaves as they are after the last. kMeets: until it meets what is stored;
  // what it met stays, and `apart` becomes the largest mismatch that it and walks before it have accepted.
  template <bool kMeets>
  __device__ __forceinline__ End walk(scalar& h, scalar& c, scalar& apart) {
    if (own) shared.exchange[0][unit] = h;
    __syncwarp();
#pragma unroll 1
    for (; walked < length; ++walked) {
      copy_wait<kAhead - 2>();
      const scalar(*from)[kWarp] = shared.ring[unsigned(walked) % kAhead];
      scalar in[G];
#pragma unroll
      for (int g = 0; g < G; ++g) in[g] = from[g][lane];
      [[maybe_unused]] scalar stored[kStates];
      if constexpr (kMeets) {
#pragma unroll
        for (int i = 0; i < kStates; ++i) stored[i] = from[G + i][lane];
      }
      load<kMeets>();
      scalar sum[G][kChains];
#pragma unroll
      for (int g = 0; g < G; ++g)
#pragma unroll
        for (int j = 0; j < kChains; ++j) sum[g][j] = j == 0 ? bias[g] : scalar(0);
#pragma unroll
      for (int k = 0; k < HP; k += 4) {
        scalar v[4];
        load4(&shared.exchange[walked & 1][k], v);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int g = 0; g < G; ++g) sum[g][j % kChains] += w[g][k + j] * v[j];
      }
      scalar u[G];
#pragma unroll
      for (int g = 0; g < G; ++g)
        u[g] = kChains == 4 ? (sum[g][0] + sum[g][1]) + (sum[g][2] + sum[g][kChains - 1]) : sum[g][0] + sum[g][1];

      scalar pre[G], kept[Tr::kSaved + 1];
#pragma unroll
      for (int g = 0; g < G; ++g) pre[g] = g == Tr::kApart ? u[g] : in[g] + u[g];
      h = Tr::template forward<DeviceMath<scalar>>(pre, in[G - 1], h, &c, kept);
      if constexpr (kMeets) {
        if (looks_at(walked, length)) {
          const bool near = meets(h, stored[0]) && (!has_c(cell) || meets(c, stored[kStates - 1]));
          if (__all_sync(~0u, !own || near)) {
            const scalar in_h = own ? mismatch(h, stored[0]) : scalar(0);
            const scalar in_c = has_c(cell) && own ? mismatch(c, stored[kStates - 1]) : scalar(0);
            apart = in_h > apart ? in_h : apart;
            apart = in_c > apart ? in_c : apart;
            return {walked + 1, true};
          }
        }
      }
      if (own && gates) {
#pragma unroll
        for (int g = 0; g < Tr::kSaved; ++g) gates[g * H] = kept[g];
      }
      if constexpr (has_c(cell)) {
        if (own && (kMeeting ? cells : gates)) cells[0] = c;  // one condition saves registers
        cells += step * H;
      }
      if (own) {
        shared.exchange[(walked + 1) & 1][unit] = h;
        output[0] = h;
      }
      output += step * H;
      if constexpr (has_gates(cell))
        if (gates) gates += step * 4 * H;
      __syncwarp();
    }
    return {length, false};
  }
};

// All steps of the block's sequence.
template <Cell cell, int HP, typename scalar>
__device__ __forceinline__ void walk_sequence(const ScanShape& shape, const WarpForward<scalar>& a,
                                              typename ForwardWalk<cell, HP, scalar, false>::Shared& shared) {
  ForwardWalk<cell, HP, scalar, false> walk(shape, a, shared);
  const int64_t b = blockIdx.x, at = b * shape.H + walk.unit;
  scalar h = a.h0[at], c = has_c(cell) ? a.c0[at] : scalar(0), apart = scalar(0);
  walk.template begin<false>(shape, a, b, 0, shape.T);
  walk.template walk<false>(h, c, apart);
  copy_wait<0>();
  if (!walk.own) return;
  a.h_n[at] = h;
  if constexpr (has_c(cell)) a.c_n[at] = c;
}

}  // namespace
}  // namespace weft::rnn
