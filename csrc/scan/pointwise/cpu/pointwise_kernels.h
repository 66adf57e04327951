// pointwise_scan on the CPU: an interpreter of the step whose instructions are loops over columns, one table per
// instruction set. No torch header.
//
// Decomposition: a column is a channel of a chunk of time; a block of them walks its steps at once, so that an
// instruction's dispatch is paid for all of them and the registers stay in L1. Where channels are few, chunks of them
// lie side by side in a block: what forward.jit.cu does with warps, Newton's correction included, pointwise_scan.cpp
// does with columns.
#pragma once
#include <cstdint>

#include "common/cpu/kernels.h"
#include "scan/pointwise/pointwise_args.h"
#include "scan/pointwise/program.h"

namespace weft::cpu {

constexpr int64_t kPointwiseBlock = 256, kPointwiseBatch = 8;

// Channels [channel, channel + channels) of `chunks` chunks from `chunk` on; channels * chunks <= kPointwiseBlock.
struct PointwiseBlock {
  int64_t channel, channels, chunk, chunks;
};

struct PointwiseJob {
  const scan::PointwiseArgs* args;
  int32_t states, inputs, parameters;
  const scan::StepProgram::Instruction* code;
  // Indices of `code`, in order: constants, and what depends on the step.
  const int32_t *constants, *order;
  int64_t num_constants, length;
  const int32_t* results;   // registers: next, or the vector-Jacobian product
  const int32_t* jacobian;  // null where no derivative is carried
  const char* active;       // (chunks, N); of a walk again, else null
  uint64_t wanted;          // backward: bits of operands
  uint32_t given;           // backward: bits of states
  bool whole;               // backward: carries come from `starts` and go to `ends`; no difference
};

constexpr int64_t pointwise_scratch(int64_t registers, int64_t states, int64_t parameters, int64_t element_bytes) {
  const int64_t rooms = registers + 6 * states + 2 * states * states + parameters + 2;
  return rooms * (kPointwiseBlock + 16) * element_bytes + registers * int64_t(sizeof(void*));
}

using PointwiseWalk = void (*)(const PointwiseJob& job, const PointwiseBlock& block, void* scratch);

// By dtype: float16, bfloat16, float32, float64. `scratch` has pointwise_scratch bytes, at a multiple of 64.
struct PointwiseKernels {
  // Walks a block. Columns that are active again, from `starts`; or all, from the initial state.
  PointwiseWalk forward[4];
  // From the end; columns that are active again, with the difference that `starts` makes; or all, from zero.
  PointwiseWalk backward[4];
};

}  // namespace weft::cpu

WEFT_CPU_KERNELS(PointwiseKernels, pointwise_kernels)
