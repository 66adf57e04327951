// The recurrence of one layer, both directions and all heads, in one launch: all T steps with the recurrent weights on
// the chip. Compiled at run time for one size; recurrence_constants.jit.cuh has the macros, which recurrence.cpp sets.
//
// Decomposition. A group of GROUP blocks runs COLUMNS sequences of one direction and head. Heads have weights of their
// own and nothing to say to each other. Block p owns UNITS hidden units, i.e.
// their rows of the recurrent weights, their gates and their state. A step is a product of the block's weight rows with
// the vector that all blocks of the group share (forward: h[t-1], backward: the gate gradients of step t+1), then gate
// arithmetic on the block's own units, then the exchange of the block's slice of the next vector.
//
//   forward   rows (gate, unit): G * UNITS, vector: H values of every sequence
//   backward  rows (unit): UNITS, vector: G * H values of every sequence, weights transposed
//
// What lives where. Weights: fragments of mma.sync in registers (RESIDENT blocks of 64 bytes along the vector per
// warp), the rest in shared memory in the same order. The vector: EXCHANGE 0: two buffers in the shared memory of each
// block, filled by all blocks of a cluster (GROUP 1: by the block itself); EXCHANGE 1: rows of a tensor in global
// memory (output or gate gradients), read through L2 by whoever needs them. State, bias, gate arithmetic: fp32
// registers, one thread per (unit, sequence).
//
// Where the vector is long, every block reading all of it is what bounds a step of EXCHANGE 1. So CLUSTER blocks (a
// cluster) pool their rows: each multiplies the rows of all by its own part of the vector, a CLUSTERth of the reads for
// the same weights on the chip, and sends every other one the sums of that one's rows through distributed shared
// memory.
//
// What was learnt (us per step on an H200; where nothing else is said of an LSTM of H 512, B 16, bf16, both passes):
// - What is loaded a step ahead stays as it was loaded until it is used: a conversion waits for its load, and the wait
//   is the step (3.3 to 2.3, with the next item).
// - Results are stored, and the next loads issued, after the exchange has been sent.
// - Readers of the exchange through L2 ask for all missing chunks at once; one after the other costs a round trip each.
// - A branch per (unit, sequence) keeps a thread's pairs from overlapping: 0.3 to 0.5 us for every further pair,
//   without branches 0.03 to 0.13.
// - For one sequence in exact fp32, FMA takes 0.72 us per forward step of H 256 and 1.9 of H 1024, mma 2.0 and 5.3:
//   seven of eight columns are wasted, and both operands are split at every step.
// - Pooling the rows of two blocks takes a GRU of H 2048, B 32, bf16 from 8.9 to 5.9 us per backward step, and costs
//   next to nothing where it does not help; more than two rarely pay: the sums to exchange grow with the cluster.
// - A tensor larger than the L2 cache has left it between its filling and its step: who polls it waits for memory, 5 to
//   15% of a step of H 1024, B 16, unless its sectors are fetched some steps ahead.
//
// Cost per step: products 2 * rows * vector * columns / (mma rate), one read of the vector's buffer per WARPS / SPLIT
// warps, SPLIT partial sums through shared memory, two block barriers, and one exchange (0.4 to 1 us in a cluster,
// 0.7 to 2 us through L2, nothing where a block is alone).

#include "common/cuda/exchange_grid.jit.cuh"
#include "rnn/persistent/cuda/recurrence_cell.jit.cuh"
#include "rnn/persistent/cuda/recurrence_product.jit.cuh"

