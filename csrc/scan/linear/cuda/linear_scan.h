// The CUDA kernels of x[t] = A[t] x[t-1] + b[t], by pointers, strides and a stream: no torch header.
//
// Every launcher
//   - writes all of out (T, B, H) and returns at once where it is empty;
//   - does not use A at the first step when x0 is null (it may hold NaN there);
//   - carries the state in fp32 (f16, bf16, f32) or fp64 (f64), complex numbers in pairs of these, rounds once when it
//     writes, never uses TF32 alone;
//   - gives the numbers of the sequential recurrence wherever those are finite, without host synchronisation;
//   - gives the same bits in every run, and keeps the rows of the batch apart (NaN in one touches no other);
//   - takes the memory it works in from `workspace`, at most once.
// They throw std::runtime_error where a launch fails.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

#include "scan/linear/linear_scan_args.h"
#include "scan/linear/stages.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {

// So many bytes of the device, uninitialised, 256-byte aligned, until the stream has run past the call.
using Workspace = std::function<void*(size_t bytes)>;

// Diagonal A, any H, and its gradients: one pass over memory.
void linear_scan_diagonal(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream);
void linear_scan_diagonal_gradients(const DiagonalGradients& problem, const Workspace& workspace, cudaStream_t stream);

// Dense A, H <= kWarpMaxH.
constexpr int64_t kWarpMaxH = 32;
void linear_scan_warp(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream);
Expected expected_warp(const LinearScan& scan);

// A scan of a slice in float, H <= kWarpMaxH, in two halves (warp_slice.cuh), which agree on `chunks`, 1 to T, and on
// T >= 1: first the maps, (chunks, B, slice_map_floats(H)), and what the rank tells of them; then, from scan.x0, which
// is there, or where `came` is there and 0 from nothing, the states.
int64_t slice_chunks(const LinearScan& scan);
int64_t slice_map_floats(int64_t H);
void slice_maps_warp(const LinearScan& scan, int64_t chunks, const SliceMaps& told, const Workspace& workspace,
                     cudaStream_t stream);
void slice_replay_warp(const LinearScan& scan, int64_t chunks, float* maps, const int32_t* came, cudaStream_t stream);

// Dense A, kWarpMaxH < H <= kBlockMaxH: tensor cores, an fp32 number being the sum of three bf16 numbers.
constexpr int64_t kBlockMaxH = 128;
void linear_scan_block(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream);
Expected expected_block(const LinearScan& scan);

// What is expected of a dense scan of contiguous tensors, H <= kBlockMaxH.
Expected linear_scan_expected(int device, DType dtype, int64_t T, int64_t B, int64_t H);
// Chunks of such a slice, H <= kWarpMaxH.
int64_t slice_chunks_expected(int device, int64_t T, int64_t B, int64_t H);

}  // namespace weft::scan
