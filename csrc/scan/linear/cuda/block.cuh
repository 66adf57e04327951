// Dense linear scan for kWarpMaxH < H <= kBlockMaxH, one element type per .cu file that includes this.
//
// The steps are cut into `chunks` chunks of `length`. With one chunk only (3) runs: the sequential route.
//   (1) products:   per (chunk, row of the batch) the product P = A[last] ... A[first] and the offset v of y = P x + v;
//   (2) boundaries: per row of the batch, sequential over chunks: the state at every chunk's start;
//   (3) replay:     per (chunk, row of the batch), matrix-vector products from that state, which write the output.
// Per step, (1) reads A once and takes 6 H^3 bf16 multiply-adds (fp16 5, bf16 3) on one SM; (3) reads A once, and is
// bound by that where there are blocks enough, else by 0.7 to 1.2 us of latency. (2) reads a P of H^2 per chunk.
// Registers hold P (1); shared memory holds the planes of A (1), rings of P (2) and of A (3), and the states.
//
// (1) keeps P in registers for the whole chunk. Every warp owns 16 columns of P, which need nothing from the other
// warps, and computes the transposed product P^T A^T: the accumulator layout of mma then is the layout of the left
// operand of the next step, and only A goes through shared memory. Four more warps, the feeders, bring A[t + 1] there
// while A[t] is multiplied, and advance v by fused multiply-adds on the way. fp32 numbers are sums of three bf16
// numbers (fp16 of two, bf16 is one), and the products down to 2^-16 of the largest are summed, six for fp32: on
// Hopper the same number of mma instructions as three TF32 products, which would leave the split of A to every warp.
// The sums over 16 k leave the tensor core, which truncates, and are added up in fp32. Truncation errs to one side:
// after 2000 steps of random matrices of spectral radius 1 and H = 128 the states are off by 7e-6, those of replay
// alone by 1e-6 (measured on an H200).
//
// What keeps P from overflowing, and when (2) redoes a chunk step by step, is in block_chunks.cuh.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "scan/linear/cuda/block.h"
#include "scan/linear/cuda/block_chunks.cuh"

namespace weft::scan::block {

template <int kBytes, typename E>
__device__ inline void copy_rows_by(E* to, int to_pitch, const E* from, int64_t from_pitch, int rows, int columns) {
  constexpr int kStep = kBytes / int(sizeof(E));
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int r = threadIdx.x / 32; r < rows; r += warps) {
    for (int c = lane * kStep; c < columns; c += 32 * kStep) {
      copy_async<kBytes>(to + r * to_pitch + c, from + r * from_pitch + c);
    }
  }
}

// A rows x columns block to shared memory, in pieces of `bytes`, which divides every address and row.
template <typename E>
__device__ inline void copy_rows(E* to, int to_pitch, const E* from, int64_t from_pitch, int rows, int columns,
                                 int bytes) {
  if (bytes == 16) {
    copy_rows_by<16>(to, to_pitch, from, from_pitch, rows, columns);
  } else if (bytes == 8) {
    copy_rows_by<8>(to, to_pitch, from, from_pitch, rows, columns);
  } else if (bytes == 4) {
    if constexpr (sizeof(E) <= 4) copy_rows_by<4>(to, to_pitch, from, from_pitch, rows, columns);
  } else if constexpr (sizeof(E) == 2) {
    // 16-bit elements at odd addresses: cp.async has no such piece, so many loads have to be under way together.
    constexpr int kRows = 4, kColumns = 4;  // of one lane at a time; there are no more than 128 columns
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int r0 = threadIdx.x / 32; r0 < rows; r0 += kRows * warps) {
      E held[kRows][kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int r = r0 + i * warps, c = lane + 32 * j;
          if (r < rows && c < columns) held[i][j] = from[r * from_pitch + c];
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int r = r0 + i * warps, c = lane + 32 * j;
          if (r < rows && c < columns) to[r * to_pitch + c] = held[i][j];
        }
      }
    }
  }
}

// How many bf16 numbers make one element.
template <typename E>
constexpr int kPlanes = std::is_same_v<E, float>    ? 3
                        : std::is_same_v<E, __half> ? 2
                                                    : 1;

constexpr int kBatch = 8;  // loads of a feeder that are under way together

