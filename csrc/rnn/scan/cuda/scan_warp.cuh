// Kernels for H <= 32, where a warp holds a chunk: one layer, one direction, forward and the scan of its backward pass.
//
// The backward pass of a recurrent net is the chain g[s-1] = J[s]^T (g[s] + e[s]), e the gradient arriving at the
// output of step s (BPPSA, MLSys 2020, section 3). It is cut into chunks of L steps (see warp_chunks.cuh):
//
//   1. products: for every (chunk, batch) the affine map of the chunk, P and v, on the tensor cores in split TF32; one
//      warp holds the columns in registers for all L steps. J is never stored: an RNN's columns are scaled by the
//      derivative and multiplied by W, which is split once; a GRU's three and an LSTM's first three weight blocks are
//      merged with their derivatives into the operand of the step, shared by all columns; an LSTM's state is (dh, dc)
//      and only the blocks of its Jacobian that are not diagonal are multiplied. H^2 (H + 1) FMA per step and pair, an
//      LSTM 4 H^3.
//   2. boundaries: one warp per batch row carries g through the chunks, 0.11 to 0.24 us each (LSTM 0.22 to 0.48).
//   3. replay: one warp per (chunk, batch), lane i owns unit i, W in registers, the gate gradients exchanged through
//      shared memory: matrix-vector products only, and the only stage that writes per-step results. With one chunk it
//      is the plain sequential backward pass, 0.14 us per step (GRU 0.25, LSTM 0.29).
//
// What was learnt: columns in fp32 FMAs, whole columns per thread, ran at 60% of the issue rate and took 1.2 (RNN) to 5
// (LSTM) times as long as three TF32 products; the sum of a whole step left to the tensor core loses digits over a long
// chunk, because it cuts off instead of rounding; loads into registers cannot run four steps ahead (six
// scoreboards a warp), asynchronous copies can, which halved the time of a step; lanes without a unit must not repeat
// the last unit's loads and stores, which take turns: without them replay takes 0.6 of the time at H = 20, a third at H
// = 8; replay as tiles of 16 pairs on the tensor cores takes 0.65 us a step, more than the many warps it stands for;
// the time of a product goes up in stairs, with the number of warps that share a scheduler.
#pragma once
#include <algorithm>

#include "common/launch.cuh"
#include "common/math.jit.cuh"
#include "rnn/newton/cuda/forward_walk.cuh"
#include "rnn/scan/cuda/scan_kernels.h"
#include "rnn/scan/cuda/scan_step.cuh"
#include "scan/linear/cuda/map_products.cuh"
#include "scan/linear/cuda/warp_chunks.cuh"

