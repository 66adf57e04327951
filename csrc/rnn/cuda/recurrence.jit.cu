// The recurrence of one layer, both directions, in one launch: all T steps with the recurrent weights on the chip.
// Compiled at run time for one size; the macros are documented at their use below and set by recurrence.cpp.
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
// block, filled by st.async from all blocks of a cluster (GROUP 1: by the block itself); EXCHANGE 1: rows of a tensor
// in global memory (output or gate gradients), read through L2 by whoever needs them. State, bias, gate arithmetic:
// fp32 registers, one thread per (unit, sequence).
//
// Where the vector is long, every block reading all of it is what bounds a step of EXCHANGE 1. So CLUSTER blocks (a
// cluster) pool their rows: each multiplies the rows of all by its own part of the vector, a CLUSTERth of the reads for
// the same weights on the chip, and sends every other one the sums of that one's rows through distributed shared
// memory.
//
// Exchange through L2 without flags: the tensor is filled with all-ones words beforehand, a pattern that no arithmetic
// result has (a NaN from arithmetic has another payload), and a reader repeats its load until none is left. Every step
// has its own rows, so that nothing is overwritten and no barrier is needed.
//
// Exchange through distributed shared memory: two buffers suffice. A block sends step s+1 into the buffer of step s-1
// only after it has received all of step s, and every block sends its part of s after it has read s-1.
//
// Order of the vector in a fragment: the reduction index may be permuted freely as long as weights and vector agree, so
// a lane takes 16 contiguous bytes of a row, which serve two mma instructions, and no ldmatrix is needed.
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

#include "common/math.jit.cuh"
#include "jit/cluster.jit.cuh"
#include "rnn/cuda/primitives.jit.cuh"

namespace cluster = weft::cluster;
using weft::hyperbolic_tangent;
using weft::sigmoid;

// The macros. CELL: 0 tanh, 1 relu, 2 gru, 3 lstm. TYPE: 0 fp16, 1 bf16, 2 fp32 with products in TF32, 3 fp32 with
// products of fp32 accuracy (three TF32 products of halves of the mantissa, or FMA). BACKWARD, PACKED (rows and lengths
// come from the batch sizes): 0 or 1. HIDDEN: H. GROUP, COLUMNS, UNITS, RESIDENT, EXCHANGE: above. WARPS of a block;
// SPLIT of them share a row of weights, each with its part of the vector. CLUSTER: above, 1 with EXCHANGE 0. FMA: 1
// multiplies fp32 by fused multiply-add, one sequence after another, where mma.sync would spend 8 columns on few.
constexpr bool kBackward = BACKWARD;
constexpr bool kGru = CELL == 2, kLstm = CELL == 3;
constexpr int kGates = kGru ? 3 : kLstm ? 4 : 1;
constexpr int kSaved = kGru || kLstm ? 4 : 0;        // values of a unit and step that the forward leaves
constexpr int kRowsOfUnit = kBackward ? 1 : kGates;  // of a unit in the product
constexpr int kValues = kBackward ? kGates : 1;      // of a unit in the vector
constexpr bool kShared = EXCHANGE == 0;

constexpr int kBytes = sizeof(Element);
constexpr int kPerChunk = 16 / kBytes;  // elements of a lane's 16 bytes

__host__ __device__ constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

constexpr int kThreads = 32 * WARPS;
constexpr int kSplitRows = WARPS / SPLIT;  // warps along the rows; SPLIT warps along the vector
constexpr int kPaddedHidden = ceil_div(HIDDEN, kPerChunk) * kPerChunk;
constexpr int kSlice = UNITS * kValues;  // of a block in the vector
constexpr int kVector = kShared ? GROUP * kSlice : kPaddedHidden * kValues;
constexpr int kRowUnits = CLUSTER * UNITS;  // of the rows that a block multiplies
constexpr int kBlocks =
    ceil_div(ceil_div(kVector * kBytes, 64), (SPLIT) * (CLUSTER));  // 64 bytes of the vector, of a warp
constexpr int kRowTiles = ceil_div(ceil_div(kRowsOfUnit * kRowUnits, 16), kSplitRows);  // 16 rows, of a warp
constexpr int kRows = kRowTiles * kSplitRows * 16;
// Chunks of the vector that a lane multiplies at a time. With mma, lane / 4 has one of 8 sequences; with FMA, all lanes
// have the same.
constexpr int kVectors = FMA ? COLUMNS : ceil_div(COLUMNS, 8);
constexpr int kResident = RESIDENT < kBlocks ? RESIDENT : kBlocks;
constexpr int kInShared = kBlocks - kResident;
constexpr int kPairs = ceil_div(UNITS * COLUMNS, kThreads);  // (unit, sequence) of a thread
// Independent sums, so that products do not wait for each other; with FMA the four of a tile are.
constexpr int kSums = FMA || kRowTiles * kVectors >= 4 ? 1 : 2;

