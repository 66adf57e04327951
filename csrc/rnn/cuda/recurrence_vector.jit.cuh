// The vector of a recurrence's step, which all blocks of a group share: forward h[t - 1], backward the gate gradients
// of step t + 1. Each block makes a slice of it, first in `stage`, a row of kSlice elements for each sequence.
#pragma once

#include "jit/exchange_cluster.jit.cuh"
#include "jit/exchange_grid.jit.cuh"
#include "rnn/cuda/recurrence_product.jit.cuh"

namespace weft::rnn {

constexpr int kChunksOfSlice = kSlice / kPerChunk, kStageChunks = kColumns * kChunksOfSlice;

// Two buffers in the shared memory of each block, of kColumns rows at kPitch, filled from all blocks of a cluster, or
// by the block itself where it is alone.
struct SharedVector {
  static constexpr bool kAlone = kGroup == 1;
  ClusterExchange<kGroup * kColumns * kSlice * kBytes, 1> exchange;
  unsigned char* buffers_pointer;
  u32 buffers, stage;
  Element* stage_pointer;

  __device__ __forceinline__ SharedVector(unsigned char* memory, u32 address)
      : exchange{address + kBarriers},
        buffers_pointer(memory + kBuffers),
        buffers(address + kBuffers),
        stage(address + kStage),
        stage_pointer(reinterpret_cast<Element*>(memory + kStage)) {}

  // The vector before the first step.
  __device__ __forceinline__ void start(const Args& args, const Position& at) {
    for (int i = at.thread * 16; i < 2 * kBufferBytes; i += kThreads * 16) store_shared(buffers + i, {0, 0, 0, 0});
    if (!kBackward && args.h0) {
      __syncthreads();
      for (int i = at.thread; i < kColumns * kGroup * kSlice; i += kThreads) {
        const int column = i / (kGroup * kSlice), index = i % (kGroup * kSlice), unit = place_of(index).unit;
        if (unit < kHidden && at.first_sequence + column < args.batch) {
          *reinterpret_cast<Element*>(buffers_pointer + column * kPitch + index * kBytes) =
              args.h0[int64_t(at.direction * args.batch + at.first_sequence + column) * kHidden + unit];
        }
      }
    }
    if constexpr (!kAlone) exchange.start();
    __syncthreads();
  }

  // multiply(b, chunks) for each block of 64 bytes of the vector of the k-th step to run.
  template <typename Multiply>
  __device__ __forceinline__ void each_block(const Args&, const Position& at, int k, int, const Multiply& multiply) {
    const u32 buffer = buffers + u32(k & 1) * kBufferBytes;
    if constexpr (!kAlone) {
      if (k > 0) exchange.wait(k);
    }
    u32 from[kVectors];
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      // Columns beyond the last read it once more; nobody looks at their sums.
      const int column = min(column_of(at, c), kColumns - 1);
      from[c] = buffer + column * kPitch + at.warp_part * kBlocks * kFragmentBytes + at.lane % 4 * 16;
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint4 chunks[kVectors];
#pragma unroll
      for (int c = 0; c < kVectors; ++c) chunks[c] = rounded(load_shared(from[c] + b * kFragmentBytes));
      multiply(b, chunks);
    }
  }

  __device__ __forceinline__ void keep(int k, int column, int index, Element x) {
    if (kAlone) {
      *reinterpret_cast<Element*>(buffers_pointer + ((k + 1) & 1) * kBufferBytes + column * kPitch + index * kBytes) =
          x;
    } else {
      stage_pointer[column * kSlice + index] = x;
    }
  }

  __device__ __forceinline__ void send(const Args&, const Position& at, int k, int, bool last) {
    if constexpr (!kAlone) {
      if (last) return;
      const u32 next = buffers + u32((k + 1) & 1) * kBufferBytes + at.block * (kSlice * kBytes);
#pragma unroll
      for (int i = 0; i < int(ceil_div(kStageChunks * kGroup, kThreads)); ++i) {
        const int index = at.thread + i * kThreads, to = index / kStageChunks, chunk = index % kStageChunks;
        if (index < kStageChunks * kGroup) {
          exchange.send(k + 1, to, next + chunk / kChunksOfSlice * kPitch + chunk % kChunksOfSlice * 16,
                        load_shared(stage + chunk * 16));
        }
      }
    }
  }

  __device__ __forceinline__ void fetch_ahead(const Args&, const Position&, int) {}
  __device__ __forceinline__ void end() {
    if constexpr (!kAlone) exchange.end();
  }
};

// Rows of a tensor in global memory (output or gate gradients), read through L2 by whoever needs them. Every step has
// rows of its own.
struct PublishedVector {
  static constexpr bool kAlone = false;
  u32 stage;
  Element* stage_pointer;
  int chunk_at[kBlocks];  // where this lane's chunks lie in a row of the exchanged tensor; -1 for padding