namespace weft::rnn {
namespace {

using namespace scan::warp;
using scan::SliceMaps;

// ------------------------------------------------------------------------------------------------------- forward
// One warp per sequence, which walks all steps.
template <Cell cell, int HP, typename scalar>
__global__ void __launch_bounds__(kWarp, 1) forward_kernel(ScanShape shape, WarpForward<scalar> a) {
  __shared__ typename ForwardWalk<cell, HP, scalar, false>::Shared shared;
  walk_sequence<cell, HP>(shape, a, shared);
}

// ------------------------------------------------------------------------------------------------------ 3. replay
// Runs the chain over steps [low, high) of batch row b, downwards; lane i enters and leaves with the gradient of unit
// i.
template <Cell cell, int HP>
struct ReplayLayout {
  static constexpr int kAhead = 8;
  static constexpr int kVectors = vectors_per_step<cell>;
  static constexpr int kRing = kAhead * (kSaved<cell> + 1) * kWarp, kExchange = 2 * kVectors * HP;
  static constexpr int kElements = kRing + kExchange;  // of shared memory, per warp
};

template <Cell cell, int HP, bool kWrite, typename scalar>
__device__ __forceinline__ void replay_steps(const ScanShape& shape, const ScanChain<scalar>& a, int64_t b, int64_t low,
                                             int64_t high, scalar& gh, scalar& gc, scalar* shared) {
  using Layout = ReplayLayout<cell, HP>;
  constexpr int R = Layout::kVectors, kAhead = Layout::kAhead, N = kSaved<cell> + 1;
  constexpr int K = chain_blocks(cell);
  const int lane = threadIdx.x % kWarp;
  const int H = shape.H;
  // A spare lane computes with the last unit's weights and numbers of no meaning, and loads and writes nothing: stores
  // of several lanes to one address take turns.
  const bool own = lane < H;
  const int unit = own ? lane : H - 1;

  scalar w[R][HP];
#pragma unroll
  for (int g = 0; g < R; ++g)
#pragma unroll
    for (int k = 0; k < HP; ++k) w[g][k] = k < H ? a.w_hh[(g * H + k) * H + unit] : scalar(0);
  for (int k = lane; k < Layout::kExchange; k += kWarp) shared[k] = scalar(0);  // the padding stays zero

  scalar* const ring = shared + Layout::kExchange + lane;
  const int steps = int(high - low);
  Cursor<cell, scalar> cursor(shape, a, high - 1, b, unit);
  int fetched = 0;
  auto fetch = [&]() {
    if (own && fetched < steps) {
      const scalar* from[kSaved<cell>];
      cursor.sources(low == 0 && fetched == steps - 1, from);
      scalar* to = ring + fetched % kAhead * (N * kWarp);
#pragma unroll
      for (int n = 0; n < N - 1; ++n) copy_async<sizeof(scalar)>(to + n * kWarp, from[n]);
      if (cursor.gradient) copy_async<sizeof(scalar)>(to + (N - 1) * kWarp, cursor.gradient);
      cursor.down();
    }
    copy_commit();
    ++fetched;
  };
  for (int d = 0; d < kAhead - 1; ++d) fetch();
  const bool arriving = a.grad_output != nullptr;
  const int64_t out_step = (shape.reverse ? shape.B : -shape.B) * K * H;
  [[maybe_unused]] scalar* out = kWrite ? a.dgates + row_of<scalar>(shape, high - 1, b) * K * H + unit : nullptr;
  scalar* exchange = shared;
  __syncwarp();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_wait<kAhead - 2>();
    const scalar* slot = ring + step % kAhead * (N * kWarp);
    scalar saved[kSaved<cell>];
#pragma unroll
    for (int n = 0; n < N - 1; ++n) saved[n] = slot[n * kWarp];
    const scalar e = arriving ? slot[(N - 1) * kWarp] : scalar(0);
    fetch();
    const Derivative<cell, scalar> j(saved);
    const scalar dh = gh + e;
    auto publish = [&](int vector, scalar value) {
      if (own) exchange[vector * HP + unit] = value;
    };
    auto write = [&](int block, scalar value) {
      if (kWrite && own) out[block * H] = value;
    };
    const scalar direct = send(j, dh, gc, publish, write);
    __syncwarp();
    scalar sum[4] = {};
#pragma unroll
    for (int g = 0; g < R; ++g)
#pragma unroll
      for (int k = 0; k < HP; k += 4) {
        scalar v[4];
        load4(exchange + g * HP + k, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += w[g][k + i] * v[i];
      }
    // What flows on directly comes last: with saturated gates it is nearly all, and would absorb the rest.
    gh = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + direct;
    if (kWrite) out += out_step;
    exchange = exchange == shared ? shared + R * HP : shared;
  }
  copy_wait<0>();
  __syncwarp();
  // Spare lanes leave with the last unit's gradient, as they came.
  gh = __shfl_sync(~0u, gh, unit);
  if constexpr (kTwoStates<cell>) gc = __shfl_sync(~0u, gc, unit);
}

// Chunks are cut from the end, so that all but chunk 0 have the same length. Its map is needed of a slice alone, whose
// whole lies on many ranks.
struct Chunks {
  int count;
  int64_t length;
  bool whole = false;
  __device__ int64_t low(int64_t chunk, int64_t T) const { return max(T - (count - chunk) * length, int64_t(0)); }
  __device__ int64_t high(int64_t chunk, int64_t T) const { return T - (count - 1 - chunk) * length; }
};

template <Cell cell, int HP>
using Map = MapLayout<states_of(cell), HP>;

struct Workspace {
  float* maps;    // (chunks, B, Map::kStride)
  float* starts;  // (chunks, B, S): the gradient entering the chunk
};

template <Cell cell, int HP, typename scalar>
__global__ void __launch_bounds__(128)
    replay_kernel(ScanShape shape, ScanChain<scalar> a, Chunks chunks, Workspace workspace) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t id = int64_t(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (id >= chunks.count * shape.B) return;
  const int64_t chunk = id / shape.B, b = id % shape.B;
  const int H = shape.H, unit = min(lane, H - 1);

  scalar gh, gc;
  if (chunks.count == 1) {
    gh = a.grad_h_n ? a.grad_h_n[b * H + unit] : scalar(0);
    gc = a.grad_c_n ? a.grad_c_n[b * H + unit] : scalar(0);
  } else {
    const float* start = workspace.starts + id * Map<cell, HP>::kStates + unit;
    gh = start[0];
    gc = kTwoStates<cell> ? start[HP] : 0.0f;
  }
  replay_steps<cell, HP, true>(
      shape, a, b, chunks.low(chunk, shape.T), chunks.high(chunk, shape.T), gh, gc,
      reinterpret_cast<scalar*>(dynamic_shared_memory()) + warp * ReplayLayout<cell, HP>::kElements);
  if (chunk == 0) {
    a.grad_h0[b * H + unit] = gh;
    if (kTwoStates<cell>) a.grad_c0[b * H + unit] = gc;
  }
}

// ---------------------------------------------------------------------------------------------- 2. chunk_boundaries
template <Cell cell, int HP>
__device__ __noinline__ float2 redo_chunk(const ScanShape& shape, const ScanChain<float>& a, int64_t b, int64_t low,
                                          int64_t high, float gh, float gc, float* shared) {
  replay_steps<cell, HP, false>(shape, a, b, low, high, gh, gc, shared);
  return make_float2(gh, gc);
}

// The gradient of the state that leaves the last chunk, taken to the start of the first, or of the second.
template <Cell cell, int HP, Way kWay>
__device__ __forceinline__ float2 through_chunks(const ScanShape& shape, const ScanChain<float>& a,
                                                 const Chunks& chunks, const Workspace& workspace, float* shared) {
  using M = Map<cell, HP>;
  const int64_t b = blockIdx.x;
  const int unit = min(int(threadIdx.x), shape.H - 1);
  float gh = a.grad_h_n ? a.grad_h_n[b * shape.H + unit] : 0.0f;
  float gc = M::kParts == 2 && a.grad_c_n ? a.grad_c_n[b * shape.H + unit] : 0.0f;
  const int64_t last = (chunks.count - 1) * shape.B + b;
  carry_through_chunks<M, Traits<cell>::kSelects, kWay>(
      kWay == Way::whole ? chunks.count : chunks.count - 1, workspace.maps + last * M::kStride, -shape.B * M::kStride,
      workspace.starts + last * M::kStates, -shape.B * M::kStates, shape.H, gh, gc, shared, [&](int done) {
        const int64_t high = shape.T - done * chunks.length, low = max(high - chunks.length, int64_t(0));
        const float2 g = redo_chunk<cell, HP>(shape, a, b, low, high, gh, gc, shared + kBoundaryElements<M>);
        gh = g.x, gc = g.y;
      });
  return make_float2(gh, gc);
}

template <Cell cell, int HP, Way kWay>
__global__ void __launch_bounds__(kWarp)
    boundary_kernel(ScanShape shape, ScanChain<float> a, Chunks chunks, Workspace workspace) {
  through_chunks<cell, HP, kWay>(shape, a, chunks, workspace, reinterpret_cast<float*>(dynamic_shared_memory()));
}

// Of a slice: its first blocks take a batch row each, of one warp, and the others multiply maps. Both are what the rank
// tells the others, between this and the boundaries, which begin again with the gradient that has come.
template <Cell cell, int HP>
__global__ void __launch_bounds__(ProductOfMaps<Map<cell, HP>>::kThreads)
    summary_kernel(ScanShape shape, ScanChain<float> a, Chunks chunks, Workspace workspace, SliceMaps told,
                   MapProducts products) {
  if (int64_t(blockIdx.x) >= shape.B) {
    ProductOfMaps<Map<cell, HP>>(products, reinterpret_cast<double*>(dynamic_shared_memory()))
        .run(int64_t(blockIdx.x) - shape.B);
    return;
  }
  if (threadIdx.x >= kWarp) return;
  const float2 g = through_chunks<cell, HP, Way::whole>(shape, a, chunks, workspace,
                                                        reinterpret_cast<float*>(dynamic_shared_memory()));
  const int H = shape.H, unit = int(threadIdx.x);
  auto put = [&](int part, float value) {
    const int64_t at = (blockIdx.x * int64_t(states_of(cell)) + part) * H + unit;
    told.value[at] = value;
    told.values()[at] = __float_as_int(value);
  };
  if (unit < H) {
    put(0, g.x);
    if constexpr (kTwoStates<cell>) put(1, g.y);
  }
  if (blockIdx.x == 0 && unit == 0) told.values()[shape.B * states_of(cell) * H] = 1;
}

// ----------------------------------------------------------------------------------------------- 1. chunk_products
template <Cell cell, int HP>
struct ProductLayout {
  static constexpr int kParts = states_of(cell);
  static constexpr int kColumns = kParts * HP + 1;  // of P, and v
  // With one state and merged weights a step is one chain, from the merged weights to the sum: with few columns,
  // products half as deep made it a half longer.
  using Positions = Blocks<HP, !kDirect<cell>>;
  static constexpr int kPadded = Positions::kPadded;
  // A scaled matrix is the same everywhere, so the warps pack the columns of several (chunk, batch) pairs into tiles of
  // 16; the others take one pair, or a part of its tiles where the registers hold no more.
  static constexpr int kPairs = !kScaled<cell> || HP > 20 ? 1 : HP <= 8 ? 7 : 3;
  static constexpr int kAllTiles = (kPairs * kColumns + 15) / 16;
  static constexpr int kTiles = kTwoStates<cell> && HP > 20 ? 2 : kAllTiles;
  static constexpr int kSplits = (kAllTiles + kTiles - 1) / kTiles;

