// Which chunks, ring and kernels a dense scan with kWarpMaxH < H <= kBlockMaxH gets.
#include <algorithm>
#include <cstdlib>

#include "common/cuda/device_costs.h"
#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/linear/cuda/block.h"

namespace weft::scan {
namespace block {
namespace {

// Microseconds. The model only has to rank the numbers of chunks, of which times near the best one are flat.
struct BlockCosts {
  double megabyte;                          // reading A in replay, all SMs
  double replay_step, replay_megaelement;   // one step of one block beside its arithmetic; what it multiplies
  double piece;                             // one round of the block's copies in pieces of less than 16 bytes
  double product_step, product_megafma;     // one step of (1) for H <= 64 beside its arithmetic, of two blocks together
  double wide_product_step;                 // for H > 64, where a block has an SM for itself
  double wide_product_byte;                 // for every byte of an element: the feeders wait for the step's A
  double wide_product_megafma;              // bf16 multiply-adds of one SM, as above
  double boundary_step, boundary_megabyte;  // one chunk in (2) beside what the bytes of P cost
  double launches;                          // two more kernels, and the start of a chunk in each
  double transposed_replay;                 // against the matrix as it lies in memory
  double replay_share;                      // of a step that blocks on one SM do not overlap

  explicit BlockCosts(const costs::Costs& all) {
    const costs::Table& of = all.table("scan.linear_block");
    megabyte = of("megabyte");
    replay_step = of("replay_step"), replay_megaelement = of("replay_megaelement"), piece = of("piece");
    product_step = of("product_step"), product_megafma = of("product_megafma");
    wide_product_step = of("wide_product_step"), wide_product_byte = of("wide_product_byte");
    wide_product_megafma = of("wide_product_megafma");
    boundary_step = of("boundary_step"), boundary_megabyte = of("boundary_megabyte");
    launches = of("launches");
    transposed_replay = of("transposed_replay"), replay_share = of("replay_share");
  }
};
constexpr int64_t kShortestChunk = 4;

constexpr int64_t kReserved = 1024;  // shared memory that the device keeps per block

struct Shape {
  int64_t batch, steps, H;
  DType dtype;
  bool transposed;
  int piece, sm_count;
};

double replay_time(const Shape& s, int64_t chunks) {
  const auto& costs = costs_here<BlockCosts>();
  const double bytes = double(s.H) * s.H * element_size(s.dtype);
  const double all = 1e-6 * s.batch * s.steps * bytes * costs.megabyte;
  double step = costs.replay_step + 1e-6 * s.H * s.H * costs.replay_megaelement;
  if (s.transposed) step *= costs.transposed_replay;
  if (s.piece < 16) step += costs.piece * bytes / (s.piece * kReplayThreads);
  const double blocks = double(ceil_div(s.batch * chunks, s.sm_count));
  return std::max(all, step * (1 + costs.replay_share * (blocks - 1)) * ceil_div(s.steps, chunks));
}

double products_time(const Shape& s, int64_t chunks, int splits) {
  const auto& costs = costs_here<BlockCosts>();
  const int64_t k = ceil_div(s.H, 16) * 16, n = ceil_div(s.H, 32) * 32;
  const double products = s.dtype == DType::f32 ? 6 : s.dtype == DType::f16 ? 5 : 3;
  const int64_t per_sm = ceil_div(s.batch * (chunks - 1) * splits, s.sm_count);
  // For H <= 64 four warps of 16 columns keep an SM's four tensor cores busy, fewer take as long.
  const double step = s.H <= 64 ? costs.product_step * ceil_div(per_sm, 2) +
                                      1e-6 * products * k * n * 64 * costs.product_megafma * per_sm
                                : (costs.wide_product_step + costs.wide_product_byte * element_size(s.dtype) +
                                   1e-6 * products * k * n * k / splits * costs.wide_product_megafma) *
                                      per_sm;
  return ceil_div(s.steps, chunks) * step;
}

Stages stages_of(const Shape& s, int64_t chunks, int splits) {
  Stages stages;
  stages.replay = replay_time(s, chunks);
  if (chunks == 1) return stages;
  const auto& costs = costs_here<BlockCosts>();
  const double boundary = costs.boundary_step + 4e-6 * s.H * s.H * costs.boundary_megabyte;
  stages.launches = costs.launches;
  stages.products = products_time(s, chunks, splits);
  stages.boundaries = double(chunks - 1) * boundary * double(ceil_div(s.batch, s.sm_count));
  return stages;
}

void choose_chunks(const Shape& s, Arguments& p) {
  p.chunks = 1;
  double best = stages_of(s, 1, 1).us();
  // The best number fills the SMs a whole number of times, or is small because (2) is sequential in it.
  const int64_t most = s.steps / kShortestChunk;
  auto consider = [&](int64_t chunks) {
    if (chunks < 2 || chunks > most) return;
    chunks = ceil_div(s.steps, ceil_div(s.steps, chunks));
    for (int splits = 1; splits <= 2; ++splits) {
      const double time = stages_of(s, chunks, splits).us();
      if (time < best) {
        best = time;
        p.chunks = chunks;
        p.splits = splits;
      }
    }
  };
  for (int64_t waves = 1; waves <= 16; ++waves) {
    consider(waves * s.sm_count / s.batch);
    consider(waves * s.sm_count / s.batch + 1);
    consider(waves * s.sm_count / s.batch / 2 + 1);
  }
  for (int64_t chunks = 2; chunks <= 4 * s.sm_count; chunks += std::max<int64_t>(1, chunks / 8)) consider(chunks);
}

// Shared memory of replay beside its ring, as ReplayMemory lays it out.
int64_t replay_fixed_bytes(int64_t padded, size_t element, int64_t stages) {
  const int64_t state = element == 8 ? 8 : 4;
  return 2 * padded * state + kReplayThreads * (16 / int64_t(element)) * state + kMaxStages * 8 +
         stages * (padded * int64_t(element) + 16);
}

// Shared memory of (1), as ProductMemory lays it out.
int64_t product_shared_bytes(int64_t padded, DType dtype) {
  const int64_t planes = dtype == DType::f32 ? 3 : dtype == DType::f16 ? 2 : 1, at_once = padded == 64 ? 2 : 1;
  return 4 * planes * padded * (padded + 8) + 4 * (2 * padded + 4 * at_once * padded + 8);
}

Shape shape_of(const LinearScan& scan, const Arguments& p) {
  return {p.batch, p.steps, p.H, scan.dtype, scan.A_col != 1, p.piece, device_limits().sm_count};
}

}  // namespace

Arguments plan(const LinearScan& scan, int64_t chunks) {
  const DeviceLimits& limits = device_limits();
  const size_t element = element_size(scan.dtype);
  const bool transposed = scan.A_col != 1;
  Arguments p{};
  p.A = scan.A, p.b = scan.b, p.x0 = scan.x0, p.out = scan.out;
  p.A_t = scan.A_t, p.A_b = scan.A_b, p.A_ld = transposed ? scan.A_col : scan.A_row;
  p.b_t = scan.b_t, p.b_b = scan.b_b, p.x0_b = scan.x0_b, p.out_t = scan.out_t, p.out_b = scan.out_b;
  p.H = int(scan.H);
  p.padded = p.H <= 64 ? 64 : p.H <= 96 ? 96 : 128;
  p.batch = scan.B;
  p.first = scan.x0 ? 0 : 1;
  p.steps = scan.T - p.first;

  auto divides = [&](int64_t piece) {
    auto multiple = [&](int64_t elements) { return elements * int64_t(element) % piece == 0; };
    return reinterpret_cast<uintptr_t>(scan.A) % piece == 0 && multiple(p.A_t) && multiple(p.A_b) && multiple(p.A_ld) &&
           multiple(p.H);
  };
  p.piece = 16;
  while (p.piece > int(element) && !divides(p.piece)) p.piece /= 2;
  p.flat = p.piece == 16 && p.A_ld == p.H;

  p.splits = 1;
  const Shape shape = shape_of(scan, p);
  if (chunks > 0) {
    p.chunks = chunks;
  } else if (scan.dtype == DType::f64 || product_shared_bytes(p.padded, scan.dtype) > limits.max_shared_per_block) {
    p.chunks = 1;  // (1) has no fp64 kernel; for fp32 and H > 96 it needs Hopper's shared memory
  } else {
    choose_chunks(shape, p);
  }
  p.length = std::max<int64_t>(ceil_div(p.steps, p.chunks), 1);
  p.chunks = std::max<int64_t>(ceil_div(p.steps, p.length), 1);

  // Three stages at least, in parts of A[t] if need be. Then as many blocks on an SM as there are, up to three, and
  // within that a deep ring.
  const int64_t row = ceil_div(p.H * int64_t(element), 16) * 16, budget = limits.max_shared_per_block;
  auto bytes = [&](int64_t stages, int64_t rows) {
    return stages * rows * row + replay_fixed_bytes(p.padded, element, stages);
  };
  int64_t parts = 1;
  while (bytes(3, ceil_div(p.H, parts)) > budget) ++parts;
  p.tile_rows = int(ceil_div(p.H, parts));
  int64_t blocks = std::clamp<int64_t>(ceil_div(p.batch * p.chunks, limits.sm_count), 1, 3);
  while (blocks > 1 && bytes(3, p.tile_rows) > (budget + kReserved) / blocks - kReserved) --blocks;
  int64_t stages = 3;
  while (stages < kMaxStages && bytes(stages + 1, p.tile_rows) <= (budget + kReserved) / blocks - kReserved) ++stages;
  p.stages = int(stages);
  p.copy_engine = limits.compute_capability >= 90;
  p.bulk = p.flat && p.copy_engine;
  const int64_t state = scan.dtype == DType::f64 ? 8 : 4;
  const int64_t product = int64_t(p.H) * p.padded * state, beside = bytes(stages, 0) + 2 * p.padded * state + 256;
  p.map_stages = 3 * product + beside <= budget ? 3 : 2;
  return p;
}

}  // namespace block

Expected expected_block(const LinearScan& scan) {
  const block::Arguments p = block::plan(scan);
  return {p.chunks, block::stages_of(block::shape_of(scan, p), p.chunks, p.splits)};
}

void linear_scan_block(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  if (scan.T == 0 || scan.B == 0) return;
  block::Arguments p = block::plan(scan);
  if (p.chunks > 1) p.workspace = workspace(size_t(p.workspace_size()) * (scan.dtype == DType::f64 ? 8 : 4));
  const bool transposed = scan.A_col != 1;
  switch (scan.dtype) {
    case DType::f16:
      return block::run_f16(p, transposed, stream);
    case DType::bf16:
      return block::run_bf16(p, transposed, stream);
    case DType::f32:
      return block::run_f32(p, transposed, stream);
    case DType::f64:
      return block::run_f64(p, transposed, stream);
  }
}

}  // namespace weft::scan