namespace weft::rnn {

constexpr bool kOverCluster = kShared && kGroup > 1;
constexpr int kFetchedAhead = 6;  // steps

// Results are stored after the exchange where there are few of them to keep until then.
constexpr bool kDefers = kPairs <= 2;

// Of a block's stage, which has a row of kSlice elements for each sequence.
constexpr int kChunksOfSlice = kSlice / kPerChunk, kChunks = kColumns * kChunksOfSlice;

// Where a chunk of a block's stage lies in the exchanged tensor at a step, null for none.
__device__ __forceinline__ Element* own_chunk(const Args& args, int direction, int head, int block, int first_sequence,
                                              int index, int step) {
  constexpr int kChunksOfValue = kUnits / kPerChunk;
  const int column = index / kChunksOfSlice, value = index % kChunksOfSlice / kChunksOfValue;
  const int unit = block * kUnits + index % kChunksOfValue * kPerChunk;
  const int length = length_of(args, first_sequence + column);
  if (unit >= kPaddedHidden || step < 0 || step >= length) return nullptr;
  return args.exchange + direction * args.exchange_direction +
         row_of(args, direction, first_sequence + column, length, step) * args.exchange_stride +
         args.exchange_value[value] + head * kPaddedHidden + unit;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) recurrence(const __grid_constant__ Args args) {
  if (args.gate && *args.gate == 0) return;
  unsigned char* const memory = dynamic_shared_memory();
  const u32 weights = shared_address(memory), stage = weights + kStage, buffers = weights + kBuffers;
  Element* const stage_pointer = reinterpret_cast<Element*>(memory + kStage);
  unsigned char* const buffers_pointer = memory + kBuffers;
  float* const partials = reinterpret_cast<float*>(memory + kPartials);
  float* const received = partials + (kReceived - kPartials) / 4;
  const u32 barriers = shared_address(received) + (kBarriers - kReceived);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp / kSplit, warp_part = warp % kSplit;
  const int block = blockIdx.x % kGroup, direction = args.first_direction + blockIdx.x / kGroup % args.directions;
  int head = 0, first_sequence = args.first_sequence + blockIdx.x / kGroup / args.directions * kColumns;
  if constexpr (kHeads > 1) {
    const int group = first_sequence / kColumns;  // of all heads
    head = group % kHeads;
    first_sequence = group / kHeads * kColumns;
  }
  const int steps = length_of(args, first_sequence);  // of the longest sequence of the group

  // The sequence of the group whose chunk of the vector a lane has.
  const auto column_of = [&](int c) { return kFma ? c : c * 8 + lane / 4; };

  const int first_row = warp_row * kRowTiles * kTileRows + lane / 4, rank = block % kCluster;
  const int first_index = (rank * kSplit + warp_part) * kBlocks * 4 * kPerChunk + lane % 4 * kPerChunk;
  const u32 own_weights = weights + warp * (kInShared * kRowTiles * kTileBytes) + lane * 16;
  ResidentWeights resident;
#pragma unroll
  for (int b = 0; b < kInRegisters; ++b) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      load_fragment(args, direction, head, block, rank, first_row, first_index, b, tile, resident[b][tile]);
    }
  }
  for (int b = 0; b < kInShared; ++b) {
    for (int tile = 0; tile < kRowTiles; ++tile) {
      u32 w[8];
      load_fragment(args, direction, head, block, rank, first_row, first_index, kInRegisters + b, tile, w);
      const u32 to = own_weights + (b * kRowTiles + tile) * kTileBytes;
      store_shared(to, {w[0], w[1], w[2], w[3]});
      store_shared(to + kTileBytes / 2, {w[4], w[5], w[6], w[7]});
    }
  }

  Pair pairs[kPairs];
  Ahead ahead[kPairs];
  const int start = kBackward ? steps - 1 : 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    start_pair(pairs[i], args, direction, head, block, first_sequence, thread + i * kThreads);
    ahead[i] = {};
    load_ahead(ahead[i], args, direction, pairs[i], start);
  }

  // The vector before the first step.
  if constexpr (kShared) {
    for (int i = thread * 16; i < 2 * kBufferBytes; i += kThreads * 16) store_shared(buffers + i, {0, 0, 0, 0});
    if (!kBackward && args.h0) {
      __syncthreads();
      for (int i = thread; i < kColumns * kGroup * kSlice; i += kThreads) {
        const int column = i / (kGroup * kSlice), index = i % (kGroup * kSlice), unit = place_of(index).unit;
        if (unit < kHidden && first_sequence + column < args.batch) {
          *reinterpret_cast<Element*>(buffers_pointer + column * kPitch + index * kBytes) =
              args.h0[int64_t(direction * args.batch + first_sequence + column) * kAll + head * kHidden + unit];
        }
      }
    }
  }
  // Of the vector through a cluster, and of pooled rows' sums: a launch has one of them or none.
  const ClusterExchange<kGroup * kColumns * kSlice * kBytes, 1> exchange{barriers};
  PooledSums pooled{{barriers}, received};
  if constexpr (kOverCluster) exchange.start();
  if constexpr (kPools) pooled.exchange.start();
  __syncthreads();

  // Through L2: where this lane's chunks of the vector lie in a row of the exchanged tensor; -1 for padding.
  [[maybe_unused]] int chunk_at[kBlocks];
  if constexpr (!kShared) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const Place place = place_of(first_index + b * 4 * kPerChunk);
      chunk_at[b] = place.unit < kPaddedHidden && first_index + b * 4 * kPerChunk < kVector
                        ? args.exchange_value[place.value] + head * kPaddedHidden + place.unit
                        : -1;
    }
  }

  const bool wants_initial = kBackward && (args.h_n || args.c_n);
  const int iterations = kBackward ? steps + (wants_initial ? 1 : 0) : steps;
  for (int k = 0; k < iterations; ++k) {
    const int step = kBackward ? steps - 1 - k : k;

    // The product, of the first step only where there is a state before it.
    const bool multiplies = k > 0 || (!kBackward && args.h0);
    if (multiplies) {
      Sums sums = {};
      const auto multiply_block = [&](int b, const uint4(&chunks)[kVectors]) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          u32 w[8];
          weights_of_tile(resident, own_weights, b, tile, w);
#pragma unroll
          for (int c = 0; c < kVectors; ++c) multiply_chunk(sums[tile][c], w, chunks[c]);
        }
      };
      if constexpr (kShared) {
        const u32 buffer = buffers + u32(k & 1) * kBufferBytes;
        if constexpr (kGroup > 1) {
          if (k > 0) exchange.wait(k);
        }
        u32 from[kVectors];
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
          // Columns beyond the last read it once more; nobody looks at their sums.
          const int column = min(column_of(c), kColumns - 1);
          from[c] = buffer + column * kPitch + warp_part * kBlocks * kFragmentBytes + lane % 4 * 16;
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint4 chunks[kVectors];
#pragma unroll
          for (int c = 0; c < kVectors; ++c) chunks[c] = rounded(load_shared(from[c] + b * kFragmentBytes));
          multiply_block(b, chunks);
        }
      } else {
        const Element* from[kVectors];
        const int last = kBackward ? step + 1 : step - 1;
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
          const int sequence = first_sequence + column_of(c);
          const int length = column_of(c) < kColumns ? length_of(args, sequence) : 0;
          from[c] = nullptr;
          if (k == 0) {
            if (length > 0) from[c] = args.h0 + int64_t(direction * args.batch + sequence) * kAll + head * kHidden;
          } else if (last < length) {
            from[c] = args.exchange + direction * args.exchange_direction +
                      row_of(args, direction, sequence, length, last) * args.exchange_stride;
          }
        }
        const auto load_chunk = [&](int b, int c) -> uint4 {
          if (!from[c] || chunk_at[b] < 0) return {0, 0, 0, 0};
          if (k > 0) return load_relaxed(from[c] + chunk_at[b]);
          Element e[kPerChunk];
#pragma unroll
          for (int i = 0; i < kPerChunk; ++i) {
            const int unit = place_of(first_index + b * 4 * kPerChunk + i).unit;
            e[i] = unit < kHidden ? from[c][unit] : Element(0);
          }
          return pack(e);
        };
        // All chunks of a batch are in flight together, those of the next batch during the products of this one.
        constexpr int kBatch = kLayout.batch;
        uint4 coming[kBatch][kVectors];
        const auto load_batch = [&](int first, bool repeat) {
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
              if (first + b < kBlocks && (!repeat || is_missing(coming[b][c]))) coming[b][c] = load_chunk(first + b, c);
            }
          }
        };
        load_batch(0, false);