// Shared memory. A row of the vector is padded so that two rows lie in different banks, a row of partial sums likewise.
constexpr int kVectorBytes = kBlocks * SPLIT * 64;
constexpr int kPitch = kVectorBytes + (kVectorBytes % 128 == 0 ? 64 : 0);
constexpr int kPartialPitch = kRows + 4;
constexpr int kWeightsBytes = WARPS * kInShared * kRowTiles * 1024;
constexpr int kBufferBytes = kShared ? COLUMNS * kPitch : 0;
constexpr int kPartialsBytes = SPLIT * COLUMNS * kPartialPitch * 4;
// Sums that a block receives from one of its cluster, a row for each sequence; twice all of them.
constexpr int kReceivedPitch = kRowsOfUnit * UNITS + 4;
constexpr int kReceivedBytes = CLUSTER > 1 ? 2 * kReceivedPitch * 4 * (CLUSTER) * (COLUMNS) : 0;
constexpr int kBarriersBytes = 16;
constexpr int kStageBytes = ceil_div(COLUMNS * kSlice * kBytes, 16) * 16;

static_assert(UNITS % kPerChunk == 0 && UNITS % 4 == 0 && WARPS % SPLIT == 0);
static_assert(CLUSTER == 1 || (EXCHANGE == 1 && GROUP % CLUSTER == 0));
static_assert(!FMA || TYPE == 3);
#ifdef SHARED_BYTES  // what the host allocates
static_assert(SHARED_BYTES >=
              kWeightsBytes + kStageBytes + 2 * kBufferBytes + kPartialsBytes + kReceivedBytes + kBarriersBytes);
#endif

struct Args {
  const Element* w_hh[2];  // of each direction, (G*H, H)
  const Element* b_ih[2];  // (G*H) or null
  const Element* b_hh[2];
  // Forward: W_ih x on entry, gates on exit where `save`; (directions, rows, x_stride). Backward: gates.
  Element* x;
  int x_stride;
  i64 x_direction;
  const Element* h0;  // (directions, B, H) or null for zeros
  const Element* c0;
  Element* output;  // (rows, output_stride), direction d in columns [d * H, (d + 1) * H)
  Element* cells;   // the same, or null
  int output_stride;
  // Forward: (directions, B, H), written. Backward: the gradients of the initial state, or null.
  Element* h_n;
  Element* c_n;
  // Backward.
  const Element* grad_output;  // (rows, directions * H) or null, as the following
  const Element* grad_cells;
  const Element* grad_h_n;  // (directions, B, H)
  const Element* grad_c_n;
  // (directions, rows, dgates_stride): rnn d(pre-activation); gru dr, dz, dn, dn r; lstm di, df, dg, do
  Element* dgates;
  int dgates_stride;
  i64 dgates_direction;
  // EXCHANGE 1: the vectors, (directions, rows, exchange_stride) with kPaddedHidden columns for each of kValues, of
  // which value e is at exchange_value[e].
  Element* exchange;
  int exchange_stride;
  i64 exchange_direction;
  int exchange_value[4];
  const int* lengths;  // of the sequences, descending; null where all are T
  const i64* offsets;  // packed: row of sequence b at step t is offsets[t] + b; null: t * B + b
  int steps, batch, first_sequence;
  int first_direction, directions;  // of this launch
  int save;                         // forward: leave the gates
  int publishes_result;             // the exchanged tensor is output or dgates itself
};

__device__ __forceinline__ bool is_missing(uint4 v) {
  return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u;
}

__device__ __forceinline__ u32 upper_part(u32 x) {
  return x & 0xffffe000u;
}
// What the upper part leaves; of an infinity nothing, where the difference would be NaN. Infinite times the lower part
// of a weight that has none is still NaN: a ReLU state that overflows ends as NaN where one product would be infinite.
__device__ __forceinline__ u32 lower_part(u32 x) {
  const u32 rest = __float_as_uint(__uint_as_float(x) - __uint_as_float(upper_part(x)));
  return (x & 0x7fffffffu) == 0x7f800000u ? 0u : rest;
}

// The product of a row tile with 16 bytes per lane of the vector. `a` holds both halves.
__device__ __forceinline__ void multiply_chunk(float (&sum)[kSums][4], const u32 (&a)[8], const uint4& b) {
  const u32 words[4] = {b.x, b.y, b.z, b.w};
#if FMA
  // Two rows, each with the sums of two halves of the chunk.
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& s = sum[0][i % 2 * 2 + i / 4];
    s = fmaf(__uint_as_float(a[i]), __uint_as_float(words[i / 2]), s);
  }
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float(&s)[4] = sum[half % kSums];
    const u32* left = a + 4 * half;
    const u32 b0 = words[2 * half], b1 = words[2 * half + 1];
