// The scan of the backward pass where a block holds a chunk, kWarpHidden < H <= scan_max_hidden(cell), one cell per .cu
// file that includes this. Three stages as in scan_warp.cuh, with the machinery of block_chunks.cuh:
//
//   1. products: per (chunk, row of the batch) the affine map of the chunk. The Jacobians are never stored: an RNN's
//      columns are scaled by the step's derivatives and multiplied by W, whose planes stay in shared memory; the
//      feeders of a GRU or an LSTM merge the blocks of W with the derivatives of the next step into its planes while
//      the workers multiply by those of the present one, so that a step costs a GRU one product, not three. An LSTM's
//      state is (dh, dc): a step costs it two products of H x H by 2 H columns, the merged one and W_o's, whose planes
//      stay. 6 H^3 bf16 multiply-adds per step, an LSTM 24 H^3. The feeders advance v by fp32 multiply-adds on the way.
//      Registers hold P, and an RNN's feeders W by columns. Shared memory holds the planes, and W in fp32 where there
//      is room beside them; elsewhere (a GRU with H > 64) the feeders read W from L2, G H^2 floats per step.
//   2. boundaries: one block per row of the batch carries the gradient through the maps, 2 us each.
//   3. replay: one block per (chunk, row of the batch), matrix-vector products in fp32, the only stage that writes
//      per-step results. With one chunk it is the plain sequential backward pass. W lies in registers, a warp owns some
//      rows of it (a k of sum over k) and all columns; two barriers a step. What a step needs of memory arrives by
//      asynchronous copies, seven steps ahead.
#pragma once
#include <algorithm>

#include "common/launch.cuh"
#include "rnn/scan/cuda/scan_block.h"
#include "rnn/scan/cuda/scan_step.cuh"
#include "scan/linear/cuda/block_chunks.cuh"

namespace weft::rnn {
namespace {

using namespace scan::block;

template <Cell cell>
constexpr int kParts = states_of(cell);

// ------------------------------------------------------------------------------------------------------ 1. products
template <Cell cell, int kUnits>
struct ProductMemory {
  static constexpr bool kHeld = holds_weights(cell, kUnits);
  static constexpr int kGates = gate_blocks(cell), kWeights = kUnits * kUnits;
  // 16 bytes more than a multiple of 32 banks: the eight rows that ldmatrix reads lie in different banks.
  static constexpr int kPitch = kUnits + 8, kPlane = kUnits * kPitch, kTile = 3 * kPlane;
  static constexpr int kTiles = kTwoStates<cell> ? 3 : !kScaled<cell> ? 2 : 1;
  static constexpr int kCoefficients = kTwoStates<cell> ? 3 : 1;
  static constexpr int kRowsAtOnce = kUnits == 64 ? 2 : 1;  // of one feeder's load of 4 columns per lane
  static constexpr int kSums = !kScaled<cell> ? kFeeders * kRowsAtOnce : 0;
  static constexpr size_t kBytes = product_shared_bytes(cell, kUnits);