  __device__ __forceinline__ PublishedVector(unsigned char* memory, u32 address)
      : stage(address + kStage), stage_pointer(reinterpret_cast<Element*>(memory + kStage)) {}

  __device__ __forceinline__ void start(const Args& args, const Position& at) {
    __syncthreads();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int index = first_index_of(at) + b * 4 * kPerChunk;
      const Place place = place_of(index);
      chunk_at[b] = place.unit < kPaddedHidden && index < kVector ? args.exchange_value[place.value] + place.unit : -1;
    }
  }

  template <typename Multiply>
  __device__ __forceinline__ void each_block(const Args& args, const Position& at, int k, int step,
                                             const Multiply& multiply) {
    const Element* from[kVectors];
    const int last = kBackward ? step + 1 : step - 1;
#pragma unroll
    for (int c = 0; c < kVectors; ++c) {
      const int sequence = at.first_sequence + column_of(at, c);
      const int length = column_of(at, c) < kColumns ? length_of(args, sequence) : 0;
      from[c] = nullptr;
      if (k == 0) {
        if (length > 0) from[c] = args.h0 + int64_t(at.direction * args.batch + sequence) * kHidden;
      } else if (last < length) {
        from[c] = args.exchange + at.direction * args.exchange_direction +
                  row_of(args, at.direction, sequence, length, last) * args.exchange_stride;
      }
    }
    const auto load_chunk = [&](int b, int c) -> uint4 {
      if (b >= kBlocks || !from[c] || chunk_at[b] < 0) return {0, 0, 0, 0};
      if (k > 0) return load_relaxed(from[c] + chunk_at[b]);
      Element e[kPerChunk];
#pragma unroll
      for (int i = 0; i < kPerChunk; ++i) {
        const int unit = place_of(first_index_of(at) + b * 4 * kPerChunk + i).unit;
        e[i] = unit < kHidden ? from[c][unit] : Element(0);
      }
      return pack(e);
    };
    // All chunks of a batch are in flight together, those of the next batch during the products of this one.
    constexpr int kBatch = kLayout.batch;
    uint4 coming[kBatch * kVectors];
    const auto load_batch = [&](int first) {
#pragma unroll
      for (int i = 0; i < kBatch * kVectors; ++i) coming[i] = load_chunk(first + i / kVectors, i % kVectors);
    };
    load_batch(0);
#pragma unroll
    for (int first = 0; first < kBlocks; first += kBatch) {
      if (k > 0) {
        wait_for_published(coming, [&](int i) { return load_chunk(first + i / kVectors, i % kVectors); });
      }
      uint4 here[kBatch][kVectors];
#pragma unroll
      for (int i = 0; i < kBatch * kVectors; ++i) here[i / kVectors][i % kVectors] = rounded(coming[i]);
      if (first + kBatch < kBlocks) load_batch(first + kBatch);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < kBlocks) multiply(first + b, here[b]);
      }
    }
  }

  __device__ __forceinline__ void keep(int, int column, int index, Element x) {
    stage_pointer[column * kSlice + index] = x;
  }

  // Where a chunk of the stage lies in the exchanged tensor at a step, null for none.
  __device__ __forceinline__ Element* own_chunk(const Args& args, const Position& at, int index, int step) const {
    constexpr int kChunksOfValue = kUnits / kPerChunk;
    const int column = index / kChunksOfSlice, value = index % kChunksOfSlice / kChunksOfValue;
    const int unit = at.block * kUnits + index % kChunksOfValue * kPerChunk;
    const int length = length_of(args, at.first_sequence + column);
    if (unit >= kPaddedHidden || step < 0 || step >= length) return nullptr;
    return args.exchange + at.direction * args.exchange_direction +
           row_of(args, at.direction, at.first_sequence + column, length, step) * args.exchange_stride +
           args.exchange_value[value] + unit;
  }

  __device__ __forceinline__ void send(const Args& args, const Position& at, int, int step, bool last) {
    if (last && !args.publishes_result) return;
    for (int index = at.thread; index < kStageChunks; index += kThreads) {
      if (Element* const to = own_chunk(args, at, index, step)) publish(to, load_shared(stage + index * 16));
    }
  }

  // A long tensor has left the L2 cache since it was filled, and who polls it would wait for memory.
  __device__ __forceinline__ void fetch_ahead(const Args& args, const Position& at, int step) {
    constexpr int kSteps = 6;
    for (int index = at.thread; index < kStageChunks; index += kThreads) {
      const Element* const p = own_chunk(args, at, index, kBackward ? step - kSteps : step + kSteps);
      if ((u64(p) & 31) == 0 && p) prefetch_l2(p);  // a sector of the cache
    }
  }

  __device__ __forceinline__ void end() {}
};

template <bool kIsShared>
struct VectorOf {
  using Type = SharedVector;
};
template <>
struct VectorOf<false> {
  using Type = PublishedVector;
};
using Vector = VectorOf<kShared>::Type;

}  // namespace weft::rnn