#if TYPE == 3
    u32 upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      upper[i] = upper_part(left[i]);
      lower[i] = lower_part(left[i]);
    }
    multiply_add(s, lower, upper_part(b0), upper_part(b1));
    multiply_add(s, upper, lower_part(b0), lower_part(b1));
    multiply_add(s, upper, upper_part(b0), upper_part(b1));
#else
    multiply_add(s, left, b0, b1);
#endif
  }
#endif
}

__device__ __forceinline__ uint4 rounded(uint4 v) {
#if TYPE == 2
  return {round_tf32(v.x), round_tf32(v.y), round_tf32(v.z), round_tf32(v.w)};
#else
  return v;
#endif
}

// Unit and value at an index of the vector; a unit of HIDDEN or more is padding.
struct Place {
  int unit, value;
};
__device__ __forceinline__ Place place_of(int index) {
  if (index >= kVector) return {HIDDEN, 0};
  if (kShared) return {index / kSlice * UNITS + index % UNITS, index % kSlice / UNITS};
  return {index % kPaddedHidden, index / kPaddedHidden};
}

__device__ __forceinline__ uint4 pack(const Element (&e)[kPerChunk]) {
#if TYPE == 0 || TYPE == 1
  return {u32(e[0]) | u32(e[1]) << 16, u32(e[2]) | u32(e[3]) << 16, u32(e[4]) | u32(e[5]) << 16,
          u32(e[6]) | u32(e[7]) << 16};
#else
  return {__float_as_uint(e[0]), __float_as_uint(e[1]), __float_as_uint(e[2]), __float_as_uint(e[3])};
#endif
}

// 16 bytes of a row of the weights of a block, of a cluster those of all its blocks.
__device__ uint4 weights_chunk(const Element* w, int first_unit, int row, int index) {
  const int unit_out = first_unit + row % kRowUnits;
  const bool inside = row < kRowsOfUnit * kRowUnits && unit_out < HIDDEN;
  const Place first = place_of(index);
  if (!inside || first.unit >= HIDDEN) return {0, 0, 0, 0};
  if (!kBackward && HIDDEN % kPerChunk == 0 && (u64(w) & 15) == 0) {
    return *reinterpret_cast<const uint4*>(w + i64(row / kRowUnits * HIDDEN + unit_out) * HIDDEN + first.unit);
  }
  Element e[kPerChunk];
#pragma unroll
  for (int i = 0; i < kPerChunk; ++i) {
    const Place in = place_of(index + i);
    const i64 at = kBackward ? i64(in.value * HIDDEN + in.unit) * HIDDEN + unit_out
                             : i64(row / kRowUnits * HIDDEN + unit_out) * HIDDEN + in.unit;
    e[i] = in.unit < HIDDEN ? w[at] : Element(0);
  }
  return pack(e);
}

// What a thread keeps of one of its (unit, sequence) pairs.
struct Pair {
  int unit, column;  // of the layer, of the group
  int length;        // steps of the sequence, 0 where there is no such pair
  int sequence;
  float bias[kGates + (kGru ? 1 : 0)];
  float carried;       // forward: h of a gru. Backward: the part of dh that does not come through the weights
  float carried_cell;  // forward: c. Backward: dc
  float cell;          // backward: c of the step at hand
};

// Loaded a step ahead, and not looked at before: a conversion would wait for the load.
struct Ahead {
  i64 row;
  Element x[kBackward ? (kSaved > 0 ? kSaved : 1) : kGates];  // backward: gates, of an rnn its output
  Element grad, grad_cell;                                    // of output and cells
  Element before;                                             // h (gru) or c (lstm) before the step
};

__device__ __forceinline__ Element load(const Element* p, i64 at) {
  return p ? p[at] : Element(0);
}

// The row of a sequence at a step, counted from the sequence's own beginning in its own direction.
__device__ __forceinline__ i64 row_of(const Args& args, int direction, int sequence, int length, int step) {
  const int t = direction ? length - 1 - step : step;
  return PACKED ? args.offsets[t] + sequence : i64(t) * args.batch + sequence;
}

__device__ __forceinline__ int length_of(const Args& args, int sequence) {
  return sequence >= args.batch ? 0 : PACKED ? args.lengths[sequence] : args.steps;
}