  uint16_t* tiles;      // the formed matrix twice, then what is the same at every step
  float* weights;       // (G, units, units)
  float* coefficients;  // twice (kCoefficients, units): scaled d; direct carry; two states o, to_cell, carry
  float4* forming;      // (units): the derivatives that row k of each block is merged with, and what v sends through it
  float* through;       // (units): what v sends through the constant matrix: W, or W_o with two states
  float *sums, *tops, *others, *growths;
  __device__ explicit ProductMemory(unsigned char* shared) {
    tiles = reinterpret_cast<uint16_t*>(shared);
    weights = reinterpret_cast<float*>(tiles + kTiles * kTile);
    coefficients = weights + (kHeld ? kGates * kWeights : 0);
    forming = reinterpret_cast<float4*>(coefficients + 2 * kCoefficients * kUnits);
    through = reinterpret_cast<float*>(forming + (!kScaled<cell> ? kUnits : 0));
    sums = through + (kDirect<cell> ? 0 : kUnits);
    tops = sums + kSums * kUnits;
    others = tops + kFeeders;
    growths = others + kFeeders;
    static_assert(kBytes == 2 * kTiles * kTile + 4 * ((kHeld ? kGates * kWeights : 0) + 2 * kCoefficients * kUnits +
                                                      (!kScaled<cell> ? 4 * kUnits : 0) + (kDirect<cell> ? 0 : kUnits) +
                                                      kSums * kUnits + 2 * kFeeders + 4));
  }
  __device__ uint16_t* formed(int step) const { return tiles + (!kScaled<cell> ? step % 2 * kTile : 0); }
  __device__ uint16_t* constant() const { return tiles + (kTiles - 1) * kTile; }
  __device__ float* coefficient(int step) const { return coefficients + step % 2 * (kCoefficients * kUnits); }
  __device__ float* growth(int step) const { return growths + (step + 4) % 4; }
};

// Zeros, and what does not change from step to step. All threads of the block.
template <typename Memory>
__device__ void fill(const Memory& memory, const float* weights, unsigned char* shared, bool constant_planes,
                     int constant_gate) {
  clear_shared(shared, int(Memory::kBytes));
  __syncthreads();
  if constexpr (Memory::kHeld) {
    copy_flat(memory.weights, weights, Memory::kGates * Memory::kWeights * int(sizeof(float)));
    copy_commit();
  }
  if (constant_planes) {
    constexpr int kUnits = Memory::kPitch - 8, kPairs = kUnits / 2;
    const float* const from = weights + constant_gate * Memory::kWeights;
    for (int at = threadIdx.x; at < kUnits * kPairs; at += blockDim.x) {
      const int k = at / kPairs, n = 2 * (at % kPairs);
      float2 w = *reinterpret_cast<const float2*>(from + k * kUnits + n);
#pragma unroll
      for (int plane = 0; plane < 3; ++plane) {
        *reinterpret_cast<uint32_t*>(memory.constant() + plane * Memory::kPlane + k * Memory::kPitch + n) =
            take_bf16(w.x, w.y);
      }
    }
  }
  copy_wait<0>();
  __syncthreads();
}

// One of kFeeders warps' threads: prepares unit `own` of every step, and forms 4 columns of some rows of its matrix.
template <Cell cell, int kUnits>
struct Feeder {
  using Memory = ProductMemory<cell, kUnits>;
  static constexpr int kRowsAtOnce = Memory::kRowsAtOnce, kLanes = kUnits / 4, kStride = kFeeders * kRowsAtOnce;
  static constexpr int kRows = kUnits / kStride;  // that a thread forms
  static constexpr int kBatch = 4;                // rows whose weights are under way together, where they come from L2
  static_assert(kRows % kBatch == 0);

  const Memory& memory;
  const float* const weights;
  const int H, own, lane, warp, unit, row0;
  const bool on, inside;  // has a unit; has columns
  Cursor<cell, float> cursor;
  float saved[kSaved<cell>] = {}, arriving = 0;
  float gh = 0, gc = 0;      // v
  float largest_weight = 0;  // of row `own` of the constant planes
  float column[!kScaled<cell> ? 1 : kUnits];
  float4 ahead[!kScaled<cell> && !Memory::kHeld ? kBatch : 1][3];

  __device__ Feeder(const Memory& memory, const ScanShape& shape, const ScanChain<float>& a, const float* weights,
                    int64_t row, int64_t last_step, int index)
      : memory(memory),
        weights(Memory::kHeld ? memory.weights : weights),
        H(shape.H),
        own(index),
        lane(index % 32),
        warp(index / 32),
        unit(lane % kLanes),
        row0(warp * kRowsAtOnce + (kRowsAtOnce == 2 ? lane / kLanes : 0)),
        on(own < H),
        inside(lane < kLanes * kRowsAtOnce),
        cursor(shape, a, last_step, row, min(own, H - 1)) {
    fetch();
    if constexpr (!kDirect<cell>) {
      const float* const constant =
          this->weights + (kTwoStates<cell> ? Traits<cell>::kThroughOutput * Memory::kWeights : 0);
      if (on) {
        for (int n = 0; n < H; ++n) largest_weight = fmaxf(largest_weight, fabsf(constant[own * kUnits + n]));
      }
      if constexpr (kScaled<cell>) {
#pragma unroll
        for (int k = 0; k < kUnits; ++k) column[k] = own < kUnits ? constant[k * kUnits + own] : 0.f;
      }
    }
    if constexpr (!kScaled<cell> && !Memory::kHeld) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load(i, i);
    }
  }

