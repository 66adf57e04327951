// What a kernel of x[t] = A[t] x[t-1] + b[t] is given on either device: pointers, strides and sizes, no torch header.
//
// One structure describes every case. It is written in the order of processing, so a kernel only ever runs "forward":
//   reverse     A, b and out point at step T-1 and their t strides are negative;
//   transpose   A_row and A_col are exchanged;
//   shared A    A_b = 0;
//   diagonal A  A_col = 0 and A_row = 1: the element of channel h is A[t * A_t + b * A_b + h].
//   constant A  A_t = 0, diagonal only.
// Strides are in elements and may have any sign or be 0; for a dense A one of A_row and A_col is 1, and b, x0 and out
// have unit stride in h. Nothing is known about alignment beyond one element: a kernel that loads wider looks at
// pointers and strides first. out overlaps no input.
#pragma once
#include <cstdint>

#include "common/dtype.h"

namespace weft::scan {

struct LinearScan {
  const void* A;
  int64_t A_t, A_b, A_row, A_col;
  const void* b;
  int64_t b_t, b_b;
  const void* x0;  // (B, H), or null for zeros
  int64_t x0_b;
  void* out;
  int64_t out_t, out_b;
  int64_t T, B, H;
  DType dtype;  // of A, b, x0 and out
};

// The gradients of a diagonal scan, in the order of their own processing, which is the scan's turned round. `scan`
// makes lambda, the gradient of b, of the gradient of x; of complex numbers it takes A, x and x0 conjugated:
//   A    moved by one step: step k is given the A that follows it in the scan, step T the A that follows x0. No x0 of
//        its own, so that step 0 reads no A.
//   out  null where the gradient of b is not wanted.
struct DiagonalGradients {
  LinearScan scan;
  const void* x;  // moved by one step: step k is given the x before it in the scan. Null: no gradient of A
  int64_t x_t, x_b;
  const void* x0;  // step T-1 is given this instead; null for zeros
  int64_t x0_b;
  void* grad_A;  // (T, B, H) in the order of processing; or with `summed` the sum over T, see `sums`
  int64_t grad_A_t, grad_A_b;
  bool summed;
  void* grad_x0;  // (B, H), contiguous; null: not wanted
  bool wide_x0;   // grad_x0 in the dtype of the state, because it is to be summed over B
};

}  // namespace weft::scan