__device__ __forceinline__ void load_ahead(Ahead& a, const Args& args, int direction, const Pair& pair, int step) {
  if (step < 0 || step >= pair.length) return;
  a.row = row_of(args, direction, pair.sequence, pair.length, step);
  const Element* x = args.x + direction * args.x_direction + a.row * args.x_stride + pair.unit;
  if constexpr (!kBackward) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) a.x[g] = x[g * HIDDEN];
  } else {
    const i64 at = a.row * args.output_stride + direction * HIDDEN + pair.unit;
    a.grad = load(args.grad_output, at);
    if constexpr (kSaved > 0) {
#pragma unroll
      for (int g = 0; g < kSaved; ++g) a.x[g] = x[g * HIDDEN];
      if (kLstm) a.grad_cell = load(args.grad_cells, at);
      const Element* const states = kLstm ? args.cells : args.output;
      if (step > 0) {
        const i64 row = row_of(args, direction, pair.sequence, pair.length, step - 1);
        a.before = states[row * args.output_stride + direction * HIDDEN + pair.unit];
      } else {
        a.before = load(kLstm ? args.c0 : args.h0, i64(direction * args.batch + pair.sequence) * HIDDEN + pair.unit);
      }
    } else {
      a.x[0] = args.output[at];
    }
  }
}

// What a step makes of a pair; zeros in the vector where its sequence does not run.
struct Results {
  Element next[kValues];  // its part of the next vector
  Element gates[4];       // forward: what is saved. Backward: gates[2] is dn of a gru
  Element cell;
};

__device__ __forceinline__ Results step_forward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                bool active) {
  Results result = {};
  float pre[kGates];
#pragma unroll
  for (int g = 0; g < kGates; ++g) pre[g] = widen(now.x[g]) + pair.bias[g];
  float h;
  if constexpr (kGru) {
    const float r = sigmoid(pre[0] + product[0]), z = sigmoid(pre[1] + product[1]), m = pair.bias[3] + product[2];
    const float n = hyperbolic_tangent(pre[2] + r * m);
    h = n + z * (pair.carried - n);
    pair.carried = active ? h : pair.carried;
    result.gates[0] = narrow(r), result.gates[1] = narrow(z), result.gates[2] = narrow(n), result.gates[3] = narrow(m);
  } else if constexpr (kLstm) {
    const float in = sigmoid(pre[0] + product[0]), f = sigmoid(pre[1] + product[1]);
    const float g = hyperbolic_tangent(pre[2] + product[2]), o = sigmoid(pre[3] + product[3]);
    const float c = f * pair.carried_cell + in * g;
    h = o * hyperbolic_tangent(c);
    pair.carried_cell = active ? c : pair.carried_cell;
    result.gates[0] = narrow(in), result.gates[1] = narrow(f), result.gates[2] = narrow(g), result.gates[3] = narrow(o);
    result.cell = narrow(pair.carried_cell);
  } else {
    h = pre[0] + product[0];
    h = CELL == 0 ? hyperbolic_tangent(h) : h <= 0.0f ? 0.0f : h;
  }
  result.next[0] = active ? narrow(h) : Element(0);
  return result;
}

__device__ __forceinline__ Results step_backward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                 bool active) {
  Results result = {};
  const float dh = product[0] + pair.carried + widen(now.grad);
  if constexpr (kGru) {
    const float r = widen(now.x[0]), z = widen(now.x[1]), n = widen(now.x[2]), m = widen(now.x[3]);
    const float dn = dh * (1.0f - z) * (1.0f - n * n);
    pair.carried = active ? dh * z : pair.carried;
    result.next[0] = narrow(dn * m * r * (1.0f - r));
    result.next[1] = narrow(dh * (widen(now.before) - n) * z * (1.0f - z));
    result.next[2] = narrow(dn * r);
    result.gates[2] = narrow(dn);
  } else if constexpr (kLstm) {
    const float in = widen(now.x[0]), f = widen(now.x[1]), g = widen(now.x[2]), o = widen(now.x[3]);
    const float before = widen(now.before), squashed = hyperbolic_tangent(pair.cell);
    const float dc = pair.carried_cell + widen(now.grad_cell) + dh * o * (1.0f - squashed * squashed);
    result.next[0] = narrow(dc * g * in * (1.0f - in));
    result.next[1] = narrow(dc * before * f * (1.0f - f));
    result.next[2] = narrow(dc * in * (1.0f - g * g));
    result.next[3] = narrow(dh * squashed * o * (1.0f - o));
    pair.carried = active ? 0.0f : pair.carried;
    pair.carried_cell = active ? dc * f : pair.carried_cell;
    pair.cell = active ? before : pair.cell;
  } else {
    const float y = widen(now.x[0]);
    result.next[0] = narrow(CELL == 0 ? dh * (1.0f - y * y) : y <= 0.0f ? 0.0f : dh);
    pair.carried = active ? 0.0f : pair.carried;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) result.next[v] = active ? result.next[v] : Element(0);
  return result;
}