  static constexpr int kTilesAtOnce = kTiles % 3 == 0 ? 3 : kTiles;
  // Whether one of rows 16 t + 8 u .. + 7 is some pair's offset column.
  static constexpr bool may_hold_offset(int t, int u) {
    if (kSplits > 1) return true;
    for (int row = 16 * t + 8 * u; row < 16 * t + 8 * u + 8; ++row)
      if (row % kColumns == kColumns - 1) return true;
    return false;
  }
  static constexpr int kCoefficients = 1 + gate_blocks(cell) + kTwoStates<cell> + kBefores<cell>;
  static constexpr int kWeightStride = kPadded + 4;  // a fragment's 32 words lie in 32 banks
  static constexpr bool kWeightsInRegisters = kDirect<cell> && HP <= 24;
  static constexpr int kWeightWords = gate_blocks(cell) * kPadded * kWeightStride;
  static constexpr int kPairWords = kCoefficients * kPadded;
};

// One warp: kTiles tiles of 16 columns, transposed (a column of P is a row of the tile), so that the accumulator of one
// step is the left operand of the next: m16n8k8 hands out columns 2 j and 2 j + 1 of the result to the lane that holds
// k = j and j + 4 of the operand, and k may be numbered at will as long as both operands agree.
template <Cell cell, int HP>
__global__ void __launch_bounds__(kWarp)
    product_kernel(ScanShape shape, ScanChain<float> a, Chunks chunks, Workspace workspace) {
  using Layout = ProductLayout<cell, HP>;
  using B = typename Layout::Positions;
  constexpr int NB = B::kCount, NC = Layout::kCoefficients, kParts = Layout::kParts, G = gate_blocks(cell);
  constexpr int kPadded = Layout::kPadded, kStride = Layout::kWeightStride, kTiles = Layout::kTiles;
  constexpr int kUnits = (Layout::kPairs * HP + kWarp - 1) / kWarp;  // a lane prepares per step
  // Units by position (see Blocks). Weights are (G, k, i), row k: what unit k sends to all i.
  alignas(16) __shared__ float weights[Layout::kWeightWords];
  alignas(16) __shared__ float coefficients[2][Layout::kPairs][NC][kPadded];
  const int H = shape.H, lane = threadIdx.x, quad = lane / 4, j = lane % 4;
#pragma unroll 8
  for (int at = lane; at < Layout::kWeightWords; at += kWarp) {
    const int g = at / (kPadded * kStride), k = B::unit(at / kStride % kPadded);
    const int i = at % kStride < kPadded ? B::unit(at % kStride) : H;
    weights[at] = k < H && i < H ? a.w_hh[(g * H + k) * H + i] : 0.0f;
  }
  // What is no unit's position stays zero.
  for (int at = lane; at < int(sizeof(coefficients) / sizeof(float)); at += kWarp)
    (&coefficients[0][0][0][0])[at] = 0.0f;
  __syncwarp();
  auto weight = [&](int g, int kb, int nb, int half) {
    return weights[(g * kPadded + kb * 8 + 2 * j + half) * kStride + nb * 8 + quad];
  };

  // The constant right operands: W, split; or the three blocks to merge, as they are.
  unsigned high_w[kScaled<cell> ? NB : 1][NB][2], low_w[kScaled<cell> ? NB : 1][NB][2];
  float w[Layout::kWeightsInRegisters ? 3 : 1][NB][NB][2];
#pragma unroll
  for (int kb = 0; kb < NB; ++kb)
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
#pragma unroll
      for (int half = 0; half < B::halves(kb); ++half) {
        if constexpr (kScaled<cell>) split_tf32(weight(0, kb, nb, half), high_w[kb][nb][half], low_w[kb][nb][half]);
        if constexpr (Layout::kWeightsInRegisters) {
#pragma unroll
          for (int g = 0; g < 3; ++g) w[g][kb][nb][half] = weight(g, kb, nb, half);
        }
      }
  auto gate_weight = [&](int g, int kb, int nb, int half) {
    if constexpr (Layout::kWeightsInRegisters) {
      return w[g][kb][nb][half];
    } else {
      return weight(g, kb, nb, half);
    }
  };

  // Pairs are numbered chunk by chunk, from chunk 1. Those of a slice's chunk 0, which may be shorter, have warps of
  // their own behind the others.
  const int64_t later = int64_t(chunks.count - 1) * shape.B, turn = int64_t(blockIdx.x) / Layout::kSplits;
  const int64_t turns = (later + Layout::kPairs - 1) / Layout::kPairs;
  const bool is_first = turn >= turns;
  const int64_t count = is_first ? shape.B : later;
  const int64_t first_pair = (is_first ? turn - turns : turn) * Layout::kPairs;
  const int first_tile = int(blockIdx.x % Layout::kSplits) * kTiles;

  // Tile rows: row 16 t + 8 u + quad is column `column` of pair `pair`; the last column of a pair is v.
  ColumnTiles<kParts, kTiles, HP, B> tiles;
  auto& ph = tiles.part[0];
  auto& pc = tiles.part[kParts - 1];
  int pair_at[kTiles][2];
  auto pair_of = [&](int t, int u) { return ((first_tile + t) * 16 + u * 8 + quad) / Layout::kColumns; };
  auto column_of = [&](int t, int u) { return ((first_tile + t) * 16 + u * 8 + quad) % Layout::kColumns; };
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int column = column_of(t, u);
      pair_at[t][u] = min(pair_of(t, u), Layout::kPairs - 1);
      tiles.start(t, u, column);
    }