// Shared memory of (1): A's planes twice, then in floats v twice, the feeders' sums and maxima, and the growth.
template <typename E, int kPadded>
struct ProductMemory {
  // 16 bytes more than a multiple of 32 banks: the eight rows that ldmatrix reads lie in different banks.
  static constexpr int kPitch = kPadded + 8, kPlane = kPadded * kPitch, kTile = kPlanes<E> * kPlane;
  static constexpr int kRowsAtOnce = kPadded == 64 ? 2 : 1;  // of one feeder's load of 4 elements per lane
  static constexpr size_t kBytes =
      2 * kTile * sizeof(uint16_t) + (2 * kPadded + kFeeders * kRowsAtOnce * kPadded + kFeeders + 4) * sizeof(float);
  uint16_t* tiles;
  float *offsets, *sums, *tops, *growths;
  __device__ explicit ProductMemory(unsigned char* shared) {
    tiles = reinterpret_cast<uint16_t*>(shared);
    offsets = reinterpret_cast<float*>(tiles + 2 * kTile);
    sums = offsets + 2 * kPadded;
    tops = sums + kFeeders * kRowsAtOnce * kPadded;
    growths = tops + kFeeders;
  }
  // What step t leaves, t = -1 included.
  __device__ uint16_t* tile(int step) const { return tiles + step % 2 * kTile; }
  __device__ float* v(int step) const { return offsets + (step + 2) % 2 * kPadded; }
  __device__ float* growth(int step) const { return growths + (step + 4) % 4; }
};

// What a feeder keeps between steps: its place, and the elements that it has asked for.
template <typename E, int kPadded, bool kTransposed>
struct Feeder {
  using Memory = ProductMemory<E, kPadded>;
  static constexpr int kRowsAtOnce = Memory::kRowsAtOnce, kLanes = kPadded / 4, kStride = kFeeders * kRowsAtOnce;
  static constexpr int kBatches = kPadded / (kBatch * kStride);
  struct alignas(4 * sizeof(E)) Four {
    E at[4];
  };
  using Raw = std::conditional_t<sizeof(E) == 4, uint4, uint2>;
  static_assert(sizeof(Raw) == sizeof(Four));

  const Arguments& p;
  const Memory& memory;
  const int lane, warp, own, unit, row0;
  const bool vector, inside;  // by 4 elements; has columns below H
  Raw raw[kBatch];

  __device__ Feeder(const Arguments& p, const Memory& memory, int index)
      : p(p),
        memory(memory),
        lane(index % 32),
        warp(index / 32),
        own(index),
        unit(lane % kLanes),
        row0(warp * kRowsAtOnce + (kRowsAtOnce == 2 ? lane / kLanes : 0)),
        vector(p.piece >= int(sizeof(Four))),
        inside(lane < kLanes * kRowsAtOnce && 4 * unit < p.H) {}

  __device__ int row(int batch, int i) const { return (batch * kBatch + i) * kStride + row0; }