#pragma unroll
        for (int first = 0; first < kBlocks; first += kBatch) {
          const auto any_missing = [&] {
            bool missing = false;
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
#pragma unroll
              for (int c = 0; c < kVectors; ++c) {
                if (first + b < kBlocks) missing |= is_missing(coming[b][c]);
              }
            }
            return missing;
          };
          if (k > 0) wait_for_published(any_missing, [&] { load_batch(first, true); });
          uint4 here[kBatch][kVectors];
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int c = 0; c < kVectors; ++c) here[b][c] = rounded(coming[b][c]);
          }
          if (first + kBatch < kBlocks) load_batch(first + kBatch, false);
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            if (first + b < kBlocks) multiply_block(first + b, here[b]);
          }
        }
      }
      store_sums(sums, partials, warp_part, lane, first_row);
      __syncthreads();
      if constexpr (kPools) pooled.send_and_wait(partials, thread, rank);
    }

    // Gates and state of the block's own units: no branch that depends on the pair, so that a thread's pairs overlap.
    Results results[kPairs] = {};
    if (step >= 0) {
      float products[kPairs][kRowsOfUnit];
      add_parts(partials, pooled, thread, multiplies, products);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const bool active = step < pairs[i].length;
        results[i] = kBackward ? step_backward(pairs[i], ahead[i], products[i], active)
                               : step_forward(pairs[i], ahead[i], products[i], active);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int index = thread + i * kThreads;
        if (index >= kUnits * kColumns) continue;
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          const int at = v * kUnits + index % kUnits;
          if (kShared && kGroup == 1) {
            *reinterpret_cast<Element*>(buffers_pointer + ((k + 1) & 1) * kBufferBytes + pairs[i].column * kPitch +
                                        at * kBytes) = results[i].next[v];
          } else {
            stage_pointer[pairs[i].column * kSlice + at] = results[i].next[v];
          }
        }
      }
      if (!kDefers) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) store_results(args, direction, pairs[i], ahead[i].row, step, results[i]);
      }
    } else if (kBackward) {
      float products[kPairs][kRowsOfUnit];
      add_parts(partials, pooled, thread, multiplies, products);
      for (int i = 0; i < kPairs; ++i) store_initial(args, direction, pairs[i], products[i][0]);
      break;
    }
    // The others wait for the exchange: what can be done after it is.
    int64_t rows[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) rows[i] = ahead[i].row;
    const auto prefetch = [&] {
      if (k + 1 >= iterations) return;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) load_ahead(ahead[i], args, direction, pairs[i], kBackward ? step - 1 : step + 1);
    };
    if (kGroup == 1) prefetch();
    __syncthreads();
    const bool last_exchange = k + 1 >= iterations;
    if constexpr (kOverCluster) {
      if (!last_exchange) {
        const u32 next_buffer = buffers + u32((k + 1) & 1) * kBufferBytes + block * (kSlice * kBytes);
        const u32 next_barrier = exchange.barrier(k + 1);
#pragma unroll
        for (int i = 0; i < ceil_div(kChunks * kGroup, kThreads); ++i) {
          const int index = thread + i * kThreads, to = index / kChunks, chunk = index % kChunks;
          if (index < kChunks * kGroup) {
            const u32 at = next_buffer + chunk / kChunksOfSlice * kPitch + chunk % kChunksOfSlice * 16;
            cluster::send(cluster::address_in(to, at), load_shared(stage + chunk * 16),
                          cluster::address_in(to, next_barrier));
          }
        }
      }
    }
    if constexpr (!kShared) {
      if (!last_exchange || args.publishes_result) {
        for (int index = thread; index < kChunks; index += kThreads) {
          Element* const to = own_chunk(args, direction, head, block, first_sequence, index, step);
          if (to) publish(to, load_shared(stage + index * 16));
        }
      }
    }
    if (kGroup > 1) prefetch();
    if (kDefers) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_results(args, direction, pairs[i], rows[i], step, results[i]);
    }
    if constexpr (!kShared) {
      // A long tensor has left the L2 cache since it was filled, and who polls it would wait for memory.
      for (int index = thread; index < kChunks; index += kThreads) {
        const Element* const p = own_chunk(args, direction, head, block, first_sequence, index,
                                           kBackward ? step - kFetchedAhead : step + kFetchedAhead);
        if ((u64(p) & 31) == 0 && p) prefetch_l2(p);  // a sector of the cache
      }
    }
  }
  if constexpr (kOverCluster) exchange.end();
  if constexpr (kPools) pooled.exchange.end();
}

}  // namespace weft::rnn