  __device__ void fetch() {
    if (!on) return;
    const float* from[kSaved<cell>];
    cursor.sources(false, from);  // step 0 is in the last chunk, which has no map
#pragma unroll
    for (int n = 0; n < kSaved<cell>; ++n) saved[n] = *from[n];
    arriving = cursor.gradient ? *cursor.gradient : 0.f;
    cursor.down();
  }

  // The weights of the thread's index-th row, wherever they are.
  __device__ const float4* weight(int gate, int index) const {
    return reinterpret_cast<const float4*>(weights + gate * Memory::kWeights + (index * kStride + row0) * kUnits +
                                           4 * unit);
  }
  __device__ void load(int index, int slot) {
    if (!inside || index * kStride + row0 >= H) return;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) ahead[slot][gate] = *weight(gate, index);
  }

  __device__ static float warp_max(float value) {
    // Magnitudes are ordered as their bits.
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(value)));
  }

  // One row of the formed matrix into `tile`, and its part of the sums of v.
  __device__ void form(int r, const float4& w0, const float4& w1, const float4& w2, uint16_t* tile, float (&sum)[4],
                       float& top) {
    const float4 d = memory.forming[r];
    float m[4] = {fmaf(d.x, w0.x, fmaf(d.y, w1.x, d.z * w2.x)), fmaf(d.x, w0.y, fmaf(d.y, w1.y, d.z * w2.y)),
                  fmaf(d.x, w0.z, fmaf(d.y, w1.z, d.z * w2.z)), fmaf(d.x, w0.w, fmaf(d.y, w1.w, d.z * w2.w))};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      top = fmaxf(top, fabsf(m[e]));
      sum[e] = fmaf(m[e], d.w, sum[e]);
    }
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      uint2 pairs;
      pairs.x = take_bf16(m[0], m[1]);
      pairs.y = take_bf16(m[2], m[3]);
      *reinterpret_cast<uint2*>(tile + plane * Memory::kPlane + r * Memory::kPitch + 4 * unit) = pairs;
    }
  }

  // One step: what the workers need of it, v after it, and its growth.
  __device__ void feed(int step, bool more) {
    const Derivative<cell, float> j(saved);
    const float dh = gh + arriving;
    float* const coefficient = memory.coefficient(step);
    float direct = 0.f, other = 0.f;
    if (own < kUnits) {
      if constexpr (kDirect<cell>) {
        coefficient[own] = other = on ? j.carry : 0.f;
        memory.forming[own] = on ? make_float4(j.recurrent(0), j.recurrent(1), j.recurrent(2), dh) : float4{};
        direct = on ? j.carry * dh : 0.f;
      } else if constexpr (kTwoStates<cell>) {
        const float q = gc + j.to_cell * dh, o = j.gate[Traits<cell>::kThroughOutput];
        coefficient[own] = on ? o : 0.f;
        coefficient[kUnits + own] = on ? j.to_cell : 0.f;
        coefficient[2 * kUnits + own] = on ? j.carry : 0.f;
        memory.forming[own] = on ? make_float4(j.gate[0], j.gate[1], j.gate[2], q) : float4{};
        memory.through[own] = on ? o * dh : 0.f;
        gc = on ? j.carry * q : 0.f;
        other = on ? float(H) * fabsf(o) * largest_weight + j.carry : 0.f;
      } else {
        coefficient[own] = on ? j.gate[0] : 0.f;
        // ReLU selects: what arrives at a unit that is off is dropped even where it is inf.
        const bool off = !on || (Traits<cell>::kSelects && j.gate[0] == 0.f);
        memory.through[own] = off ? 0.f : j.gate[0] * dh;
        other = on ? fabsf(j.gate[0]) * largest_weight : 0.f;
      }
    }
    other = warp_max(other);
    if (lane == 0) memory.others[warp] = other;
    if (more) fetch();
    feeders_sync();

    float norm_of_formed = 0.f;
    if constexpr (!kScaled<cell>) {
      uint16_t* const tile = memory.formed(step);
      float sum[4] = {}, top = 0.f;
      if constexpr (Memory::kHeld) {
#pragma unroll 4
        for (int index = 0; index < kRows; ++index) {
          const int r = index * kStride + row0;
          if (!inside || r >= H) break;
          form(r, *weight(0, index), *weight(1, index), *weight(2, index), tile, sum, top);
          if constexpr (kTwoStates<cell>) {
            const float4 w = *weight(Traits<cell>::kThroughOutput, index);
            const float x = memory.through[r];
            sum[0] = fmaf(w.x, x, sum[0]);
            sum[1] = fmaf(w.y, x, sum[1]);
            sum[2] = fmaf(w.z, x, sum[2]);
            sum[3] = fmaf(w.w, x, sum[3]);
          }
        }
      } else {
        for (int index = 0; index < kRows; index += kBatch) {
          // After the last batch come the next step's first weights, which are the same.
          const int next = index + kBatch < kRows ? index + kBatch : 0;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int r = (index + i) * kStride + row0;
            const float4 w0 = ahead[i][0], w1 = ahead[i][1], w2 = ahead[i][2];
            load(next + i, i);
            if (inside && r < H) form(r, w0, w1, w2, tile, sum, top);
          }
        }
      }
      if (inside) {
        *reinterpret_cast<float4*>(memory.sums + row0 * kUnits + 4 * unit) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
      top = warp_max(top);
      if (lane == 0) memory.tops[warp] = top;
      feeders_sync();
      if (own < kUnits) {
        float total = 0.f;
#pragma unroll
        for (int i = 0; i < kStride; ++i) total += memory.sums[i * kUnits + own];
        gh = total + direct;
      }
      for (int i = 0; i < kFeeders; ++i) norm_of_formed = fmaxf(norm_of_formed, float(H) * memory.tops[i]);
    } else if (own < kUnits) {
      float sum[4] = {};
#pragma unroll
      for (int k = 0; k < kUnits; k += 4) {
        const float4 x = *reinterpret_cast<const float4*>(memory.through + k);
        sum[0] = fmaf(column[k], x.x, sum[0]);
        sum[1] = fmaf(column[k + 1], x.y, sum[1]);
        sum[2] = fmaf(column[k + 2], x.z, sum[2]);
        sum[3] = fmaf(column[k + 3], x.w, sum[3]);
      }
      gh = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    if (own == 0) {
      for (int i = 0; i < kFeeders; ++i) other = fmaxf(other, memory.others[i]);
      // Bounds of the Jacobian's norm: H times the largest element, and what flows on directly. With two states q and
      // dh may both be as large as the state's two parts together.
      const float norm = kDirect<cell>      ? norm_of_formed + other
                         : kTwoStates<cell> ? 2.f * norm_of_formed + 4.f * other
                                            : float(H) * other;
      *memory.growth(step) = step == 0 ? 0.f : *memory.growth(step - 1) + (norm == 0.f ? 2 * kZeroGrowth : log2f(norm));
    }
  }
};