  // Asks for the elements of one row without waiting for them.
  __device__ void load(const E* A, int batch, int i) {
    const int r = row(batch, i);
    const E* const from = A + r * p.A_ld + 4 * unit;
    raw[i] = Raw{};
    if (!inside || r >= p.H) return;
    if (vector) {
      raw[i] = *reinterpret_cast<const Raw*>(from);
    } else {
      Four four{};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (4 * unit + e < p.H) four.at[e] = from[e];
      }
      raw[i] = *reinterpret_cast<const Raw*>(&four);
    }
  }

  // One step: A's planes into `tile`, and v_new = A v + b (b alone at the first step), growth_new. The first batch has
  // been asked for; the first of the next step, at A_next unless that is null, is when this returns.
  __device__ void feed(const E* A, const E* A_next, const E* b, bool first, uint16_t* tile, const float* v,
                       float* v_new, float growth, float* growth_new) {
    const float offset = own < p.H ? to_acc(b[own]) : 0.f;
    float4 x{};
    if constexpr (!kTransposed) {
      if (inside) x = *reinterpret_cast<const float4*>(v + 4 * unit);
    }
    float columns[4] = {}, top = 0.f;
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      float dot[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = row(batch, i);
        float a[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = to_acc(reinterpret_cast<const E*>(&raw[i])[e]);
        if (batch + 1 < kBatches) {
          load(A, batch + 1, i);
        } else if (A_next) {
          load(A_next, 0, i);
        }
        top = fmaxf(top, fmaxf(fmaxf(fabsf(a[0]), fabsf(a[1])), fmaxf(fabsf(a[2]), fabsf(a[3]))));
        if constexpr (kTransposed) {
          const float xr = v[r];
#pragma unroll
          for (int e = 0; e < 4; ++e) columns[e] = fmaf(a[e], xr, columns[e]);
        } else {
          dot[i] = fmaf(a[0], x.x, fmaf(a[1], x.y, fmaf(a[2], x.z, a[3] * x.w)));
        }
        if (inside) {
#pragma unroll
          for (int plane = 0; plane < kPlanes<E>; ++plane) {
            uint2 pairs;
            pairs.x = take_bf16(a[0], a[1]);
            pairs.y = take_bf16(a[2], a[3]);
            *reinterpret_cast<uint2*>(tile + plane * Memory::kPlane + r * Memory::kPitch + 4 * unit) = pairs;
          }
        }
      }
      if constexpr (!kTransposed) {
        // Three exchanges leave a lane with one row of the eight, the others finish its sum.
        constexpr int kTop = kLanes == 16 ? 8 : 16;
        int which = 0;
#pragma unroll
        for (int d = kTop, n = kBatch / 2; n > 0; d /= 2, n /= 2) {
          const bool upper = lane & d;
          which += upper ? n : 0;
#pragma unroll
          for (int i = 0; i < n; ++i) {
            const float keep = upper ? dot[i + n] : dot[i], give = upper ? dot[i] : dot[i + n];
            dot[i] = keep + __shfl_xor_sync(~0u, give, d);
          }
        }
#pragma unroll
        for (int d = kTop / 8; d > 0; d /= 2) dot[0] += __shfl_xor_sync(~0u, dot[0], d);
        const int r = (batch * kBatch + which) * kStride + warp * kRowsAtOnce + (kRowsAtOnce == 2 ? lane / 16 : 0);
        if (lane % (kTop / 4) == 0) memory.sums[r] = dot[0];
      }
    }
    if constexpr (kTransposed) {
      if (lane < kLanes * kRowsAtOnce) {
        *reinterpret_cast<float4*>(memory.sums + row0 * kPadded + 4 * unit) =
            make_float4(columns[0], columns[1], columns[2], columns[3]);
      }
    }
    // Magnitudes are ordered as their bits.
    const float warp_top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top)));
    if (lane == 0) memory.tops[warp] = warp_top;
    feeders_sync();
    if (own < p.H) {
      float sum = 0.f;
      if constexpr (kTransposed) {
#pragma unroll
        for (int i = 0; i < kStride; ++i) sum += memory.sums[i * kPadded + own];
      } else {
        sum = memory.sums[own];
      }
      v_new[own] = first ? offset : sum + offset;
    }
    if (own == 0) {
      for (int i = 0; i < kFeeders; ++i) top = fmaxf(top, memory.tops[i]);
      // H times the largest element bounds the norm.
      *growth_new = first ? 0.f : growth + (top == 0.f ? 2 * kZeroGrowth : log2f(top) + log2f(float(p.H)));
    }
    feeders_sync();
  }
};