__device__ __forceinline__ void store_results(const Args& args, int direction, const Pair& pair, i64 row, int step,
                                              const Results& result) {
  if (step < 0 || step >= pair.length) return;
  const bool stores = kShared || !args.publishes_result;
  if constexpr (!kBackward) {
    const i64 at = row * args.output_stride + direction * HIDDEN + pair.unit;
    if (stores) args.output[at] = result.next[0];
    if (kLstm && args.cells) args.cells[at] = result.cell;
    if (kSaved > 0 && args.save) {
      Element* const gates = args.x + direction * args.x_direction + row * args.x_stride + pair.unit;
#pragma unroll
      for (int g = 0; g < kSaved; ++g) gates[g * HIDDEN] = result.gates[g];
    }
    if (step == pair.length - 1) {
      const i64 end = i64(direction * args.batch + pair.sequence) * HIDDEN + pair.unit;
      args.h_n[end] = result.next[0];
      if (kLstm) args.c_n[end] = result.cell;
    }
  } else {
    Element* const dgates = args.dgates + direction * args.dgates_direction + row * args.dgates_stride + pair.unit;
    if (kGru) dgates[2 * HIDDEN] = result.gates[2];
    if (stores) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) dgates[(kGru && v == 2 ? 3 : v) * HIDDEN] = result.next[v];
    }
  }
}

constexpr int kFetchedAhead = 6;  // steps

// Results are stored after the exchange where there are few of them to keep until then.
constexpr bool kDefers = kPairs <= 2;

extern "C" __global__ void __launch_bounds__(kThreads, 1) recurrence(const __grid_constant__ Args args) {
  unsigned char* const memory = dynamic_shared_memory();
  const u32 weights = shared_address(memory), stage = weights + kWeightsBytes, buffers = stage + kStageBytes;
  Element* const stage_pointer = reinterpret_cast<Element*>(memory + kWeightsBytes);
  unsigned char* const buffers_pointer = memory + kWeightsBytes + kStageBytes;
  float* const partials = reinterpret_cast<float*>(buffers_pointer + 2 * kBufferBytes);
  float* const received = partials + kPartialsBytes / 4;
  const u32 barriers = shared_address(received) + kReceivedBytes;
  (void)barriers;

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_row = warp / SPLIT, warp_part = warp % SPLIT;
  const int block = blockIdx.x % GROUP, direction = args.first_direction + blockIdx.x / GROUP % args.directions;
  const int first_sequence = args.first_sequence + blockIdx.x / GROUP / args.directions * COLUMNS;
  const int steps = length_of(args, first_sequence);  // of the longest sequence of the group

  // The sequence of the group whose chunk of the vector a lane has.
  const auto column_of = [&](int c) { return FMA ? c : c * 8 + lane / 4; };

  // Weights. A lane's chunk of row r and of row r + 8 are the eight words of two mma instructions.
  u32 resident[kResident > 0 ? kResident : 1][kRowTiles][8];
  const int first_row = warp_row * kRowTiles * 16 + lane / 4;
  const int rank = block % CLUSTER;
  const int first_index = (rank * SPLIT + warp_part) * kBlocks * 4 * kPerChunk + lane % 4 * kPerChunk;
  const auto weights_of = [&](int b, int tile, u32(&words)[8]) {
    const int index = first_index + b * 4 * kPerChunk, first_unit = (block - rank) * UNITS;
    const uint4 upper = rounded(weights_chunk(args.w_hh[direction], first_unit, first_row + tile * 16, index));
    const uint4 lower = rounded(weights_chunk(args.w_hh[direction], first_unit, first_row + tile * 16 + 8, index));
    words[0] = upper.x, words[1] = lower.x, words[2] = upper.y, words[3] = lower.y;
    words[4] = upper.z, words[5] = lower.z, words[6] = upper.w, words[7] = lower.w;
  };
  const u32 own_weights = weights + warp * (kInShared * kRowTiles * 1024) + lane * 16;
#pragma unroll
  for (int b = 0; b < kResident; ++b) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) weights_of(b, tile, resident[b][tile]);
  }
  for (int b = 0; b < kInShared; ++b) {
    for (int tile = 0; tile < kRowTiles; ++tile) {
      u32 w[8];
      weights_of(kResident + b, tile, w);
      const u32 to = own_weights + (b * kRowTiles + tile) * 1024;
      store_shared(to, {w[0], w[1], w[2], w[3]});
      store_shared(to + 512, {w[4], w[5], w[6], w[7]});
    }
  }

  // State.
  Pair pairs[kPairs];
  Ahead ahead[kPairs];
  const int start = kBackward ? steps - 1 : 0;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    Pair& pair = pairs[i];
    const int index = thread + i * kThreads;
    pair.column = index / UNITS;
    pair.unit = block * UNITS + index % UNITS;
    pair.sequence = first_sequence + pair.column;
    pair.length = pair.column < COLUMNS && pair.unit < HIDDEN ? length_of(args, pair.sequence) : 0;
    pair.carried = pair.carried_cell = pair.cell = 0.0f;
    if (pair.length > 0) {
      const i64 at = i64(direction * args.batch + pair.sequence) * HIDDEN + pair.unit;
      if constexpr (!kBackward) {
        const Element *bi = args.b_ih[direction], *bh = args.b_hh[direction];
#pragma unroll
        for (int g = 0; g < kGates; ++g) {
          pair.bias[g] = widen(load(bi, g * HIDDEN + pair.unit));
          if (!(kGru && g == 2)) pair.bias[g] += widen(load(bh, g * HIDDEN + pair.unit));
        }
        if constexpr (kGru) pair.bias[3] = widen(load(bh, 2 * HIDDEN + pair.unit));
        if (kGru) pair.carried = widen(load(args.h0, at));
        if (kLstm) pair.carried_cell = widen(load(args.c0, at));
      } else {
        pair.carried = widen(load(args.grad_h_n, at));
        if constexpr (kLstm) {
          pair.carried_cell = widen(load(args.grad_c_n, at));
          pair.cell = widen(
              args.cells[row_of(args, direction, pair.sequence, pair.length, pair.length - 1) * args.output_stride +
                         direction * HIDDEN + pair.unit]);
        }
      }
    }
    ahead[i] = {};
    load_ahead(ahead[i], args, direction, pair, start);
  }

  // The vector before the first step.
  if constexpr (kShared) {
    for (int i = thread * 16; i < 2 * kBufferBytes; i += kThreads * 16) store_shared(buffers + i, {0, 0, 0, 0});
    if (!kBackward && args.h0) {
      __syncthreads();
      for (int i = thread; i < COLUMNS * GROUP * kSlice; i += kThreads) {
        const int column = i / (GROUP * kSlice), index = i % (GROUP * kSlice), unit = place_of(index).unit;
        if (unit < HIDDEN && first_sequence + column < args.batch) {
          *reinterpret_cast<Element*>(buffers_pointer + column * kPitch + index * kBytes) =
              args.h0[i64(direction * args.batch + first_sequence + column) * HIDDEN + unit];
        }
      }
    }
  }