template <Cell cell, int kUnits>
constexpr int kProductThreads = 32 * (kParts<cell> * kUnits / 16 + kFeeders);

// Grid: (splits, chunks - 1, B) flattened, split fastest; a split has its own columns.
template <Cell cell, int kUnits>
__global__ void __launch_bounds__(kProductThreads<cell, kUnits>, !kTwoStates<cell> && kUnits == 64 ? 2 : 1)
    product_kernel(const ScanShape shape, const ScanChain<float> a, const BlockGeometry p) {
  using Memory = ProductMemory<cell, kUnits>;
  constexpr int kTiles = kUnits / 8, kAll = kParts<cell> * kTiles;  // of 8 entries of a column
  extern __shared__ __align__(16) unsigned char shared[];
  const Memory memory(shared);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, workers = blockDim.x / 32 - kFeeders;
  const int split = blockIdx.x % p.splits;
  const int64_t rest = blockIdx.x / p.splits, chunk = rest % (p.chunks - 1), row = rest / (p.chunks - 1);
  const int H = shape.H, length = int(p.length);
  const ChunkMap<float> map(p, row, chunk);
  fill(memory, p.weights, shared, !kDirect<cell>, kTwoStates<cell> ? Traits<cell>::kThroughOutput : 0);

  if (warp >= workers) {
    const int own = int(threadIdx.x) - 32 * workers;
    Feeder<cell, kUnits> feeder(memory, shape, a, p.weights, row, shape.T - 1 - chunk * p.length, own);
    for (int step = 0; step < length; ++step) {
      feeder.feed(step, step + 1 < length);
      step_sync();
    }
    step_sync();
    if (split == 0) {
      if (own < kUnits) {
        map.offset[own] = feeder.gh;
        if constexpr (kParts<cell> == 2) map.offset[kUnits + own] = feeder.gc;
      }
      if (own == 0) *map.growth = *memory.growth(length - 1);
    }
    return;
  }

  // P^T: columns column0 + g and + 8 of P, entries 8 q + 2 c and + 1, q counting through both parts of an LSTM's state.
  const int g = lane / 4, c = lane % 4, column0 = 16 * (split * workers + warp);
  const bool idle = column0 % kUnits >= H;
  float P[kAll][4];
#pragma unroll
  for (int q = 0; q < kAll; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) P[q][i] = !idle && 8 * q + 2 * c + i % 2 == column0 + g + i / 2 * 8 ? 1.f : 0.f;
  }
  ColumnPair columns;

  for (int step = 0; step < length; ++step) {
    step_sync();
    if (idle) continue;
    if (step > 0) columns.rescale_after_step(P, step == 1, false, *memory.growth(step - 1));
    const float* const coefficient = memory.coefficient(step) + 2 * c;
    const uint16_t* const tile = memory.formed(step);
    float Q[kTiles][4];
#pragma unroll
    for (int q = 0; q < kTiles; ++q) Q[q][0] = Q[q][1] = Q[q][2] = Q[q][3] = 0.f;
#pragma unroll
    for (int kk = 0; kk < kTiles / 2; ++kk) {
      if (16 * kk >= H) continue;
      float rows[2][4], through_output[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int q = 2 * kk + half;
        auto at = [&](int n) { return *reinterpret_cast<const float2*>(coefficient + n * kUnits + 8 * q); };
        float(&h)[4] = P[q];
        if constexpr (kTwoStates<cell>) {
          const float2 o = at(0), to_cell = at(1), carry = at(2);
          float(&cell_part)[4] = P[kTiles + q];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rows[half][i] = fmaf(i % 2 ? to_cell.y : to_cell.x, h[i], cell_part[i]);
            cell_part[i] = (i % 2 ? carry.y : carry.x) * rows[half][i];
            through_output[half][i] = (i % 2 ? o.y : o.x) * h[i];
          }
        } else if constexpr (kDirect<cell>) {
          // What flows on directly is added last and in full precision: with saturated gates it is nearly all.
          const float2 carry = at(0);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rows[half][i] = h[i];
            h[i] *= i % 2 ? carry.y : carry.x;
          }
        } else {
          const float2 d = at(0);
#pragma unroll
          for (int i = 0; i < 4; ++i) rows[half][i] = (i % 2 ? d.y : d.x) * h[i];
        }
      }
      multiply_rows<3, Memory::kPlane, Memory::kPitch, true>(rows, tile, kk, H, lane, Q);
      if constexpr (kTwoStates<cell>) {
        multiply_rows<3, Memory::kPlane, Memory::kPitch, true>(through_output, memory.constant(), kk, H, lane, Q);
      }
    }
