// A warp walks steps of one sequence, H <= 32: of the whole one in the forward pass of backward="scan", of a chunk with
// algorithm "newton".
//
// Lane i owns unit i and its rows of W_hh; h is exchanged through shared memory. A step is one dependent chain: the
// exchange (60 cycles), the products (25), the nonlinearity (100), about 0.12 us of a tanh RNN. A warp issues in order:
// what a step does beside its chain has to fit where the chain waits. So each step begins to load, without a branch,
// the input of one that comes 8 to 16 steps later, as a load from memory takes 0.7 us; and the rest, looks whether a
// walk meets what is stored among it, is done once for a group of kLookEvery steps.
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
  static constexpr int kChains = G == 1 ? 4 : 2;  // independent sums per gate, to hide the latency of the FMA
  static constexpr int kGroups = 3;               // in the ring: one is walked, the next is there, one comes in
  static_assert((kGroups + 1) * kLookEvery <= kMostAhead);

  struct Shared {
    alignas(32) scalar exchange[2][HP];
    scalar ring[kGroups][kLookEvery][G][kWarp];
    scalar stored[kMeeting ? kGroups : 1][kStates][kWarp];  // after the last step of a group
  };

  // How a walk ended: after so many steps, and whether by meeting what was stored.
  struct End {
    int walked;
    bool met;
  };

  Shared& shared;
  int lane, unit, H;
  // A spare lane computes with the last unit's numbers, but loads and writes nothing: stores of several lanes to one
  // address take turns.
  bool own;
  scalar w[G][HP], bias[G];
  // The input side of a gate is w_in times what is loaded, plus b_in: of what is projected already, that.
  scalar w_in[G], b_in[G];
  int in_gate;      // from one gate to the next in what is loaded
  int64_t in_step;  // and from one step to the next
  // From one step to the next: rows; what is added to `gates` and `cells`, which may be null.
  int64_t step, gates_step, cells_step;
  scalar *output, *gates, *cells;  // of the step that is walked next
  // Of the step that is loaded next.
  const scalar *ahead, *output_ahead, *cells_ahead;
  int length, loaded;

  __device__ __forceinline__ ForwardWalk(const ScanShape& shape, const WarpForward<scalar>& a, Shared& memory)
      : shared(memory), lane(threadIdx.x % kWarp), H(shape.H) {
    own = lane < H;
    unit = own ? lane : H - 1;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      bias[g] = a.b_hh ? a.b_hh[g * H + unit] : scalar(0);
      w_in[g] = a.projected ? scalar(1) : a.w_ih[g * H + unit];
      b_in[g] = a.projected || !a.b_ih ? scalar(0) : a.b_ih[g * H + unit];
#pragma unroll
      for (int k = 0; k < HP; ++k) w[g][k] = k < H ? a.w_hh[(g * H + unit) * H + k] : scalar(0);
    }
    if (lane < HP) shared.exchange[0][lane] = shared.exchange[1][lane] = scalar(0);  // the padding stays zero
    step = shape.reverse ? -shape.B : shape.B;
    in_gate = a.projected ? H : 0;
    in_step = a.projected ? step * G * H : step;
    gates_step = a.gates ? step * 4 * H : 0;
    cells_step = has_c(cell) && a.cells ? step * H : 0;
    __syncwarp();
  }

  // Begins to load what a walk over the steps [first, first + count) of sequence b reads.
  template <bool kMeets>
  __device__ __forceinline__ void begin(const ScanShape& shape, const WarpForward<scalar>& a, int64_t b, int64_t first,
                                        int64_t count) {
    const int64_t row = (shape.reverse ? shape.T - 1 - first : first) * shape.B + b;
    ahead = a.projected ? a.projected + row * G * H + unit : a.x + row;
    output = a.output + row * H + unit;
    gates = a.gates ? a.gates + row * 4 * H + unit : nullptr;
    cells = has_c(cell) && a.cells ? a.cells + row * H + unit : nullptr;
    output_ahead = output, cells_ahead = cells;
    length = int(count), loaded = 0;
    copy_wait<0>();
#pragma unroll 1
    for (int group = 0; group < kGroups - 1; ++group) {
#pragma unroll 1
      for (int i = 0; i < kLookEvery; ++i) load(shared.ring[group][i]);
      end_group<kMeets>(group);
    }
  }

  __device__ __forceinline__ void load(scalar (*to)[kWarp]) {
    const bool loads = own && loaded < length;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (loads) copy_async<sizeof(scalar)>(&to[g][lane], ahead + g * in_gate);
    }
    ahead += in_step;
    ++loaded;
  }

  // When all of a group are loaded.
  template <bool kMeets>
  __device__ __forceinline__ void end_group(int group) {
    if constexpr (kMeets) {
      const int first = loaded - kLookEvery;
      if (own && first < length) {
        const int64_t last = (steps_from(first) - 1) * step * H;
        copy_async<sizeof(scalar)>(&shared.stored[group][0][lane], output_ahead + last);
        if constexpr (has_c(cell)) copy_async<sizeof(scalar)>(&shared.stored[group][1][lane], cells_ahead + last);
      }
      output_ahead += kLookEvery * step * H;
      if constexpr (has_c(cell)) cells_ahead += kLookEvery * step * H;
    }
    copy_commit();
  }

  __device__ __forceinline__ int steps_from(int done) const {
    return int(least(kLookEvery, length - done));
  }

  // Walks these steps from (h, c), which it leaves as they are after the last. kMeets: until it meets what is stored;
  // what it met stays, and `apart` becomes the largest mismatch that it and walks before it have accepted.
  template <bool kMeets>
  __device__ __forceinline__ End walk(scalar& h, scalar& c, scalar& apart) {
    scalar *from_units = shared.exchange[0], *to_units = shared.exchange[1];
    if (own) from_units[unit] = h;
    __syncwarp();
    int group = 0;
#pragma unroll 1
    for (int walked = 0; walked < length; walked += kLookEvery) {
      copy_wait<kGroups - 2>();
      const int coming = group == 0 ? kGroups - 1 : group - 1;
      const int count = steps_from(walked);
      scalar kept[Tr::kSaved + 1];
      const auto put = [&](scalar* to, scalar* to_gates, scalar* to_cells, bool now) {
        if (own && now) to[0] = h;
        if constexpr (Tr::kSaved > 0) {
#pragma unroll
          for (int g = 0; g < Tr::kSaved; ++g) {
            if (own && now && gates_step != 0) to_gates[g * H] = kept[g];
          }
        }
        if constexpr (has_c(cell)) {
          if (own && now && (kMeeting || gates_step != 0)) to_cells[0] = c;  // one condition saves registers
        }
      };
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        scalar in[G], v[HP / 4][4];
#pragma unroll
        for (int k = 0; k < HP / 4; ++k) load4(&from_units[4 * k], v[k]);
#pragma unroll
        for (int g = 0; g < G; ++g) in[g] = w_in[g] * shared.ring[group][i][g][lane] + b_in[g];
        scalar sum[G][kChains];
#pragma unroll
        for (int g = 0; g < G; ++g)
#pragma unroll
          for (int j = 0; j < kChains; ++j) sum[g][j] = j == 0 ? bias[g] : scalar(0);
#pragma unroll
        for (int k = 0; k < HP; ++k)
#pragma unroll
          for (int g = 0; g < G; ++g) sum[g][k % kChains] += w[g][k] * v[k / 4][k % 4];
        scalar u[G];
#pragma unroll
        for (int g = 0; g < G; ++g)
          u[g] = kChains == 4 ? (sum[g][0] + sum[g][1]) + (sum[g][2] + sum[g][kChains - 1]) : sum[g][0] + sum[g][1];

        scalar pre[G];
#pragma unroll
        for (int g = 0; g < G; ++g) pre[g] = g == Tr::kApart ? u[g] : in[g] + u[g];
        h = Tr::template forward<DeviceMath<scalar>>(pre, in[G - 1], h, &c, kept);
        if (own) to_units[unit] = h;
        load(shared.ring[coming][i]);  // while that arrives
        scalar* const units = from_units;
        from_units = to_units, to_units = units;
        // What the last of a group may have met stays.
        put(output, gates, cells, !kMeets || i < count - 1);
        output += step * H;
        if constexpr (has_c(cell)) cells += cells_step;
        if constexpr (Tr::kSaved > 0) gates += gates_step;
        __syncwarp();
      }
      end_group<kMeets>(coming);
      if constexpr (kMeets) {
        const scalar stored = shared.stored[group][0][lane], stored_c = shared.stored[group][kStates - 1][lane];
        const bool near = meets(h, stored) && (!has_c(cell) || meets(c, stored_c));
        if (__all_sync(~0u, !own || near)) {
          const scalar in_h = own ? mismatch(h, stored) : scalar(0);
          const scalar in_c = has_c(cell) && own ? mismatch(c, stored_c) : scalar(0);
          apart = in_h > apart ? in_h : apart;
          apart = in_c > apart ? in_c : apart;
          return {walked + count, true};
        }
        put(output - step * H, gates - gates_step, cells - cells_step, true);
      }
      group = group == kGroups - 1 ? 0 : group + 1;
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