// (1) for fp32, fp16 and bf16. Grid: (splits, chunks - 1, B) flattened, split fastest; a split has its own columns.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(32 * (kPadded / 16 + kFeeders), kPadded == 64 ? 2 : 1)
    products_kernel(const Arguments p) {
  using Memory = ProductMemory<E, kPadded>;
  constexpr int kTiles = kPadded / 8, kPitch = Memory::kPitch;
  extern __shared__ __align__(16) unsigned char shared[];
  const Memory memory(shared);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, workers = blockDim.x / 32 - kFeeders;
  const int split = blockIdx.x % p.splits;
  const int64_t rest = blockIdx.x / p.splits, chunk = rest % (p.chunks - 1), row = rest / (p.chunks - 1);
  const int64_t start = p.first + chunk * p.length;
  const E* const A = static_cast<const E*>(p.A) + start * p.A_t + row * p.A_b;
  const E* const b = static_cast<const E*>(p.b) + start * p.b_t + row * p.b_b;
  const int H = p.H, length = int(p.length);
  const ChunkMap<float> map(p, row, chunk);

  clear_shared(shared, int(Memory::kBytes));
  __syncthreads();

  if (warp >= workers) {
    Feeder<E, kPadded, kTransposed> feeder(p, memory, int(threadIdx.x) - 32 * workers);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) feeder.load(A, 0, i);
    for (int step = 0; step < length; ++step) {
      const E* const now = A + step * p.A_t;
      feeder.feed(now, step + 1 < length ? now + p.A_t : nullptr, b + step * p.b_t, step == 0, memory.tile(step),
                  memory.v(step - 1), memory.v(step), *memory.growth(step - 1), memory.growth(step));
      step_sync();
    }
    step_sync();
    if (split == 0) {
      const int own = threadIdx.x - 32 * workers;
      if (own < H) map.offset[own] = memory.v(length - 1)[own];
      if (own == 0) *map.growth = *memory.growth(length - 1);
    }
    return;
  }

  const int g = lane / 4, c = lane % 4, column0 = 16 * (split * workers + warp);
  float P[kTiles][4];  // P^T: columns column0 + g and + 8 of P, rows 8 q + 2 c and + 1
  ColumnPair columns;

  for (int step = 0; step < length; ++step) {
    step_sync();
    if (column0 >= H) continue;
    const uint16_t* const tile = memory.tile(step);
    if (step == 0) {
#pragma unroll
      for (int q = 0; q < kTiles; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = 8 * q + 2 * c + i % 2, j = column0 + g + i / 2 * 8;
          P[q][i] = 0.f;
#pragma unroll
          for (int plane = kPlanes<E> - 1; plane >= 0; --plane) {
            P[q][i] += __uint_as_float(
                uint32_t(tile[plane * Memory::kPlane + (kTransposed ? j * kPitch + r : r * kPitch + j)]) << 16);
          }
        }
      }
      continue;
    }
    columns.rescale_after_step(P, step == 1, false, *memory.growth(step - 1));
    float Q[kTiles][4];
#pragma unroll
    for (int q = 0; q < kTiles; ++q) Q[q][0] = Q[q][1] = Q[q][2] = Q[q][3] = 0.f;
#pragma unroll
    for (int kk = 0; kk < kTiles / 2; ++kk) {
      if (16 * kk >= H) continue;
      float rows[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[0][i] = P[2 * kk][i];
        rows[1][i] = P[2 * kk + 1][i];
      }
      multiply_rows<kPlanes<E>, Memory::kPlane, kPitch, kTransposed>(rows, tile, kk, H, lane, Q);
    }
#pragma unroll
    for (int q = 0; q < kTiles; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) P[q][i] = Q[q][i];
    }
  }
  step_sync();
  if (column0 >= H) return;
  columns.rescale_after_step(P, length == 1, true, *memory.growth(length - 1));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = column0 + g + 8 * h;
    if (j >= H) continue;