#pragma unroll
    for (int q = 0; q < kTiles; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) P[q][i] = kDirect<cell> ? P[q][i] + Q[q][i] : Q[q][i];
    }
  }
  step_sync();
  if (!idle) columns.rescale_after_step(P, length == 1, true, *memory.growth(length - 1));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = column0 + g + 8 * h;
    if (j >= p.H) continue;
#pragma unroll
    for (int q = 0; q < kAll; ++q) {
      if (8 * q < p.H) {
        *reinterpret_cast<float2*>(map.product + j * (kParts<cell> * kUnits) + 8 * q + 2 * c) =
            make_float2(P[q][2 * h], P[q][2 * h + 1]);
      }
    }
    if (c == 0) {
      const Column<float>& column = h ? columns.right : columns.left;
      map.exponent[j] = column.exponent;
      map.loss[j] = column.loss;
    }
  }
}

// -------------------------------------------------------------------------------------------------------- 3. replay
template <Cell cell, int kUnits>
struct Replay {
  static constexpr int kWarps = kReplayThreads / 32, kAhead = 8, kVectors = vectors_per_step<cell>;
  static constexpr int kRows = kVectors * kUnits / kWarps, kColumns = kUnits / 32;  // of W, per warp and per lane
  static constexpr int kCopied = kSaved<cell> + 1;
  static_assert(kRows % 4 == 0);
  // In shared memory: the vectors that W multiplies, every warp's sums, and the ring of steps.
  static constexpr int kFloats = kVectors * kUnits + kWarps * kUnits + kAhead * kCopied * kUnits;

