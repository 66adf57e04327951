// The recurrence of one layer, both directions, in one launch: all T steps with the recurrent weights on the chip.
// Compiled at run time for one size; recurrence_constants.jit.cuh has the macros, which recurrence.cpp sets.
//
// Decomposition. A group of GROUP blocks runs COLUMNS sequences of one direction. Block p owns UNITS hidden units, i.e.
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

#include "rnn/cuda/recurrence_cell.jit.cuh"
#include "rnn/cuda/recurrence_product.jit.cuh"
#include "rnn/cuda/recurrence_vector.jit.cuh"

namespace weft::rnn {

// Results are stored after the exchange where there are few of them to keep until then.
constexpr bool kDefers = kPairs <= 2;

extern "C" __global__ void __launch_bounds__(kThreads, 1) recurrence(const __grid_constant__ Args args) {
  unsigned char* const memory = dynamic_shared_memory();
  float* const partials = reinterpret_cast<float*>(memory + kPartials);

  Position at;
  at.thread = threadIdx.x, at.lane = at.thread % 32, at.warp = at.thread / 32;
  at.warp_row = at.warp / kSplit, at.warp_part = at.warp % kSplit;
  at.block = blockIdx.x % kGroup, at.rank = at.block % kCluster;
  at.direction = args.first_direction + blockIdx.x / kGroup % args.directions;
  at.first_sequence = args.first_sequence + blockIdx.x / kGroup / args.directions * kColumns;
  const int steps = length_of(args, at.first_sequence);  // of the longest sequence of the group
  const int first_row = at.warp_row * kRowTiles * kTileRows + at.lane / 4;

  Weights weights;
  weights.load(args, at, shared_address(memory), first_row);

  Pair pairs[kPairs];
  Ahead ahead[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    start_pair(pairs[i], args, at, at.thread + i * kThreads);
    ahead[i] = {};
    load_ahead(ahead[i], args, at.direction, pairs[i], kBackward ? steps - 1 : 0);
  }

  PooledSums pooled{{shared_address(memory) + kBarriers}, reinterpret_cast<float*>(memory + kReceived)};
  if constexpr (kPools) pooled.exchange.start();
  Vector vector(memory, shared_address(memory));
  vector.start(args, at);

  const bool wants_initial = kBackward && (args.h_n || args.c_n);
  const int iterations = kBackward ? steps + (wants_initial ? 1 : 0) : steps;
  for (int k = 0; k < iterations; ++k) {
    const int step = kBackward ? steps - 1 - k : k;

    // The product, of the first step only where there is a state before it.
    const bool multiplies = k > 0 || (!kBackward && args.h0);
    if (multiplies) {
      Sums sums;
      vector.each_block(args, at, k, step,
                        [&](int b, const uint4(&chunks)[kVectors]) { sums.add(weights, b, chunks); });
      sums.store(partials, at, first_row);
      __syncthreads();
      if constexpr (kPools) pooled.send_and_wait(partials, at);
    }
    float products[kPairs][kRowsOfUnit];
    add_parts(kPools ? pooled.latest() : partials, at.thread, multiplies, products);
    if (kBackward && step < 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_initial(args, at.direction, pairs[i], products[i][0]);
      break;
    }

    // Gates and state of the block's own units: no branch that depends on the pair, so that a thread's pairs overlap.
    Results results[kPairs] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool active = step < pairs[i].length;
      results[i] = kBackward ? step_backward(pairs[i], ahead[i], products[i], active)
                             : step_forward(pairs[i], ahead[i], products[i], active);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int index = at.thread + i * kThreads;
      if (index >= kUnits * kColumns) continue;
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        vector.keep(k, pairs[i].column, v * kUnits + index % kUnits, results[i].next[v]);
      }
    }
    if (!kDefers) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_results(args, at.direction, pairs[i], ahead[i].row, step, results[i]);
    }

    // The others wait for the exchange: what can be done after it is.
    int64_t rows[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) rows[i] = ahead[i].row;
    const auto prefetch = [&] {
      if (k + 1 >= iterations) return;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        load_ahead(ahead[i], args, at.direction, pairs[i], kBackward ? step - 1 : step + 1);
      }
    };
    if (kGroup == 1) prefetch();
    __syncthreads();
    vector.send(args, at, k, step, k + 1 >= iterations);
    if (kGroup > 1) prefetch();
    if (kDefers) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_results(args, at.direction, pairs[i], rows[i], step, results[i]);
    }
    vector.fetch_ahead(args, at, step);
  }
  if constexpr (kPools) pooled.exchange.end();
  vector.end();
}

}  // namespace weft::rnn