  // What this lane prepares of every step: some units of the warp's pairs. Lanes without one repeat the last.
  const int length = int(is_first ? chunks.high(0, shape.T) : chunks.length);
  Cursor<cell, float> cursor[kUnits];
  float saved[kUnits][kSaved<cell>], arriving[kUnits];
#pragma unroll
  for (int r = 0; r < kUnits; ++r) {
    const int at = min(lane + r * kWarp, Layout::kPairs * HP - 1);
    const int64_t pair = min(first_pair + at / HP, count - 1), chunk = is_first ? 0 : 1 + pair / shape.B;
    cursor[r] = {shape, a, chunks.high(chunk, shape.T) - 1, pair % shape.B, min(at % HP, H - 1)};
  }
  int fetched = 0;
  auto fetch = [&]() {
    if (fetched == length) return;
    ++fetched;
#pragma unroll
    for (int r = 0; r < kUnits; ++r) {
      const float* from[kSaved<cell>];
      cursor[r].sources(is_first && fetched == length, from);
#pragma unroll
      for (int n = 0; n < kSaved<cell>; ++n) saved[r][n] = *from[n];
      arriving[r] = cursor[r].gradient ? *cursor[r].gradient : 0.0f;
      cursor[r].down();
    }
  };
  fetch();

#pragma unroll 1
  for (int it = 0; it < length; ++it) {
    auto& coefficient = coefficients[it & 1];
#pragma unroll
    for (int r = 0; r < kUnits; ++r) {
      const int at = lane + r * kWarp;
      if (kUnits * kWarp == Layout::kPairs * HP || at < Layout::kPairs * HP) {
        const int pair = at / HP, unit = at % HP;
        const Derivative<cell, float> d(saved[r]);
        const bool on = unit < H;
        auto put = [&](int n, float value) { coefficient[pair][n][B::position(unit)] = on ? value : 0.0f; };
        put(0, arriving[r]);
#pragma unroll
        for (int g = 0; g < G; ++g) put(1 + g, d.recurrent(g));
        if constexpr (kTwoStates<cell>) put(1 + G, d.to_cell);
        if constexpr (!kScaled<cell>) put(NC - 1, d.carry);
      }
    }
    __syncwarp();
    fetch();

    // The right operand, with two states that of the way through c: the gates' blocks merged with their derivatives.
    unsigned high_m[kScaled<cell> ? 1 : NB][NB][2], low_m[kScaled<cell> ? 1 : NB][NB][2];
    if constexpr (!kScaled<cell>) {
#pragma unroll
      for (int kb = 0; kb < NB; ++kb) {
        const float2 c1 = *reinterpret_cast<const float2*>(&coefficient[0][1][kb * 8 + 2 * j]);
        const float2 c2 = *reinterpret_cast<const float2*>(&coefficient[0][2][kb * 8 + 2 * j]);
        const float2 c3 = *reinterpret_cast<const float2*>(&coefficient[0][3][kb * 8 + 2 * j]);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb)
#pragma unroll
          for (int half = 0; half < B::halves(kb); ++half) {
            const float m = (half ? c1.y : c1.x) * gate_weight(0, kb, nb, half) +
                            (half ? c2.y : c2.x) * gate_weight(1, kb, nb, half) +
                            (half ? c3.y : c3.x) * gate_weight(2, kb, nb, half);
            split_tf32(m, high_m[kb][nb][half], low_m[kb][nb][half]);
          }
      }
    }

