// Products of matrices by cuBLAS itself, on the current stream: its call takes the host less time than torch's product,
// and it takes rows of any stride, and adds. No torch header.
#pragma once
#include <cstdint>

#include "rnn/persistent/cuda/recurrence_layout.h"

namespace weft::rnn {

// Row-major, with any row stride, or transposed.
struct Matrix {
  const void* data;
  int64_t stride;
  bool transposed = false;
};

// Several products of the same sizes: elements from one's operand to the next one's. They share a row of left and
// right.
struct Heads {
  int64_t count = 1, left = 0, right = 0, out = 0;
};

// out (m, n) = left (m, k) right (k, n) [+ out], of each head. In the half types sums are in float32, but where the
// user allows torch others.
void multiply(RecurrenceType type, int64_t m, int64_t n, int64_t k, Matrix left, Matrix right, void* out,
              int64_t out_stride, bool accumulate, const Heads& heads = {});

}  // namespace weft::rnn
