// The product of a recurrence's step: the weights of a block, and their sums with the vector.
//
// Weights are fragments of mma.sync, in registers as far as they go, the rest in shared memory in the same order. The
// reduction index may be permuted freely as long as weights and vector agree, so a lane takes 16 contiguous bytes of a
// row, which serve two mma instructions, and no ldmatrix is needed.
#pragma once

#include "common/cuda/exchange_cluster.jit.cuh"
#include "rnn/persistent/cuda/recurrence_constants.jit.cuh"

namespace weft::rnn {

__device__ __forceinline__ uint4 rounded(uint4 v) {
  if constexpr (kType == RecurrenceType::kTF32) {
    return {round_tf32(v.x), round_tf32(v.y), round_tf32(v.z), round_tf32(v.w)};
  } else {
    return v;
  }
}

// One instruction on half of a chunk: 16 rows, 8 columns, 16 or 8 elements of the vector.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32* a, const u32* b) {
  if constexpr (kType == RecurrenceType::kHalf) {
    mma_f16(sum, a, b);
  } else if constexpr (kType == RecurrenceType::kBFloat16) {
    mma_bf16(sum, a, b);
  } else if constexpr (kType == RecurrenceType::kTF32) {
    mma_tf32(sum, a, b);
  } else {
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = cut_tf32(a[i]);
      low[i] = cut_off_tf32(a[i]);
    }
    const u32 b_high[2] = {cut_tf32(b[0]), cut_tf32(b[1])};
    mma_tf32(sum, low, b_high);
    const u32 b_low[2] = {cut_off_tf32(b[0]), cut_off_tf32(b[1])};
    mma_tf32(sum, high, b_low);
    mma_tf32(sum, high, b_high);
  }
}

// The product of a row tile with 16 bytes per lane of the vector. `a` holds both halves.
__device__ __forceinline__ void multiply_chunk(float (&sum)[kSums][4], const u32 (&a)[8], const uint4& b) {
  const u32 words[4] = {b.x, b.y, b.z, b.w};
  if constexpr (kFma) {
    // Two rows, each with the sums of two halves of the chunk.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& s = sum[0][i % 2 * 2 + i / 4];
      s = fmaf(__uint_as_float(a[i]), __uint_as_float(words[i / 2]), s);
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) multiply_add(sum[half % kSums], a + 4 * half, words + 2 * half);
  }
}

// 16 bytes of a row of the weights of a block, of a cluster those of all its blocks. w: of the head.
__device__ inline uint4 weights_chunk(const Element* w, int first_unit, int row, int index) {
  const int unit_out = first_unit + row % kRowUnits;
  const bool inside = row < kRowsOfUnit * kRowUnits && unit_out < kHidden;
  const Place first = place_of(index);
  if (!inside || first.unit >= kHidden) return {0, 0, 0, 0};
  if (!kBackward && kHidden % kPerChunk == 0 && (u64(w) & 15) == 0) {
    return *reinterpret_cast<const uint4*>(w + int64_t(row / kRowUnits * kAll + unit_out) * kHidden + first.unit);
  }
  Element e[kPerChunk];
#pragma unroll
  for (int i = 0; i < kPerChunk; ++i) {
    const Place in = place_of(index + i);
    const int64_t at = kBackward ? int64_t(in.value * kAll + in.unit) * kHidden + unit_out
                                 : int64_t(row / kRowUnits * kAll + unit_out) * kHidden + in.unit;
    e[i] = in.unit < kHidden ? w[at] : Element(0);
  }
  return pack(e);
}

// A warp's share of the block's weights: what a lane has in registers, and the rest in shared memory, where the lane's
// part begins at `own`.
constexpr int kInShared = kBlocks - kInRegisters, kTileBytes = kTileRows * kFragmentBytes;
using ResidentWeights = u32[kInRegisters > 0 ? kInRegisters : 1][kRowTiles][8];

// The fragment of the weights at block `b` of the vector. A lane's chunk of row r and of row r + 8 are the eight words
// of two mma instructions. first_row, first_index: the lane's first row, and the index of its first chunk in the
// vector.
__device__ __forceinline__ void load_fragment(const Args& args, int direction, int head, int block, int rank,
                                              int first_row, int first_index, int b, int tile, u32 (&words)[8]) {
  const int index = first_index + b * 4 * kPerChunk, first_unit = (block - rank) * kUnits;
  const Element* const w = args.w_hh[direction] + head * kHidden * kHidden;
  const uint4 upper = rounded(weights_chunk(w, first_unit, first_row + tile * 16, index));
  const uint4 lower = rounded(weights_chunk(w, first_unit, first_row + tile * 16 + 8, index));
  words[0] = upper.x, words[1] = lower.x, words[2] = upper.y, words[3] = lower.y;
  words[4] = upper.z, words[5] = lower.z, words[6] = upper.w, words[7] = lower.w;
}