  // Steps [begin, end), counted from the end of the chain. Thread i < H enters and leaves with the gradient of unit i.
  // All threads of the block; `shared` is free again afterwards.
  template <bool kWrite>
  __device__ static __forceinline__ void run(const ScanShape& shape, const ScanChain<float>& a, int64_t row,
                                             int64_t begin, int64_t end, float& gh, float& gc, float* shared) {
    constexpr int K = chain_blocks(cell);
    const int H = shape.H, own = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool on = own < H;
    float* const vectors = shared;
    float* const partial = vectors + kVectors * kUnits;
    float* const ring = partial + kWarps * kUnits + own;

    float w[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int gate = (warp * kRows + r) / kUnits, k = (warp * kRows + r) % kUnits;
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const int n = lane + 32 * column;
        w[r][column] = k < H && n < H ? a.w_hh[(gate * H + k) * H + n] : 0.f;
      }
    }
    for (int i = threadIdx.x; i < kVectors * kUnits; i += kReplayThreads) vectors[i] = 0.f;  // the padding stays zero

    const int steps = int(end - begin);
    Cursor<cell, float> cursor(shape, a, shape.T - 1 - begin, row, min(own, H - 1));
    int fetched = 0;
    auto fetch = [&]() {
      if (fetched < steps) {
        const float* from[kSaved<cell>];
        cursor.sources(end == shape.T && fetched == steps - 1, from);
        float* const to = ring + fetched % kAhead * (kCopied * kUnits);
#pragma unroll
        for (int n = 0; n < kCopied - 1; ++n) copy_async<4>(to + n * kUnits, from[n]);
        if (cursor.gradient) copy_async<4>(to + (kCopied - 1) * kUnits, cursor.gradient);
        cursor.down();
      }
      copy_commit();
      ++fetched;
    };
    if (on) {
      for (int d = 0; d < kAhead - 1; ++d) fetch();
    }
    const bool arriving = a.grad_output != nullptr;
    const int64_t out_step = (shape.reverse ? shape.B : -shape.B) * K * H;
    [[maybe_unused]] float* out =
        kWrite ? a.dgates + row_of<float>(shape, shape.T - 1 - begin, row) * K * H + own : nullptr;
    __syncthreads();

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      float direct = 0.f;
      if (on) {
        // A thread copies for itself alone, so that no barrier is needed before it reads.
        copy_wait<kAhead - 2>();
        const float* const slot = ring + step % kAhead * (kCopied * kUnits);
        float saved[kSaved<cell>];
#pragma unroll
        for (int n = 0; n < kCopied - 1; ++n) saved[n] = slot[n * kUnits];
        const float dh = gh + (arriving ? slot[(kCopied - 1) * kUnits] : 0.f);
        fetch();
        const Derivative<cell, float> j(saved);
        auto publish = [&](int vector, float value) { vectors[vector * kUnits + own] = value; };
        auto write = [&](int block, float value) {
          if (kWrite) out[block * H] = value;
        };
        direct = send(j, dh, gc, publish, write);
        if (kWrite) out += out_step;
      }
      __syncthreads();
      float sum[kColumns] = {};
#pragma unroll
      for (int r = 0; r < kRows; r += 4) {
        const float4 v = *reinterpret_cast<const float4*>(vectors + warp * kRows + r);
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
          sum[column] = fmaf(w[r][column], v.x, sum[column]);
          sum[column] = fmaf(w[r + 1][column], v.y, sum[column]);
          sum[column] = fmaf(w[r + 2][column], v.z, sum[column]);
          sum[column] = fmaf(w[r + 3][column], v.w, sum[column]);
        }
      }
