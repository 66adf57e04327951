// The dense linear_scan for H <= 32: the number of chunks, the workspace, and the way to the dtype's own file.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "common/cuda/device_costs.h"
#include "common/launch.cuh"
#include "scan/linear/cuda/padding.h"
#include "scan/linear/cuda/step_ring.cuh"
#include "scan/linear/cuda/warp.h"
#include "scan/linear/cuda/warp_chunks.h"
#include "scan/linear/cuda/warp_columns.cuh"

namespace weft::scan {

namespace {

// Microseconds: a chunk at the boundary; a step of the replay where a scheduler has one warp, and for each of several;
// a step of the product, likewise. For lines of any alignment.
struct StageCosts {
  double boundary, replay, replay_each, product, product_each;
};

struct WarpCosts {
  double launches;
  double uneven;  // what counts of the fullest scheduler in the replay, which is bound by memory for the most part
  StageCosts single[kHiddenSizes], half[kHiddenSizes];  // by padded H
  StageCosts columns;

  explicit WarpCosts(const costs::Costs& all)
      : launches(all.table("scan.warp")("launches")), uneven(all.table("scan.warp")("uneven")) {
    const auto read = [&](const char* name, StageCosts* into) {
      const costs::Table& table = all.table(name);
      for (int i = 0; i < kHiddenSizes; ++i) {
        const auto of = [&](const char* number) { return table.numbers(number).at(i); };
        into[i] = {of("boundary"), of("replay"), of("replay_each"), of("product"), of("product_each")};
      }
    };
    read("scan.linear_warp.single", single), read("scan.linear_warp.half", half);
    const costs::Table& table = all.table("scan.linear_columns");
    columns = {table("boundary"), table("replay"), table("replay_each"), table("product"), table("product_each")};
  }