    // Some tiles at once: their sums are independent, and a product takes 30 cycles to come back.
#pragma unroll
    for (int t0 = 0; t0 < kTiles; t0 += Layout::kTilesAtOnce) {
      SplitSum<Layout::kTilesAtOnce, B, kTwoStates<cell>> sum;
#pragma unroll
      for (int kb = 0; kb < NB; ++kb) {
        unsigned high_o[kTwoStates<cell> ? NB : 1][2], low_o[kTwoStates<cell> ? NB : 1][2];
        if constexpr (kTwoStates<cell>) {
#pragma unroll
          for (int nb = 0; nb < NB; ++nb)
#pragma unroll
            for (int half = 0; half < B::halves(kb); ++half)
              split_tf32(weight(3, kb, nb, half), high_o[nb][half], low_o[nb][half]);
        }
        float rows[Layout::kTilesAtOnce][4], through_output[kTwoStates<cell> ? Layout::kTilesAtOnce : 1][4];
#pragma unroll
        for (int x = 0; x < Layout::kTilesAtOnce; ++x)
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            const int t = t0 + x;
            auto at = [&](int pair, int n) {
              return *reinterpret_cast<const float2*>(&coefficient[pair][n][kb * 8 + 2 * j]);
            };
            const int pair = Layout::kPairs == 1 ? 0 : pair_at[t][u];
            float2 dh = make_float2(ph[t][kb][2 * u], ph[t][kb][2 * u + 1]);
            if (Layout::may_hold_offset(t, u)) {
              const float2 e = at(pair, 0);
              const bool is_offset = tiles.is_offset(t, u);
              dh.x += is_offset ? e.x : 0.0f, dh.y += is_offset ? e.y : 0.0f;
            }
            if constexpr (kTwoStates<cell>) {
              const float2 o = at(0, 4), to_cell = at(0, 5), carry = at(0, 6);
              float(&c)[4] = pc[t][kb];
              const float q0 = fmaf(to_cell.x, dh.x, c[2 * u]), q1 = fmaf(to_cell.y, dh.y, c[2 * u + 1]);
              rows[x][2 * u] = q0, rows[x][2 * u + 1] = q1;
              c[2 * u] = q0 * carry.x, c[2 * u + 1] = q1 * carry.y;
              through_output[x][2 * u] = o.x * dh.x, through_output[x][2 * u + 1] = o.y * dh.y;
            } else if constexpr (kDirect<cell>) {
              rows[x][2 * u] = dh.x, rows[x][2 * u + 1] = dh.y;
              // What flows on directly is added last and in full precision: with saturated gates it is nearly all.
              const float2 carry = at(0, 4);
              ph[t][kb][2 * u] = carry.x * dh.x, ph[t][kb][2 * u + 1] = carry.y * dh.y;
            } else {
              const float2 d = at(pair, 1);
              rows[x][2 * u] = d.x * dh.x, rows[x][2 * u + 1] = d.y * dh.y;
            }
          }
        if constexpr (kScaled<cell>) {
          sum.add(kb, rows, high_w[kb], low_w[kb]);
        } else {
          sum.add(kb, rows, high_m[kb], low_m[kb]);
        }
        if constexpr (kTwoStates<cell>) {
          sum.flush();
          sum.add(kb, through_output, high_o, low_o);
          sum.flush();
        }
      }
#pragma unroll
      for (int x = 0; x < Layout::kTilesAtOnce; ++x)
#pragma unroll
        for (int nb = 0; nb < NB; ++nb)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (i % 2 < B::halves(nb))
              ph[t0 + x][nb][i] = kDirect<cell> ? ph[t0 + x][nb][i] + sum.at(x, nb, i) : sum.at(x, nb, i);
    }