#pragma unroll
      for (int column = 0; column < kColumns; ++column) partial[warp * kUnits + lane + 32 * column] = sum[column];
      __syncthreads();
      if (on) {
        float total[2] = {};
#pragma unroll
        for (int i = 0; i < kWarps; ++i) total[i % 2] += partial[i * kUnits + own];
        // What flows on directly comes last: with saturated gates it is nearly all, and would absorb the rest.
        gh = (total[0] + total[1]) + direct;
      }
    }
    copy_wait<0>();
    __syncthreads();
  }
};

// The gradient that enters the chain at its end, of unit i.
__device__ inline float2 load_start(const ScanShape& shape, const ScanChain<float>& a, int64_t row, int i) {
  const int64_t at = row * shape.H + i;
  return make_float2(a.grad_h_n ? a.grad_h_n[at] : 0.f, a.grad_c_n ? a.grad_c_n[at] : 0.f);
}

// Grid: (chunks, B) flattened, chunks fastest.
template <Cell cell, int kUnits>
__global__ void __launch_bounds__(kReplayThreads)
    replay_kernel(const ScanShape shape, const ScanChain<float> a, const BlockGeometry p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int64_t chunk = blockIdx.x % p.chunks, row = blockIdx.x / p.chunks;
  const int own = threadIdx.x;
  const bool on = own < shape.H;
  float2 g{};
  if (on && chunk == 0) {
    g = load_start(shape, a, row, own);
  } else if (on) {
    const float* const start = chunk_start<float>(p, row, chunk);
    g.x = start[own];
    if constexpr (kParts<cell> == 2) g.y = start[kUnits + own];
  }
  const int64_t begin = chunk * p.length, end = min(begin + p.length, shape.T);
  Replay<cell, kUnits>::template run<true>(shape, a, row, begin, end, g.x, g.y, reinterpret_cast<float*>(shared));
  if (on && chunk == p.chunks - 1) {
    a.grad_h0[row * shape.H + own] = g.x;
    if constexpr (kTwoStates<cell>) a.grad_c0[row * shape.H + own] = g.y;
  }
}

// -------------------------------------------------------------------------------------------------------- 2.
// boundaries Shared memory: the barriers, x, z and the sums of carry_through_chunks, then its ring, which replay uses
// in turn.
template <Cell cell, int kUnits>
struct BoundariesLayout {
  static constexpr int kStates = kParts<cell> * kUnits, kPartial = 4 * kReplayThreads;
  static constexpr int kFixed = 32 + 2 * (kReplayThreads / 32) * 4 + 4 * (2 * kStates + kPartial);  // bytes
  static_assert(kFixed % 16 == 0);
  static size_t bytes(const BlockGeometry& p) {
    const size_t ring = size_t(p.map_stages) * p.H * p.padded * sizeof(float);
    return kFixed + std::max(ring, Replay<cell, kUnits>::kFloats * sizeof(float));
  }
};

// Apart from the kernel, whose registers W would crowd.
template <Cell cell, int kUnits>
__device__ __noinline__ float2 redo_chunk(const ScanShape& shape, const ScanChain<float>& a, int64_t row, int64_t begin,
                                          int64_t end, float gh, float gc, float* shared) {
  Replay<cell, kUnits>::template run<false>(shape, a, row, begin, end, gh, gc, shared);
  return make_float2(gh, gc);
}

