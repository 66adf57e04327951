// The dense linear_scan for H <= 32: the number of chunks, the workspace, and the way to the dtype's own file.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "common/launch.cuh"
#include "scan/cuda/linear_scan_small.h"
#include "scan/cuda/padding.h"
#include "scan/cuda/small_chunks.h"

namespace weft::scan {

namespace {

// Microseconds on an H200: a chunk at the boundary; a step of the replay of a warp alone, in fp32 and in the half
// types; a step of the product where a scheduler has one warp, and for each of several.
struct Costs {
  double boundary, replay, replay_half, product, product_each;
};

const Costs& costs(int64_t H) {
  // By padded H: 8, 16, 20, 24, 32.
  static constexpr Costs kCosts[] = {{0.15, 0.24, 0.25, 0.33, 0.10},
                                     {0.23, 0.26, 0.38, 0.44, 0.24},
                                     {0.25, 0.29, 0.45, 0.60, 0.36},
                                     {0.27, 0.30, 0.52, 0.66, 0.40},
                                     {0.31, 0.36, 0.56, 1.15, 0.87}};
  return kCosts[hidden_size_index(H)];
}

constexpr double kBytesPerMicrosecond = 4.2e6;
constexpr double kUneven = 0.12;  // of the share by which some schedulers have more warps than others

// The stairs of step_time with rounded edges: two warps on a scheduler hide some of each other's latency, not all.
double product_step(double warps, double schedulers, int resident, const Costs& cost) {
  const double n = std::ceil(warps / schedulers), at_once = std::min<double>(n, resident);
  auto fourth_power = [](double x) { return x * x * x * x; };
  const double both = fourth_power(cost.product) + fourth_power(at_once * cost.product_each);
  return std::ceil(n / resident) * std::sqrt(std::sqrt(both));
}

SmallPlan plan_of(const LinearScan& scan) {
  if (scan.dtype == DType::f64) return {1, scan.T};  // no fp64 product kernel: the recurrence itself
  const auto& cost = costs(scan.H);
  const double bytes = double(scan.H) * scan.H * element_size(scan.dtype);
  const bool half = element_size(scan.dtype) == 2;
  const int resident = products_at_once(padded_hidden(scan.H));
  const double warps = schedulers();
  auto time = [&](int64_t chunks) {
    const double length = double((scan.T + chunks - 1) / chunks), pairs = double(chunks) * scan.B;
    const double memory = pairs * bytes / kBytesPerMicrosecond;
    const double uneven = std::ceil(pairs / warps) * warps / pairs - 1;
    const double replay = length * std::max(half ? cost.replay_half : cost.replay, memory * (1 + kUneven * uneven));
    if (chunks == 1) return replay;
    const double product = product_step(pairs - scan.B, warps, resident, cost);
    return kChunkedOverhead + replay + chunks * cost.boundary + length * std::max(product, memory);
  };
  const int64_t best = cheapest_chunks(std::min<int64_t>(scan.T / 4, 8192), scan.B, warps, 1, time);
  const int64_t length = (scan.T + best - 1) / best;
  return {(scan.T + length - 1) / length, length};
}

}  // namespace

void linear_scan_small(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return;
  const SmallPlan plan = plan_of(scan);
  const int64_t line = (scan.A_col == 1 ? scan.A_row : scan.A_col) * int64_t(element_size(scan.dtype));
  if (std::abs(line) * scan.H > std::numeric_limits<int>::max()) {
    throw std::runtime_error("weft: linear_scan: the rows of one A[t] lie more than 2 GiB apart");
  }
  if (plan.length >= std::numeric_limits<int>::max()) {
    throw std::runtime_error("weft: linear_scan: more than 2^31 - 2 steps in one chunk");
  }
  const int64_t H = padded_hidden(scan.H);
  const int64_t floats = (plan.chunks - 1) * scan.B * map_floats(H) + plan.chunks * scan.B * H;
  void* const memory = plan.chunks > 1 ? workspace(size_t(floats) * sizeof(float)) : nullptr;
  switch (scan.dtype) {
    case DType::f16:
      return run_linear_scan_small<__half>(scan, plan, memory, stream);
    case DType::bf16:
      return run_linear_scan_small<__nv_bfloat16>(scan, plan, memory, stream);
    case DType::f32:
      return run_linear_scan_small<float>(scan, plan, memory, stream);
    case DType::f64:
      return run_linear_scan_small<double>(scan, plan, memory, stream);
  }
}

}  // namespace weft::scan
