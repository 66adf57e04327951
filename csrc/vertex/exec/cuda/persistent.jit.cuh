// What vertex/exec/cuda/persistent.jit.cu is launched with. For hosts and kernels.
#pragma once
#include "vertex/exec/cuda/frontier.jit.cuh"
#include "vertex/exec/script.jit.cuh"

namespace weft::vertex {

constexpr int kPersistentThreads = 512;
constexpr int kCounterApart = 8;  // so that each has a sector of its own

struct PersistentArguments {
  FrontierArguments frontier;
  const ScriptInstruction* script;  // of the first group; that of the next is `apart` instructions further
  unsigned* arrived;                // 0; the signals of all blocks, then of each group, kCounterApart apart
  int apart;
};

// Of the gradient of a matrix: a unit of work is a tile of so many columns and rows of it, in so many bytes of shared
// memory, by products of warpgroups or of warps.
constexpr int kOuterTile = 64;
constexpr int outer_shared(bool warpgroups) {
  return warpgroups ? 132 << 10 : 72 << 10;
}
// The same of sums over rows: so many columns, of the gradient of a vector and of the head's.
constexpr int kTotalColumns = 32, kSumColumns = 8;

// What becomes of a parameter by its gradient; of one that has none, or gets none, nothing.
struct UpdateArgument {
  enum Kind : int { kNone, kSgd, kAdam };
  float *parameter, *first, *second;  // its moments are laid out as itself; null where there is none
  float* partial;                     // so is this: of a gradient of several terms the sum of the first ones
  // As Update in python/weft/_vertex/runtime/training.py says.
  float numbers[8];
  int kind;
};

struct TrainingArguments {
  const void* targets;     // int64 classes of the rows, or floats as what the loss is of
  const long long* roots;  // the rows of the outputs that the loss is of; null: all
  int rows;
  long long ignore_index;
  const float *weight, *bias;  // (classes, outputs), (classes), of the head
  float *losses, *gradients;   // of each row, and by what the head makes of it
  float *refused, *result;     // 1: nothing changes; the loss and that
};

}  // namespace weft::vertex
