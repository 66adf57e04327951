// The gradients of vectors on CUDA: each column of each is a sum over rows of buffers. Free of torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "vertex/program/program.h"

namespace weft::vertex {

// Rows [0, rows) of `width` columns of `source`, added to columns of the result from `to` on.
struct Total {
  const void* source;
  int64_t stride;  // between rows, in elements
  int64_t rows;
  int32_t width, to;
  DType dtype;
};

constexpr int kMaxTotals = 48, kMaxTotalVectors = 24;  // of a launch

struct TotalVector {
  void* result;  // float, or double where registers are
  int32_t width;
  int32_t first, end;  // its totals
  int32_t group;       // the first of its groups of 32 columns
};

struct TotalsLaunch {
  Total totals[kMaxTotals];
  TotalVector vectors[kMaxTotalVectors];
  int32_t num_vectors;
  int32_t groups;  // of 32 columns, of all vectors
  int32_t pieces;  // of the rows, summed up by a block each
  void* partial;   // (pieces, groups * 32)
  int* arrived;    // (groups), zeros
};

// How many pieces the rows are cut into, so that blocks fill the device.
int totals_pieces(int64_t rows, int64_t groups, int sm_count);

void launch_totals(const TotalsLaunch& launch, bool doubles, cudaStream_t stream);

}  // namespace weft::vertex
