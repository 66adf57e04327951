// What the kernels of conv_values.h take. Torch-free.
#pragma once
#include "sparse/types.h"

namespace weft::sparse {

struct Conv {
  DType dtype;
  bool wide;  // of the indices that conv_pattern writes
  const int32_t *crow, *row, *col, *tap_crow, *taps, *tap_crow_t, *taps_t;
  int64_t positions, elements, kernel;  // P, n, K
  int64_t joins;                        // of an element and a tap: as many as elements where each has one tap
  int64_t groups, in_channels, out_channels, output_positions;
  const void* in;
  void* out;
  void* out_crow;  // conv_pattern's; `out` is its col
};

}  // namespace weft::sparse
