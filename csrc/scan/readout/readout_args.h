// What the kernels of linear_scan_readout are given, on either device. No torch header.
//
// Pointers are at the first element in the order of processing (a reversed scan begins at the last step and has
// negative strides of t). Strides are in elements, may be 0 or negative; n has unit stride everywhere.
#pragma once
#include <cstdint>

#include "scan/linear/linear_scan_args.h"

namespace weft::scan {

// Steps from one state that is kept to the next: what the gradients make anew at a time, 16 KB of a warp.
constexpr int segment_steps(DType dtype) {
  return dtype == DType::c128 ? 8 : dtype == DType::c64 || dtype == DType::f64 ? 16 : 32;
}

// A tensor over (T, B, H, N).
struct Field {
  const void* at;
  int64_t t, b, h;
};
struct Result {
  void* at;
  int64_t t, b;  // h and n follow each other
};

struct ReadOut {
  Field A, c;
  Field b;
  bool full;     // b has N numbers, else one for all
  Field x0;      // null for zeros: A of the first step is then not used
  Result y;      // (T, B, H)
  void* starts;  // (segments, B, H, N), contiguous, in the dtype of the state: that before each segment. May be null
  int64_t T, B, H, N;
  DType dtype;
};

// The gradients, from the same problem with its starts; y is not there. Null: not wanted.
struct ReadOutGradients {
  ReadOut scan;
  Field grad;         // of y
  Result A, b, c;     // A and c: of every step, or with their flag the sums over T, (B, H, N), contiguous, in the dtype
  bool sum_A, sum_c;  // of the state; b: as scan.b has it, with N or without
  void* x0;           // (B, H, N), contiguous, in the dtype of the state
};

}  // namespace weft::scan