#pragma unroll
    for (int q = 0; q < kTiles; ++q) {
      if (8 * q < H) {
        *reinterpret_cast<float2*>(map.product + j * kPadded + 8 * q + 2 * c) =
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

// The state and the ring of stages of replay and boundaries, in shared memory.
template <typename E>
struct ReplayMemory {
  using S = acc_t<E>;
  S* x[2];
  S* partial;          // one pack of sums per thread, for transposed A
  uint64_t* barriers;  // one per stage
  unsigned char* offsets;
  unsigned char* ring;
  int offset_bytes, stage_bytes;

  static constexpr int kPartialBytes = kReplayThreads * Pack<E>::kSize * sizeof(S);

  __host__ __device__ static int offset_stage(const Arguments& p) { return p.padded * int(sizeof(E)) + 16; }
  __host__ __device__ static int pitch(const Arguments& p) {
    return (p.H + Pack<E>::kSize - 1) / Pack<E>::kSize * Pack<E>::kSize;
  }
  __host__ __device__ static int stage(const Arguments& p) { return p.tile_rows * pitch(p) * int(sizeof(E)); }
  // Everything but the ring.
  __host__ __device__ static int fixed_bytes(const Arguments& p) {
    return 2 * p.padded * int(sizeof(S)) + kPartialBytes + kMaxStages * 8 + p.stages * offset_stage(p);
  }
  static int bytes(const Arguments& p) { return fixed_bytes(p) + p.stages * stage(p); }

  __device__ ReplayMemory(const Arguments& p, unsigned char* shared) {
    x[0] = reinterpret_cast<S*>(shared);
    x[1] = x[0] + p.padded;
    partial = x[1] + p.padded;
    barriers = reinterpret_cast<uint64_t*>(reinterpret_cast<unsigned char*>(partial) + kPartialBytes);
    offsets = reinterpret_cast<unsigned char*>(barriers + kMaxStages);
    offset_bytes = offset_stage(p);
    ring = shared + fixed_bytes(p);
    stage_bytes = stage(p);
  }
};

// As many states as there are elements in a pack, from a 16-byte aligned place.
template <typename S, int kCount>
__device__ inline void load_states(const S* from, S (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += Pack<S>::kSize) {
    const auto pack = *reinterpret_cast<const Pack<S>*>(from + i);
#pragma unroll
    for (int e = 0; e < Pack<S>::kSize; ++e) to[i + e] = pack.at[e];
  }
}

// Steps [begin, end) from the state memory.x[0] (zero beyond H), which holds the last state afterwards. All threads of
// the block; writes the output where `write` is set.
template <typename E, int kPadded, bool kTransposed>
__device__ void replay(const Arguments& p, const ReplayMemory<E>& memory, int64_t row, int64_t begin, int64_t end,
                       bool write) {
  using S = acc_t<E>;
  constexpr int kPack = Pack<E>::kSize;
  // As A[t] x: 8 lanes share a row, each group of 8 lanes has rows group, group + 32, ...
  constexpr int kLanes = 8, kGroups = kReplayThreads / kLanes, kRows = kPadded / kGroups;
  constexpr int kPacks = (kPadded / kPack + kLanes - 1) / kLanes;
  const int H = p.H, pitch = ReplayMemory<E>::pitch(p), tile_rows = p.tile_rows;
  const int tiles = (H + tile_rows - 1) / tile_rows, packs = pitch / kPack, parts = kReplayThreads / packs;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int pack = threadIdx.x % packs, part = threadIdx.x / packs;
  const E* const A = static_cast<const E*>(p.A) + row * p.A_b;
  const E* const b = static_cast<const E*>(p.b) + row * p.b_b;
  E* const out = static_cast<E*>(p.out) + row * p.out_b;

  // 16-bit rows of b that do not consist of words are copied by ordinary loads.
  const bool words = sizeof(E) >= 4 || (reinterpret_cast<uintptr_t>(b) % 4 == 0 && p.b_t % 2 == 0 && H % 2 == 0);
  int64_t next_step = begin;
  int next_tile = 0, next_stage = 0, next_slot = 0;
  auto issue = [&]() {
    if (next_step < end) {
      const int r0 = next_tile * tile_rows, rows = min(tile_rows, H - r0);
      E* const stage = reinterpret_cast<E*>(memory.ring + next_stage * memory.stage_bytes);
      const E* const from = A + next_step * p.A_t + r0 * p.A_ld;
      if (kCopyEngine && p.bulk) {
        if (threadIdx.x == 0) {
          const int bytes = rows * pitch * int(sizeof(E));
          bulk_copy(stage, from, bytes, memory.barriers + next_stage);
        }
      } else {
        if (p.flat) {
          copy_flat(stage, from, rows * pitch * int(sizeof(E)));
        } else {
          copy_rows(stage, pitch, from, p.A_ld, rows, H, p.piece);
        }
      }
      if (next_tile == 0) {
        const E* const bt = b + next_step * p.b_t;
        E* const slot = reinterpret_cast<E*>(memory.offsets + next_slot * memory.offset_bytes);
        if (words) {
          constexpr int kWord = sizeof(E) == 2 ? 2 : 1, kBytes = sizeof(E) == 8 ? 8 : 4;
          for (int i = threadIdx.x * kWord; i < H; i += kReplayThreads * kWord) copy_async<kBytes>(slot + i, bt + i);
        } else {
          for (int i = threadIdx.x; i < H; i += kReplayThreads) slot[i] = bt[i];
        }
        next_slot = next_slot + 1 == p.stages ? 0 : next_slot + 1;
      }
      if (++next_tile == tiles) {
        next_tile = 0;
        ++next_step;
      }
      next_stage = next_stage + 1 == p.stages ? 0 : next_stage + 1;
    }
    copy_commit();
  };

  if (!p.flat) clear_shared(memory.ring, p.stages * memory.stage_bytes);  // the end of every row
  if (kCopyEngine && p.bulk) bulk_init(memory.barriers, p.stages);
  __syncthreads();
  for (int i = 0; i + 1 < p.stages; ++i) issue();

  S* x = memory.x[0];
  S* y = memory.x[1];
  int stage_index = 0, slot = 0;
  uint32_t parity = 0;
  for (int64_t t = begin; t < end; ++t) {
    const E* const bt = reinterpret_cast<const E*>(memory.offsets + slot * memory.offset_bytes);
    S sums[kPack] = {};
    for (int tile_index = 0; tile_index < tiles; ++tile_index) {
      copy_wait_dynamic(p.stages - 2);
      if (kCopyEngine && p.bulk) bulk_release();
      __syncthreads();
      issue();
      const E* const tile = reinterpret_cast<const E*>(memory.ring + stage_index * memory.stage_bytes);
      if (kCopyEngine && p.bulk) bulk_wait(memory.barriers + stage_index, parity);
      if (++stage_index == p.stages) {
        stage_index = 0;
        parity ^= 1;
      }
      const int r0 = tile_index * tile_rows, rows = min(tile_rows, H - r0);
      if constexpr (kTransposed) {
        if (part < parts) accumulate_columns<E, S>(tile, pitch, rows, x + r0, part, parts, pack, sums);
      } else {
        S sum[4] = {};
        // Rows beyond the last are summed for nothing, so that no load waits for a branch.
        auto multiply = [&](auto whole) {
#pragma unroll
          for (int i = 0; i < kPacks; ++i) {
            const int at = lane + kLanes * i;
            if (whole() || at < packs) {
              S xs[kPack];
              load_states(x + at * kPack, xs);
#pragma unroll
              for (int m = 0; m < kRows; ++m) {
                const int r = min(group + kGroups * m, rows - 1);
                const auto a = *reinterpret_cast<const Pack<E>*>(tile + r * pitch + at * kPack);
#pragma unroll
                for (int e = 0; e < kPack; ++e) sum[m] += to_acc(a.at[e]) * xs[e];
              }
            }
          }
        };
        if (packs == kLanes * kPacks) {
          multiply(std::true_type());
        } else {
          multiply(std::false_type());
        }
        // Each exchange sums over two lanes and shares the rows between them; the last leaves both with the sum.
        const bool upper = lane & 4, odd = lane & 2;
        S pair[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const S keep = upper ? sum[m + 2] : sum[m], give = upper ? sum[m] : sum[m + 2];
          pair[m] = keep + __shfl_xor_sync(~0u, give, 4);
        }
        S total = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 2);
        total += __shfl_xor_sync(~0u, total, 1);
        const int r = group + kGroups * (2 * upper + odd);
        if (lane % 2 == 0 && r < rows) {
          const S value = total + to_acc(bt[r0 + r]);
          y[r0 + r] = value;
          if (write) out[t * p.out_t + r0 + r] = from_acc<E>(value);
        }
      }
    }
    if constexpr (kTransposed) {
#pragma unroll
      for (int e = 0; e < kPack; ++e) memory.partial[threadIdx.x * kPack + e] = sums[e];
      __syncthreads();
      if (threadIdx.x < H) {
        S value = 0;
#pragma unroll 8
        for (int i = 0; i < parts; ++i) value += memory.partial[i * packs * kPack + threadIdx.x];
        value += to_acc(bt[threadIdx.x]);
        y[threadIdx.x] = value;
        if (write) out[t * p.out_t + threadIdx.x] = from_acc<E>(value);
      }
    }
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    S* const old = x;
    x = y;
    y = old;
  }
  copy_wait<0>();
  __syncthreads();
  if (kCopyEngine && p.bulk) bulk_end(memory.barriers, p.stages);
  if (x != memory.x[0]) {
    for (int i = threadIdx.x; i < H; i += kReplayThreads) memory.x[0][i] = memory.x[1][i];
    __syncthreads();
  }
}

// The state before step p.first, in memory.x[0]; both states are zero beyond H.
template <typename E>
__device__ void load_start(const Arguments& p, const ReplayMemory<E>& memory, int64_t row) {
  for (int i = threadIdx.x; i < p.padded; i += kReplayThreads) {
    acc_t<E> value = 0;
    if (i < p.H) {
      value =
          to_acc(p.x0 ? static_cast<const E*>(p.x0)[row * p.x0_b + i] : static_cast<const E*>(p.b)[row * p.b_b + i]);
    }
    memory.x[0][i] = value;
    memory.x[1][i] = 0;
  }
}

// (3). Grid: (chunks, B) flattened, chunks fastest.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(kReplayThreads) replay_kernel(const Arguments p) {
  using S = acc_t<E>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ReplayMemory<E> memory(p, shared);
  const int64_t chunk = blockIdx.x % p.chunks, row = blockIdx.x / p.chunks;
  load_start(p, memory, row);
  if (chunk > 0) {
    const S* const start = chunk_start<S>(p, row, chunk);
    for (int i = threadIdx.x; i < p.H; i += kReplayThreads) memory.x[0][i] = start[i];
  } else if (!p.x0) {
    E* const out = static_cast<E*>(p.out) + row * p.out_b;
    const E* const b = static_cast<const E*>(p.b) + row * p.b_b;
    for (int i = threadIdx.x; i < p.H; i += kReplayThreads) out[i] = b[i];
  }
  const int64_t begin = p.first + chunk * p.length, end = min(begin + p.length, p.first + p.steps);
  replay<E, kPadded, kTransposed>(p, memory, row, begin, end, true);
}

