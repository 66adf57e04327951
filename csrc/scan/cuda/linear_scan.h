// The CUDA kernels of x[t] = A[t] x[t-1] + b[t], by pointers, strides and a stream: no torch header.
//
// One structure describes every case. It is written in the order of processing, so a kernel only ever runs "forward":
//   reverse     A, b and out point at step T-1 and their t strides are negative;
//   transpose   A_row and A_col are exchanged;
//   shared A    A_b = 0;
//   diagonal A  A_col = 0 and A_row = 1: the element of channel h is A[t * A_t + b * A_b + h].
// Strides are in elements and may have any sign or be 0; for a dense A one of A_row and A_col is 1 (or H = 1), and b,
// x0 and out have unit stride in h. Nothing is known about alignment beyond one element: a kernel that loads wider
// looks at pointers and strides first. out overlaps no input. Every launcher
//   - writes all of out (T, B, H) and returns at once where it is empty;
//   - does not read A at the first step when x0 is null (it may hold NaN there);
//   - carries the state in fp32 (f16, bf16, f32) or fp64 (f64), rounds once when it writes, never uses TF32 alone;
//   - gives the numbers of the sequential recurrence wherever those are finite, without host synchronisation;
//   - gives the same bits in every run, and keeps the rows of the batch apart (NaN in one touches no other);
//   - allocates nothing: `workspace` holds what its *_workspace_bytes asked for (256-byte aligned, uninitialised, null
//     where that is 0), and is free again when the stream has run past the call.
// They throw std::runtime_error where a launch fails.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace weft::scan {

enum class DType : int32_t { f16, bf16, f32, f64 };

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

inline size_t element_size(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// Diagonal A, any H.
size_t linear_scan_diagonal_workspace_bytes(const LinearScan& scan);
void linear_scan_diagonal(const LinearScan& scan, void* workspace, cudaStream_t stream);

// Dense A, H <= kSmallMaxH.
constexpr int64_t kSmallMaxH = 32;
size_t linear_scan_small_workspace_bytes(const LinearScan& scan);
void linear_scan_small(const LinearScan& scan, void* workspace, cudaStream_t stream);

// Dense A, kSmallMaxH < H <= kMiddleMaxH: tensor cores, three TF32 products for one fp32 product.
constexpr int64_t kMiddleMaxH = 128;
size_t linear_scan_middle_workspace_bytes(const LinearScan& scan);
void linear_scan_middle(const LinearScan& scan, void* workspace, cudaStream_t stream);

}  // namespace weft::scan
