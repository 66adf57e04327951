// What the recurrence kernel is compiled for: macros, the layout that follows from them, and the element type.
//
// CELL and TYPE: the numbers of Cell and RecurrenceType. BACKWARD, PACKED (rows and lengths come from the batch sizes):
// 0 or 1. HIDDEN: H of a head, of which there are HEADS. EXCHANGE: 0 through shared memory, of a cluster where there
// are others, 1 through L2. GROUP, COLUMNS, UNITS, WARPS, SPLIT, CLUSTER, RESIDENT, FMA: those of RecurrenceShape.
// SHARED_BYTES, where it is given: what the host allocates.
#pragma once

#include "common/cuda/ptx.jit.cuh"
#include "rnn/cells/cells.h"
#include "rnn/persistent/cuda/recurrence_args.h"
#include "rnn/persistent/cuda/recurrence_layout.h"

namespace weft::rnn {

constexpr Cell kCell = Cell(CELL);
constexpr RecurrenceType kType = RecurrenceType(TYPE);
constexpr bool kBackward = BACKWARD, kPacked = PACKED, kFma = FMA, kShared = EXCHANGE == 0, kPools = CLUSTER > 1;
using CellTraits = Traits<kCell>;
constexpr bool kApart = CellTraits::kApart >= 0, kHasC = CellTraits::kStates > 1;
// States beside h, those of them that `cells` holds, and those before a step that the derivative reads.
constexpr int kOthers = CellTraits::kStates - 1, kKept = CellTraits::kKept, kRead = states_read(kCell);
// kAll: units of the layer.
constexpr int kHeads = HEADS, kHidden = HIDDEN, kAll = kHeads * kHidden, kGroup = GROUP, kColumns = COLUMNS,
              kUnits = UNITS;
constexpr int kSplit = SPLIT, kCluster = CLUSTER;
constexpr int kThreads = 32 * WARPS;

constexpr RecurrenceLayout kLayout(RecurrenceShape{kCell, kType, kBackward, kHidden, kGroup, kColumns, kUnits, WARPS,
                                                   kSplit, kCluster, RESIDENT, kFma, !kShared});
constexpr int kPerChunk = kLayout.per_chunk;
constexpr int kGates = kLayout.gates, kSaved = kLayout.saved;
constexpr int kRowsOfUnit = kLayout.rows_of_unit, kValues = kLayout.values;
constexpr int kPaddedHidden = kLayout.padded_hidden, kSlice = kLayout.slice, kVector = kLayout.vector;
constexpr int kRowUnits = kLayout.row_units, kBlocks = kLayout.blocks, kRowTiles = kLayout.row_tiles;
constexpr int kVectors = kLayout.vectors, kInRegisters = kLayout.in_registers, kPairs = kLayout.pairs;
constexpr int kSums = kLayout.sums;
constexpr int kPitch = kLayout.pitch, kPartialPitch = kLayout.partial_pitch, kReceivedPitch = kLayout.received_pitch;
constexpr int kBufferBytes = kLayout.buffer_bytes;
constexpr int kStage = kLayout.stage, kBuffers = kLayout.buffers, kPartials = kLayout.partials;
constexpr int kReceived = kLayout.received, kBarriers = kLayout.barriers, kSharedBytes = kLayout.shared_bytes;

static_assert(kUnits % kPerChunk == 0 && kUnits % 4 == 0 && WARPS % kSplit == 0);
static_assert(kCluster == 1 || (!kShared && kGroup % kCluster == 0));
static_assert(!kFma || kType == RecurrenceType::kFloat);
#ifdef SHARED_BYTES
static_assert(SHARED_BYTES == kSharedBytes);
#endif

template <int kBytes>
struct ElementOf {
  using Type = float;
};
template <>
struct ElementOf<2> {
  using Type = unsigned short;
};
constexpr int kBytes = element_bytes(kType);
using Element = ElementOf<kBytes>::Type;
using Args = RecurrenceArgsOf<Element>;

__device__ __forceinline__ float widen(Element x) {
  if constexpr (kType == RecurrenceType::kHalf) return half_to_float(x);
  if constexpr (kType == RecurrenceType::kBFloat16) return bfloat16_to_float(x);
  return x;
}
__device__ __forceinline__ Element narrow(float x) {
  if constexpr (kType == RecurrenceType::kHalf) return float_to_half(x);
  if constexpr (kType == RecurrenceType::kBFloat16) return float_to_bfloat16(x);
  return x;
}

__device__ __forceinline__ uint4 pack(const Element (&e)[kPerChunk]) {
  if constexpr (kBytes == 2) {
    return {u32(e[0]) | u32(e[1]) << 16, u32(e[2]) | u32(e[3]) << 16, u32(e[4]) | u32(e[5]) << 16,
            u32(e[6]) | u32(e[7]) << 16};
  } else {
    return {__float_as_uint(e[0]), __float_as_uint(e[1]), __float_as_uint(e[2]), __float_as_uint(e[3])};
  }
}

// Unit of the head and value at an index of the vector; a unit of kHidden or more is padding.
struct Place {
  int unit, value;
};
__device__ __forceinline__ Place place_of(int index) {
  if (index >= kVector) return {kHidden, 0};
  if (kShared) return {index / kSlice * kUnits + index % kUnits, index % kSlice / kUnits};
  return {index % kPaddedHidden, index / kPaddedHidden};
}

// The row of a sequence at a step, counted from the sequence's own beginning in its own direction.
__device__ __forceinline__ int64_t row_of(const Args& args, int direction, int sequence, int length, int step) {
  const int t = direction ? length - 1 - step : step;
  return kPacked ? args.offsets[t] + sequence : int64_t(t) * args.batch + sequence;
}

__device__ __forceinline__ int length_of(const Args& args, int sequence) {
  return sequence >= args.batch ? 0 : kPacked ? args.lengths[sequence] : args.steps;
}

}  // namespace weft::rnn