constexpr int kScratchBytes = 2 * (kReplayThreads / 32) * sizeof(int) + 4 * sizeof(uint64_t);

template <typename E>
int boundaries_shared_bytes(const Arguments& p) {
  const int products = p.map_stages * p.H * p.padded * int(sizeof(acc_t<E>));
  return ReplayMemory<E>::fixed_bytes(p) + std::max(products, p.stages * ReplayMemory<E>::stage(p)) + kScratchBytes +
         p.padded * int(sizeof(acc_t<E>));
}

// (2). Grid: B.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(kReplayThreads) boundaries_kernel(const Arguments p, int shared_bytes) {
  using S = acc_t<E>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ReplayMemory<E> memory(p, shared);
  S* const z = reinterpret_cast<S*>(shared + shared_bytes - kScratchBytes) - p.padded;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + shared_bytes - kScratchBytes);
  const int64_t row = blockIdx.x;
  load_start(p, memory, row);
  carry_through_chunks<S, false>(
      p, row, {memory.x[0], z, memory.partial, memory.ring, barriers, reinterpret_cast<int*>(barriers + 4)},
      [&](int64_t chunk) {
        const int64_t begin = p.first + chunk * p.length;
        replay<E, kPadded, kTransposed>(p, memory, row, begin, begin + p.length, false);
      });
}