#if EXCHANGE == 0 && GROUP > 1
  constexpr int kExpectedBytes = GROUP * COLUMNS * kSlice * kBytes;  // of a step, the vector
#elif CLUSTER > 1
  constexpr int kExpectedBytes = CLUSTER * COLUMNS * kRowsOfUnit * UNITS * 4;  // of a step, the sums of own rows
  int turn = 0;                                                                // products so far
#endif
#if CLUSTER > 1 || (EXCHANGE == 0 && GROUP > 1)
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      cluster::arrivals_init(barriers + 8 * i);
      cluster::arrivals_expect(barriers + 8 * i, kExpectedBytes);
    }
  }
  __syncthreads();
  cluster::barrier();
#endif
  __syncthreads();

#if EXCHANGE == 1
  // Where this lane's chunks of the vector lie in a row of the exchanged tensor; -1 for padding.
  int chunk_at[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const Place place = place_of(first_index + b * 4 * kPerChunk);
    chunk_at[b] = place.unit < kPaddedHidden && first_index + b * 4 * kPerChunk < kVector
                      ? args.exchange_value[place.value] + place.unit
                      : -1;
  }
#endif

  const bool wants_initial = kBackward && (args.h_n || args.c_n);
  const int iterations = kBackward ? steps + (wants_initial ? 1 : 0) : steps;
  for (int k = 0; k < iterations; ++k) {
    const int step = kBackward ? steps - 1 - k : k;

    // The product, of the first step only where there is a state before it.
    const bool multiplies = k > 0 || (!kBackward && args.h0);
    if (multiplies) {
      float sums[kRowTiles][kVectors][kSums][4] = {};
      const auto multiply_block = [&](int b, const uint4(&chunks)[kVectors]) {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          u32 w[8];
          if (b < kResident) {
#pragma unroll
            for (int i = 0; i < 8; ++i) w[i] = resident[b < kResident ? b : 0][tile][i];
          } else {
            const u32 from = own_weights + ((b - kResident) * kRowTiles + tile) * 1024;
            const uint4 x = load_shared(from), y = load_shared(from + 512);
            w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
          }
#pragma unroll
          for (int c = 0; c < kVectors; ++c) multiply_chunk(sums[tile][c], w, chunks[c]);
        }
      };
#if EXCHANGE == 0
      const u32 buffer = buffers + u32(k & 1) * kBufferBytes;
#if GROUP > 1
      if (k > 0) {
        cluster::arrivals_wait(barriers + u32(k & 1) * 8, u32((k - 1) >> 1) & 1);
        if (thread == 0) cluster::arrivals_expect(barriers + u32(k & 1) * 8, kExpectedBytes);
      }
#endif
      u32 from[kVectors];
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        // Columns beyond the last read it once more; nobody looks at their sums.
        const int column = min(column_of(c), COLUMNS - 1);
        from[c] = buffer + column * kPitch + warp_part * kBlocks * 64 + lane % 4 * 16;
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint4 chunks[kVectors];
#pragma unroll
        for (int c = 0; c < kVectors; ++c) chunks[c] = rounded(load_shared(from[c] + b * 64));
        multiply_block(b, chunks);
      }