__device__ __forceinline__ void weights_of_tile(const ResidentWeights& resident, u32 own, int b, int tile,
                                                u32 (&w)[8]) {
  if (b < kInRegisters) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = resident[b < kInRegisters ? b : 0][tile][i];
  } else {
    const u32 from = own + ((b - kInRegisters) * kRowTiles + tile) * kTileBytes;
    const uint4 x = load_shared(from), y = load_shared(from + kTileBytes / 2);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
  }
}

// A warp's sums of its rows over its part of the vector.
using Sums = float[kRowTiles][kVectors][kSums][4];

// partials: a row of kPartialPitch for each part of the vector and sequence.
__device__ __forceinline__ void store_sums(const Sums& sums, float* partials, int warp_part, int lane, int first_row) {
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      if constexpr (kFma) {
        // Lanes 0 and 1 of each four end with the sums of rows r and r + 8 over the chunks of all four.
        const float(&s)[4] = sums[tile][c][0];
        const bool second = lane % 2;
        float sum = second ? s[2] + s[3] : s[0] + s[1];
        sum += __shfl_xor_sync(~0u, second ? s[0] + s[1] : s[2] + s[3], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 < 2) {
          partials[(warp_part * kColumns + c) * kPartialPitch + first_row + tile * 16 + lane % 4 * 8] = sum;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + tile * 16 + i / 2 * 8, column = c * 8 + lane % 4 * 2 + i % 2;
          float sum = sums[tile][c][0][i];
          if constexpr (kSums == 2) sum += sums[tile][c][1][i];
          if (column < kColumns) partials[(warp_part * kColumns + column) * kPartialPitch + row] = sum;
        }
      }
    }
  }
}

// Where a cluster pools its rows: each block has multiplied the rows of all by its own part of the vector, and sends
// every other one the sums of that one's rows.
struct PooledSums {
  ClusterExchange<kCluster * kColumns * kRowsOfUnit * kUnits * 4> exchange;
  float* received;  // twice (block, sequence, kReceivedPitch)
  int turn = 0;     // products so far

  __device__ __forceinline__ void send_and_wait(const float* partials, int thread, int rank) {
    const u32 barrier = exchange.barrier(turn);
    constexpr int kQuads = kUnits / 4, kQuadsOfColumn = kRowsOfUnit * kQuads, kMessage = kColumns * kQuadsOfColumn;
    for (int i = thread; i < kCluster * kMessage; i += kThreads) {
      const int to = i / kMessage, column = i % kMessage / kQuadsOfColumn, quad = i % kQuadsOfColumn;
      const int row = quad / kQuads * kRowUnits + to * kUnits + quad % kQuads * 4;
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int part = 0; part < kSplit; ++part) {
        const float4 x = *reinterpret_cast<const float4*>(partials + (part * kColumns + column) * kPartialPitch + row);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      const u32 own = shared_address(received) +
                      ((((turn & 1) * kCluster + rank) * kColumns + column) * kReceivedPitch + quad * 4) * 4;
      cluster::send(cluster::address_in(to, own),
                    {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)},
                    cluster::address_in(to, barrier));
    }
    exchange.wait(turn);
    ++turn;
  }
};

// The products of a thread's (unit, sequence) pairs, which follow each other at kThreads: the sums of their parts.
__device__ __forceinline__ void add_parts(const float* partials, const PooledSums& pooled, int thread, bool multiplies,
                                          float (&products)[kPairs][kRowsOfUnit]) {
  constexpr int kParts = kPools ? kCluster : kSplit, kPitchOfParts = kPools ? kReceivedPitch : kPartialPitch;
  const float* const parts =
      kPools ? pooled.received + ((pooled.turn - 1) & 1) * (kCluster * kColumns * kReceivedPitch) : partials;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int index = thread + i * kThreads < kUnits * kColumns ? thread + i * kThreads : 0;
    const float* const from = parts + index / kUnits * kPitchOfParts + index % kUnits;
#pragma unroll
    for (int r = 0; r < kRowsOfUnit; ++r) products[i][r] = 0.0f;
    if (!multiplies) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int r = 0; r < kRowsOfUnit; ++r) products[i][r] += from[part * (kColumns * kPitchOfParts) + r * kUnits];
    }
  }
}

}  // namespace weft::rnn
