// The dense linear_scan for H <= 32: the number of chunks, the workspace, and the way to the dtype's own file.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "common/launch.cuh"
#include "scan/cuda/linear_scan_small.h"
#include "scan/cuda/padding.h"

namespace weft::scan {

namespace {

// Microseconds on an H200 at H = 20: a step of a replaying warp alone; a chunk at the boundary; a step of the product,
// alone and per (chunk, batch) where the chip is full; two more launches. The full product is set
// by what it asks for, four warps per scheduler at T = 30000, B = 16; measured, it is 8e-4 to 9e-4 with three or four.
constexpr double kReplay = 0.16, kBoundary = 0.25, kProduct = 0.9, kProductFull = 4.1e-4, kChunkedOverhead = 6;
constexpr double kBytesPerMicrosecond = 4.2e6;

SmallPlan plan_of(const LinearScan& scan) {
  if (scan.dtype == DType::f64) return {1, scan.T};  // no fp64 product kernel: the recurrence itself
  const double h = scan.H / 20.0, full = 132.0 / device_limits().sm_count;
  const double bytes = double(scan.H) * scan.H * element_size(scan.dtype);
  auto time = [&](int64_t chunks) {
    const double length = double((scan.T + chunks - 1) / chunks), pairs = double(chunks) * scan.B;
    const double memory = pairs * bytes / kBytesPerMicrosecond;
    const double replay = length * std::max(kReplay, memory);
    if (chunks == 1) return replay;
    const double product = std::max(kProduct * h * h, pairs * kProductFull * full * h * h * h);
    return kChunkedOverhead + replay + chunks * kBoundary + length * std::max(product, memory);
  };
  int64_t best = 1;
  const int64_t most = std::min<int64_t>(scan.T / 4, 8192);
  for (int64_t chunks = 2; chunks <= most; chunks += std::max<int64_t>(1, chunks / 8)) {
    if (time(chunks) < time(best)) best = chunks;
  }
  const int64_t length = (scan.T + best - 1) / best;
  return {(scan.T + length - 1) / length, length};
}

}  // namespace

size_t linear_scan_small_workspace_bytes(const LinearScan& scan) {
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return 0;
  const SmallPlan plan = plan_of(scan);
  if (plan.chunks == 1) return 0;
  const int64_t H = padded_hidden(scan.H);
  return size_t((plan.chunks - 1) * scan.B * map_floats(H) + plan.chunks * scan.B * H) * sizeof(float);
}

void linear_scan_small(const LinearScan& scan, void* workspace, cudaStream_t stream) {
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return;
  const SmallPlan plan = plan_of(scan);
  const int64_t line = (scan.A_col == 1 ? scan.A_row : scan.A_col) * int64_t(element_size(scan.dtype));
  if (std::abs(line) * scan.H > std::numeric_limits<int>::max()) {
    throw std::runtime_error("weft: linear_scan: the rows of one A[t] lie more than 2 GiB apart");
  }
  if (plan.length >= std::numeric_limits<int>::max()) {
    throw std::runtime_error("weft: linear_scan: more than 2^31 - 2 steps in one chunk");
  }
  switch (scan.dtype) {
    case DType::f16:
      return run_linear_scan_small<__half>(scan, plan, workspace, stream);
    case DType::bf16:
      return run_linear_scan_small<__nv_bfloat16>(scan, plan, workspace, stream);
    case DType::f32:
      return run_linear_scan_small<float>(scan, plan, workspace, stream);
    case DType::f64:
      return run_linear_scan_small<double>(scan, plan, workspace, stream);
  }
}

}  // namespace weft::scan
