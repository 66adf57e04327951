// Products of the vertex engine on CUDA: cuBLAS, without torch's dispatcher on the way, whose time the host has not.
#pragma once
#include <cstdint>

#include "vertex/program/program.h"

namespace weft::vertex {

// A factor of a product; one of the strides, in elements, is 1.
struct Factor {
  const void* data;
  int64_t row_stride, column_stride;
};

// result (rows, columns), by rows `stride` apart, = left (rows, inner) @ right (inner, columns), added to it where
// `more`. On the current stream, with torch's handle, workspace and setting of TF32.
void multiply(DType dtype, int64_t rows, int64_t columns, int64_t inner, const Factor& left, const Factor& right,
              void* result, int64_t stride, bool more);

}  // namespace weft::vertex
