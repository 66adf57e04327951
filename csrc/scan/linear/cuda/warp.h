// What the files of the dense linear_scan for H <= 32 share: a plan, and one instance of the kernels per dtype.
#pragma once
#include "scan/linear/cuda/linear_scan.h"

namespace weft::scan {

// Chunk c holds steps [c L, (c + 1) L), the last what remains; its map is not needed of a scan alone.
struct WarpPlan {
  int64_t chunks, length;
  bool columns;        // who makes the products: warp_columns.cuh, or the tensor cores
  bool whole = false;  // of a slice: maps of all chunks, in which the first P has A, also without x0, and v has not
};

// Warps of the product kernel that a scheduler holds at once, by padded H. A multiprocessor has four schedulers.
constexpr int products_at_once(int64_t padded) {
  return padded == 8 ? 8 : padded == 16 ? 5 : padded <= 24 ? 4 : 2;
}

// warp_columns.cuh: the H that it is for, chunks of a warp, and warps that a scheduler holds at once.
constexpr int kColumnsHidden = 20, kColumnsPairs = 4, kColumnsAtOnce = 2;

template <typename T>
void run_linear_scan_warp(const LinearScan& scan, const WarpPlan& plan, void* workspace, cudaStream_t stream);

// The two halves of a slice's scan, in float (warp_slice.cuh).
void run_slice_maps(const LinearScan& scan, const WarpPlan& plan, const SliceMaps& maps, const Workspace& workspace,
                    cudaStream_t stream);
void run_slice_replay(const LinearScan& scan, const WarpPlan& plan, float* maps, const int32_t* came,
                      cudaStream_t stream);

}  // namespace weft::scan