// Grid: B.
template <Cell cell, int kUnits>
__global__ void __launch_bounds__(kReplayThreads)
    boundaries_kernel(const ScanShape shape, const ScanChain<float> a, const BlockGeometry p) {
  using Layout = BoundariesLayout<cell, kUnits>;
  extern __shared__ __align__(16) unsigned char shared[];
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared);
  int* const scratch = reinterpret_cast<int*>(barriers + 4);
  float* const x = reinterpret_cast<float*>(scratch + 2 * (kReplayThreads / 32));
  float* const z = x + Layout::kStates;
  float* const partial = z + Layout::kStates;
  unsigned char* const ring = shared + Layout::kFixed;
  const int64_t row = blockIdx.x;
  const int own = threadIdx.x;
  if (own < kUnits) {
    const float2 g = own < shape.H ? load_start(shape, a, row, own) : float2{};
    x[own] = g.x;
    if constexpr (kParts<cell> == 2) x[kUnits + own] = g.y;
  }
  carry_through_chunks<float, Traits<cell>::kSelects>(
      p, row, {x, z, partial, ring, barriers, scratch}, [&](int64_t chunk) {
        const bool on = own < shape.H;
        const float gh = on ? x[own] : 0.f, gc = on && kParts<cell> == 2 ? x[kUnits + own] : 0.f;
        const int64_t begin = chunk * p.length;
        const float2 g =
            redo_chunk<cell, kUnits>(shape, a, row, begin, begin + p.length, gh, gc, reinterpret_cast<float*>(ring));
        if (on) {
          x[own] = g.x;
          if constexpr (kParts<cell> == 2) x[kUnits + own] = g.y;
        }
      });
}

// -------------------------------------------------------------------------------------------------------- launchers
// w_hh (G, H, H) padded with zeros to (G, units, units).
__global__ void pad_weights_kernel(int H, int units, int count, const float* w_hh, float* padded) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const int n = at % units, k = at / units % units, gate = at / (units * units);
  padded[at] = k < H && n < H ? w_hh[(gate * H + k) * H + n] : 0.f;
}

template <Cell cell, int kUnits>
void launch_units(const ScanShape& shape, const ScanChain<float>& a, BlockGeometry p, cudaStream_t stream) {
  if (p.chunks > 1) {
    float* const padded = static_cast<float*>(p.workspace) + p.workspace_size();
    const int count = gate_blocks(cell) * kUnits * kUnits;
    p.weights = padded;
    launch("rnn_scan_pad_weights", pad_weights_kernel, (count + 255) / 256, dim3(256), 0, stream, shape.H, kUnits,
           count, a.w_hh, padded);
    launch("rnn_scan_products", product_kernel<cell, kUnits>, shape.B * (p.chunks - 1) * p.splits,
           dim3(32 * (kParts<cell> * kUnits / 16 / p.splits + kFeeders)), ProductMemory<cell, kUnits>::kBytes, stream,
           shape, a, p);
    launch("rnn_scan_boundaries", boundaries_kernel<cell, kUnits>, shape.B, dim3(kReplayThreads),
           BoundariesLayout<cell, kUnits>::bytes(p), stream, shape, a, p);
  }
  launch("rnn_scan_replay", replay_kernel<cell, kUnits>, shape.B * p.chunks, dim3(kReplayThreads),
         Replay<cell, kUnits>::kFloats * sizeof(float), stream, shape, a, p);
}

template <Cell cell>
void launch_cell(const ScanShape& shape, const ScanChain<float>& a, const BlockGeometry& p, cudaStream_t stream) {
  if (p.units == 64) return launch_units<cell, 64>(shape, a, p, stream);
  if constexpr (Traits<cell>::kScanHidden > 64) {
    if (p.units == 96) return launch_units<cell, 96>(shape, a, p, stream);
    launch_units<cell, 128>(shape, a, p, stream);
  }
}

}  // namespace

template <Cell cell>
void cell_block(const ScanShape& shape, const ScanChain<float>& args, BlockGeometry p, cudaStream_t stream) {
  launch_cell<cell>(shape, args, p, stream);
}

}  // namespace weft::rnn