    if (it % kRescaleSteps == kRescaleSteps - 1 || it == length - 1) tiles.rescale(it == length - 1);
  }

#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int64_t pair = first_pair + pair_of(t, u);
      if (pair_of(t, u) < Layout::kPairs && pair < count)
        tiles.store(t, u, column_of(t, u), workspace.maps + ((is_first ? 0 : shape.B) + pair) * Map<cell, HP>::kStride);
    }
}

// --------------------------------------------------------------------------------------------------------- launchers
template <template <int> class Launch, typename... Args>
void dispatch_hidden(int H, Args&&... args) {
  switch (scan::padded_hidden(H)) {
    case 8:
      return Launch<8>::run(args...);
    case 16:
      return Launch<16>::run(args...);
    case 20:
      return Launch<20>::run(args...);
    case 24:
      return Launch<24>::run(args...);
    default:
      return Launch<32>::run(args...);
  }
}

template <Cell cell>
struct ForCell {
  template <int HP>
  struct Forward {
    template <typename scalar>
    static void run(const ScanShape& shape, const WarpForward<scalar>& a, cudaStream_t stream) {
      launch("rnn_warp_forward", forward_kernel<cell, HP, scalar>, shape.B, dim3(kWarp), 0, stream, shape, a);
    }
  };

  template <int HP>
  static void products(const ScanShape& shape, const ScanChain<float>& a, const Chunks& chunks,
                       const Workspace& workspace, cudaStream_t stream) {
    using Layout = ProductLayout<cell, HP>;
    const auto warps = [](int64_t pairs) { return (pairs + Layout::kPairs - 1) / Layout::kPairs * Layout::kSplits; };
    launch("rnn_scan_products", product_kernel<cell, HP>,
           warps(int64_t(chunks.count - 1) * shape.B) + (chunks.whole ? warps(shape.B) : 0), dim3(kWarp), 0, stream,
           shape, a, chunks, workspace);
  }