  const StageCosts& of(const LinearScan& scan, bool in_columns) const {
    if (in_columns) return columns;
    return (element_size(scan.dtype) == 2 ? half : single)[hidden_size_index(scan.H)];
  }
};

// Several warps on a scheduler hide some of each other's latency, not all: the larger of two times, with a rounded
// edge.
double rounded_max(double one, double several) {
  auto square = [](double x) { return x * x; };
  return std::sqrt(std::sqrt(square(square(one)) + square(square(several))));
}

// Of so many warps on a scheduler, `resident` at once. The time goes up in stairs where warps are bound by what they
// compute: the fullest scheduler counts.
double product_step(double warps, int resident, const StageCosts& cost) {
  const double n = std::ceil(warps);
  return std::ceil(n / resident) * rounded_max(cost.product, std::min<double>(n, resident) * cost.product_each);
}

double replay_step(double warps, double uneven, const StageCosts& cost) {
  return rounded_max(cost.replay, (warps + uneven * (std::ceil(warps) - warps)) * cost.replay_each);
}

// Whether the products can be made by warp_columns.cuh.
bool columns_take(const LinearScan& scan) {
  const int64_t line = scan.A_col == 1 ? scan.A_row : scan.A_col;
  return scan.dtype == DType::f32 && scan.H == kColumnsHidden && line == scan.H && lines_are_aligned(scan) &&
         ColumnShape::kBytes <= device_limits().max_shared_per_block;
}

Stages stages_of(const LinearScan& scan, int64_t chunks, bool columns, bool whole) {
  const auto& costs = costs_here<WarpCosts>();
  const StageCosts& cost = costs.of(scan, columns);
  const int resident = columns ? kColumnsAtOnce : products_at_once(padded_hidden(scan.H));
  const double all = schedulers(), length = double((scan.T + chunks - 1) / chunks), pairs = double(chunks) * scan.B;
  Stages stages;
  stages.replay = length * replay_step(pairs / all, costs.uneven, cost);
  if (chunks == 1 && !whole) return stages;
  stages.launches = costs.launches;
  const double warps = (pairs - (whole ? 0 : scan.B)) / (columns ? kColumnsPairs : 1);
  stages.products = length * product_step(warps / all, resident, cost);
  stages.boundaries = double(chunks) * cost.boundary;
  return stages;
}

// The number of chunks, the time expected, and who makes the products.
struct Choice {
  int64_t chunks;
  Stages stages;
  bool columns;
};

Choice cheapest(const LinearScan& scan, bool columns, bool whole) {
  const auto time = [&](int64_t chunks) { return stages_of(scan, chunks, columns, whole).us(); };
  const double pairs_per_warp = columns ? kColumnsPairs : 1;
  const int64_t chunks =
      cheapest_chunks(std::min<int64_t>(scan.T / 4, 8192), scan.B, schedulers(), 1 / pairs_per_warp, time);
  return {chunks, stages_of(scan, chunks, columns, whole), columns};
}

Choice choose(const LinearScan& scan, bool whole) {
  const Choice tensor_cores = cheapest(scan, false, whole);
  if (!columns_take(scan)) return tensor_cores;
  const Choice columns = cheapest(scan, true, whole);
  return columns.stages.us() < tensor_cores.stages.us() ? columns : tensor_cores;
}

WarpPlan plan_of(const LinearScan& scan) {
  if (scan.dtype == DType::f64) return {1, scan.T, false};  // no fp64 product kernel: the recurrence itself
  const Choice best = choose(scan, false);
  const int64_t length = (scan.T + best.chunks - 1) / best.chunks;
  return {(scan.T + length - 1) / length, length, best.columns};
}

}  // namespace

Expected expected_warp(const LinearScan& scan) {
  const WarpPlan plan = plan_of(scan);
  return {plan.chunks, stages_of(scan, plan.chunks, plan.columns, false)};
}

namespace {

void check_sizes(const LinearScan& scan, const WarpPlan& plan) {
  const int64_t line = (scan.A_col == 1 ? scan.A_row : scan.A_col) * int64_t(element_size(scan.dtype));
  if (std::abs(line) * scan.H > std::numeric_limits<int>::max()) {
    throw std::runtime_error("weft: linear_scan: the rows of one A[t] lie more than 2 GiB apart");
  }
  // They are counted in ints, and those that are loaded ahead with them.
  if (plan.length > std::numeric_limits<int>::max() - 64) {
    throw std::runtime_error("weft: linear_scan: more than 2^31 - 65 steps in one chunk");
  }
}

// Of so many chunks or fewer, none of which is empty.
WarpPlan slice_plan(const LinearScan& scan, int64_t chunks) {
  const int64_t length = (scan.T + chunks - 1) / chunks;
  WarpPlan plan{(scan.T + length - 1) / length, length, false, true};
  plan.columns = columns_take(scan) &&
                 stages_of(scan, plan.chunks, true, true).us() < stages_of(scan, plan.chunks, false, true).us();
  check_sizes(scan, plan);
  return plan;
}

}  // namespace

int64_t slice_chunks(const LinearScan& scan) {
  const int64_t chunks = std::max<int64_t>(1, choose(scan, true).chunks);
  const int64_t length = (scan.T + chunks - 1) / chunks;
  return (scan.T + length - 1) / length;
}

int64_t slice_map_floats(int64_t H) {
  const int64_t padded = padded_hidden(H);
  return map_floats(padded) + padded;
}

void slice_maps_warp(const LinearScan& scan, int64_t chunks, const SliceMaps& told, const Workspace& workspace,
                     cudaStream_t stream) {
  run_slice_maps(scan, slice_plan(scan, chunks), told, workspace, stream);
}

void slice_replay_warp(const LinearScan& scan, int64_t chunks, float* maps, const int32_t* came, cudaStream_t stream) {
  run_slice_replay(scan, slice_plan(scan, chunks), maps, came, stream);
}

void linear_scan_warp(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return;
  const WarpPlan plan = plan_of(scan);
  check_sizes(scan, plan);
  const int64_t H = padded_hidden(scan.H);
  const int64_t floats = (plan.chunks - 1) * scan.B * map_floats(H) + plan.chunks * scan.B * H;
  void* const memory = plan.chunks > 1 ? workspace(size_t(floats) * sizeof(float)) : nullptr;
  with_element<__half, __nv_bfloat16>(scan.dtype,
                                      [&]<typename T>(T*) { run_linear_scan_warp<T>(scan, plan, memory, stream); });
}

}  // namespace weft::scan