template <typename E, int kPadded, bool kTransposed>
void launch_padded(const Arguments& p, cudaStream_t stream) {
  if (p.chunks > 1) {
    if constexpr (!std::is_same_v<E, double>) {
      const int64_t blocks = p.batch * (p.chunks - 1) * p.splits;
      launch("linear_scan_block products", products_kernel<E, kPadded, kTransposed>, dim3(unsigned(blocks)),
             dim3(32 * (kPadded / 16 / p.splits + kFeeders)), ProductMemory<E, kPadded>::kBytes, stream, p);
    }
    const int bytes = boundaries_shared_bytes<E>(p);
    launch("linear_scan_block boundaries", boundaries_kernel<E, kPadded, kTransposed>, dim3(unsigned(p.batch)),
           dim3(kReplayThreads), bytes, stream, p, bytes);
  }
  launch("linear_scan_block replay", replay_kernel<E, kPadded, kTransposed>, dim3(unsigned(p.batch * p.chunks)),
         dim3(kReplayThreads), ReplayMemory<E>::bytes(p), stream, p);
}

template <typename E>
void launch_all(const Arguments& p, bool transposed, cudaStream_t stream) {
  auto with = [&](auto padded) {
    transposed ? launch_padded<E, padded(), true>(p, stream) : launch_padded<E, padded(), false>(p, stream);
  };
  if (p.padded == 64) {
    with(std::integral_constant<int, 64>());
  } else if (p.padded == 96) {
    with(std::integral_constant<int, 96>());
  } else {
    with(std::integral_constant<int, 128>());
  }
}

}  // namespace weft::scan::block