#else
      const Element* from[kVectors];
      const int last = kBackward ? step + 1 : step - 1;
#pragma unroll
      for (int c = 0; c < kVectors; ++c) {
        const int sequence = first_sequence + column_of(c);
        const int length = column_of(c) < COLUMNS ? length_of(args, sequence) : 0;
        from[c] = nullptr;
        if (k == 0) {
          if (length > 0) from[c] = args.h0 + i64(direction * args.batch + sequence) * HIDDEN;
        } else if (last < length) {
          from[c] = args.exchange + direction * args.exchange_direction +
                    row_of(args, direction, sequence, length, last) * args.exchange_stride;
        }
      }
      const auto load_chunk = [&](int b, int c) -> uint4 {
        if (!from[c] || chunk_at[b] < 0) return {0, 0, 0, 0};
        if (k > 0) return load_published(from[c] + chunk_at[b]);
        Element e[kPerChunk];
#pragma unroll
        for (int i = 0; i < kPerChunk; ++i) {
          const int unit = place_of(first_index + b * 4 * kPerChunk + i).unit;
          e[i] = unit < HIDDEN ? from[c][unit] : Element(0);
        }
        return pack(e);
      };
      // All chunks of a batch are in flight together, those of the next batch during the products of this one.
      constexpr int kBatch = kVectors >= 8 ? 1 : 8 / kVectors < kBlocks ? 8 / kVectors : kBlocks;
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
        while (k > 0) {
          bool missing = false;
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
#pragma unroll
            for (int c = 0; c < kVectors; ++c) {
              if (first + b < kBlocks) missing |= is_missing(coming[b][c]);
            }
          }
          if (!__any_sync(~0u, missing)) break;
          load_batch(first, true);
        }
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
#endif
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < kVectors; ++c) {
#if FMA
          // Lanes 0 and 1 of each four end with the sums of rows r and r + 8 over the chunks of all four.
          const float(&s)[4] = sums[tile][c][0];
          const bool second = lane % 2;
          float sum = second ? s[2] + s[3] : s[0] + s[1];
          sum += __shfl_xor_sync(~0u, second ? s[0] + s[1] : s[2] + s[3], 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (lane % 4 < 2) {
            partials[(warp_part * COLUMNS + c) * kPartialPitch + first_row + tile * 16 + lane % 4 * 8] = sum;
          }
#else
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = first_row + tile * 16 + i / 2 * 8, column = c * 8 + lane % 4 * 2 + i % 2;
            float sum = sums[tile][c][0][i];
            if constexpr (kSums == 2) sum += sums[tile][c][1][i];
            if (column < COLUMNS) partials[(warp_part * COLUMNS + column) * kPartialPitch + row] = sum;
          }
#endif
        }
      }
      __syncthreads();
#if CLUSTER > 1
      // Two buffers suffice: a block sends its sums of a step after it has those of the step before from all others,
      // who sent them after they had used what came before.
      const u32 at_turn = barriers + u32(turn & 1) * 8;
      constexpr int kQuads = UNITS / 4, kQuadsOfColumn = kRowsOfUnit * kQuads, kMessage = COLUMNS * kQuadsOfColumn;
      for (int i = thread; i < CLUSTER * kMessage; i += kThreads) {
        const int to = i / kMessage, column = i % kMessage / kQuadsOfColumn, quad = i % kQuadsOfColumn;
        const int row = quad / kQuads * kRowUnits + to * UNITS + quad % kQuads * 4;
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int part = 0; part < SPLIT; ++part) {
          const float4 x = *reinterpret_cast<const float4*>(partials + (part * COLUMNS + column) * kPartialPitch + row);
          sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        const u32 own = shared_address(received) +
                        ((((turn & 1) * CLUSTER + rank) * COLUMNS + column) * kReceivedPitch + quad * 4) * 4;
        cluster::send(cluster::shared_address(own, to),
                      {__float_as_uint(sum.x), __float_as_uint(sum.y), __float_as_uint(sum.z), __float_as_uint(sum.w)},
                      cluster::shared_address(at_turn, to));
      }
      cluster::arrivals_wait(at_turn, u32(turn >> 1) & 1);
      if (thread == 0) cluster::arrivals_expect(at_turn, kExpectedBytes);
      ++turn;