  template <int HP>
  static constexpr size_t kBoundaryBytes = sizeof(float) *
                                           (kBoundaryElements<Map<cell, HP>> + ReplayLayout<cell, HP>::kElements);

  template <int HP, Way kWay>
  static void boundaries(const ScanShape& shape, const ScanChain<float>& a, const Chunks& chunks,
                         const Workspace& workspace, cudaStream_t stream) {
    launch("rnn_scan_boundaries", boundary_kernel<cell, HP, kWay>, shape.B, dim3(kWarp), kBoundaryBytes<HP>, stream,
           shape, a, chunks, workspace);
  }

  template <int HP, typename scalar>
  static void replay(const ScanShape& shape, const ScanChain<scalar>& a, const Chunks& chunks,
                     const Workspace& workspace, cudaStream_t stream) {
    // One warp per block spreads few warps over all multiprocessors.
    const int64_t warps = chunks.count * shape.B;
    const int per_block = warps <= 4 * device_limits().sm_count ? 1 : 4;
    launch("rnn_scan_replay", replay_kernel<cell, HP, scalar>, (warps + per_block - 1) / per_block,
           dim3(per_block * kWarp), per_block * ReplayLayout<cell, HP>::kElements * sizeof(scalar), stream, shape, a,
           chunks, workspace);
  }

  static Chunks cut(const ScanShape& shape, int count, bool whole) {
    const int64_t length = std::max<int64_t>(1, (shape.T + count - 1) / count);
    return {int(std::max<int64_t>(1, (shape.T + length - 1) / length)), length, whole};  // none is empty
  }

  template <int HP>
  static Workspace workspace_at(const ScanShape& shape, const Chunks& chunks, float* memory) {
    return {memory, memory + chunks.count * shape.B * Map<cell, HP>::kStride};
  }

  template <int HP>
  struct Chain {
    template <typename scalar>
    static void run(const ScanShape& shape, const ScanChain<scalar>& a, int count, cudaStream_t stream) {
      const Chunks chunks = cut(shape, count, false);
      Workspace workspace{};
      if constexpr (sizeof(scalar) == sizeof(float)) {
        if (chunks.count > 1) {
          workspace = workspace_at<HP>(shape, chunks, static_cast<float*>(a.workspace));
          products<HP>(shape, a, chunks, workspace, stream);
          boundaries<HP, Way::alone>(shape, a, chunks, workspace, stream);
        }
      }
      replay<HP>(shape, a, chunks, workspace, stream);
    }
  };

