// What a kernel of x[t] = A[t] x[t-1] + b[t] is given on either device: pointers, strides and sizes, no torch header.
//
// One structure describes every case. It is written in the order of processing, so a kernel only ever runs "forward":
//   reverse     A, b and out point at step T-1 and their t strides are negative;
//   transpose   A_row and A_col are exchanged;
//   shared A    A_b = 0;
//   diagonal A  A_col = 0 and A_row = 1: the element of channel h is A[t * A_t + b * A_b + h].
// Strides are in elements and may have any sign or be 0; for a dense A one of A_row and A_col is 1, and b, x0 and out
// have unit stride in h. Nothing is known about alignment beyond one element: a kernel that loads wider looks at
// pointers and strides first. out overlaps no input.
#pragma once
#include <cstddef>
#include <cstdint>

namespace weft::scan {

enum class DType : int32_t { f16, bf16, f32, f64 };

inline size_t element_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

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

}  // namespace weft::scan