#endif
    }
    const auto product_of_pairs = [&](float(&products)[kPairs][kRowsOfUnit]) {
#if CLUSTER > 1
      const float* const sums = received + ((turn - 1) & 1) * (CLUSTER * COLUMNS * kReceivedPitch);
      constexpr int kParts = CLUSTER, kPitchOfSums = kReceivedPitch;
#else
      const float* const sums = partials;
      constexpr int kParts = SPLIT, kPitchOfSums = kPartialPitch;
#endif
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int index = thread + i * kThreads < UNITS * COLUMNS ? thread + i * kThreads : 0;
        const float* const from = sums + index / UNITS * kPitchOfSums + index % UNITS;
#pragma unroll
        for (int r = 0; r < kRowsOfUnit; ++r) products[i][r] = 0.0f;
        if (!multiplies) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int r = 0; r < kRowsOfUnit; ++r) {
            products[i][r] += from[part * (COLUMNS * kPitchOfSums) + r * UNITS];
          }
        }
      }
    };

    // Gates and state of the block's own units: no branch that depends on the pair, so that a thread's pairs overlap.
    Results results[kPairs] = {};
    if (step >= 0) {
      float products[kPairs][kRowsOfUnit];
      product_of_pairs(products);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const bool active = step < pairs[i].length;
        results[i] = kBackward ? step_backward(pairs[i], ahead[i], products[i], active)
                               : step_forward(pairs[i], ahead[i], products[i], active);
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int index = thread + i * kThreads;
        if (index >= UNITS * COLUMNS) continue;
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          const int at = v * UNITS + index % UNITS;
          if (kShared && GROUP == 1) {
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
      product_of_pairs(products);
      for (int i = 0; i < kPairs; ++i) {
        if (pairs[i].length == 0) continue;
        const i64 at = i64(direction * args.batch + pairs[i].sequence) * HIDDEN + pairs[i].unit;
        if (args.h_n) args.h_n[at] = narrow(products[i][0] + pairs[i].carried);
        if (kLstm && args.c_n) args.c_n[at] = narrow(pairs[i].carried_cell);
      }
      break;
    }
    // The others wait for the exchange: what can be done after it is.
    i64 rows[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) rows[i] = ahead[i].row;
    const auto prefetch = [&] {
      if (k + 1 >= iterations) return;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) load_ahead(ahead[i], args, direction, pairs[i], kBackward ? step - 1 : step + 1);
    };
    if (GROUP == 1) prefetch();
    __syncthreads();
    [[maybe_unused]] const bool last_exchange = k + 1 >= iterations;
    [[maybe_unused]] constexpr int kChunksOfSlice = kSlice / kPerChunk, kChunks = COLUMNS * kChunksOfSlice;
#if EXCHANGE == 0 && GROUP > 1
    if (!last_exchange) {
      const u32 next_buffer = buffers + u32((k + 1) & 1) * kBufferBytes + block * (kSlice * kBytes);
      const u32 next_barrier = barriers + u32((k + 1) & 1) * 8;
#pragma unroll
      for (int i = 0; i < ceil_div(kChunks * GROUP, kThreads); ++i) {
        const int index = thread + i * kThreads, to = index / kChunks, chunk = index % kChunks;
        if (index < kChunks * GROUP) {
          const u32 at = next_buffer + chunk / kChunksOfSlice * kPitch + chunk % kChunksOfSlice * 16;
          cluster::send(cluster::shared_address(at, to), load_shared(stage + chunk * 16),
                        cluster::shared_address(next_barrier, to));
        }
      }
    }
#elif EXCHANGE == 1
    // Where a chunk of the stage lies in the exchanged tensor at a step, null for none.
    const auto own_chunk = [&](int index, int at_step) -> Element* {
      constexpr int kChunksOfValue = UNITS / kPerChunk;
      const int column = index / kChunksOfSlice, value = index % kChunksOfSlice / kChunksOfValue;
      const int unit = block * UNITS + index % kChunksOfValue * kPerChunk;
      const int length = length_of(args, first_sequence + column);
      if (unit >= kPaddedHidden || at_step < 0 || at_step >= length) return nullptr;
      return args.exchange + direction * args.exchange_direction +
             row_of(args, direction, first_sequence + column, length, at_step) * args.exchange_stride +
             args.exchange_value[value] + unit;
    };
    if (!last_exchange || args.publishes_result) {
      for (int index = thread; index < kChunks; index += kThreads) {
        if (Element* const to = own_chunk(index, step)) publish(to, load_shared(stage + index * 16));
      }
    }
#endif
    if (GROUP > 1) prefetch();
    if (kDefers) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) store_results(args, direction, pairs[i], rows[i], step, results[i]);
    }
#if EXCHANGE == 1
    // A long tensor has left the L2 cache since it was filled, and who polls it would wait for memory.
    for (int index = thread; index < kChunks; index += kThreads) {
      const Element* const p = own_chunk(index, kBackward ? step - kFetchedAhead : step + kFetchedAhead);
      if ((u64(p) & 31) == 0 && p) prefetch_published(p);  // a sector of the cache
    }
#endif
  }
#if CLUSTER > 1 || (EXCHANGE == 0 && GROUP > 1)
  cluster::barrier();
#endif
}