  template <int HP>
  struct ToldOfSlice {
    static void run(const ScanShape& shape, const ScanChain<float>& a, int count, const SliceMaps& told,
                    const scan::Workspace& memory, cudaStream_t stream) {
      using M = Map<cell, HP>;
      using Product = ProductOfMaps<M>;
      const Chunks chunks = cut(shape, count, true);
      const Workspace workspace = workspace_at<HP>(shape, chunks, told.maps);
      MapProducts p{told.maps + (chunks.count - 1) * shape.B * M::kStride,
                    -shape.B * M::kStride,
                    M::kStride,
                    chunks.count,
                    shape.B,
                    shape.H};
      scan::warp::prepare(p, states_of(cell) * shape.H, told.message, memory, stream);
      products<HP>(shape, a, chunks, workspace, stream);
      launch("rnn_slice_summary", summary_kernel<cell, HP>, shape.B + p.rows * p.groups, dim3(Product::kThreads),
             std::max(kBoundaryBytes<HP>, size_t(Product::kBytes)), stream, shape, a, chunks, workspace, told, p);
    }
  };

  template <int HP>
  struct ReplayOfSlice {
    static void run(const ScanShape& shape, const ScanChain<float>& a, int count, const float* maps,
                    cudaStream_t stream) {
      const Chunks chunks = cut(shape, count, true);
      const Workspace made = workspace_at<HP>(shape, chunks, const_cast<float*>(maps));
      // What is written again is a copy: the maps are an argument of an op, and stay what they are.
      const Workspace workspace{made.maps, static_cast<float*>(a.workspace)};
      if (chunks.count > 1) {
        const size_t bytes = sizeof(float) * chunks.count * shape.B * Map<cell, HP>::kStates;
        cuda_check(cudaMemcpyAsync(workspace.starts, made.starts, bytes, cudaMemcpyDeviceToDevice, stream),
                   "rnn_slice_starts");
        boundaries<HP, Way::again>(shape, a, chunks, workspace, stream);
      }
      replay<HP>(shape, a, chunks, workspace, stream);
    }
  };
};

}  // namespace

template <Cell cell, typename scalar>
void cell_forward(const ScanShape& shape, const WarpForward<scalar>& args, cudaStream_t stream) {
  dispatch_hidden<ForCell<cell>::template Forward>(shape.H, shape, args, stream);
}

template <Cell cell, typename scalar>
void cell_chain(const ScanShape& shape, const ScanChain<scalar>& args, int chunks, cudaStream_t stream) {
  dispatch_hidden<ForCell<cell>::template Chain>(shape.H, shape, args, chunks, stream);
}

template <Cell cell>
void cell_slice_maps(const ScanShape& shape, const ScanChain<float>& args, int chunks, const scan::SliceMaps& told,
                     const scan::Workspace& workspace, cudaStream_t stream) {
  dispatch_hidden<ForCell<cell>::template ToldOfSlice>(shape.H, shape, args, chunks, told, workspace, stream);
}

template <Cell cell>
void cell_slice_replay(const ScanShape& shape, const ScanChain<float>& args, int chunks, const float* maps,
                       cudaStream_t stream) {
  dispatch_hidden<ForCell<cell>::template ReplayOfSlice>(shape.H, shape, args, chunks, maps, stream);
}

}  // namespace weft::rnn

// All launchers of a cell.
#define WEFT_SCAN_WARP(NAME)                                                                                        \
  namespace weft::rnn {                                                                                             \
  template void cell_forward<Cell::NAME>(const ScanShape&, const WarpForward<float>&, cudaStream_t);                \
  template void cell_forward<Cell::NAME>(const ScanShape&, const WarpForward<double>&, cudaStream_t);               \
  template void cell_chain<Cell::NAME>(const ScanShape&, const ScanChain<float>&, int, cudaStream_t);               \
  template void cell_chain<Cell::NAME>(const ScanShape&, const ScanChain<double>&, int, cudaStream_t);              \
  template void cell_slice_maps<Cell::NAME>(const ScanShape&, const ScanChain<float>&, int, const scan::SliceMaps&, \
                                            const scan::Workspace&, cudaStream_t);                                  \
  template void cell_slice_replay<Cell::NAME>(const ScanShape&, const ScanChain<float>&, int, const float*,         \
                                              cudaStream_t);                                                        \
  }
