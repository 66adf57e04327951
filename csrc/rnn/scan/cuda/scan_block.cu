// The scan where a block holds a chunk: the number of chunks, the workspace, and the way to the cell's own file.
#include "rnn/scan/cuda/scan_block.h"

#include <algorithm>
#include <string>

#include "common/cuda/device_costs.h"
#include "common/integers.h"
#include "common/launch.cuh"

namespace weft::rnn {
namespace {

// Microseconds. The model only has to rank the numbers of chunks, of which times near the best one are flat.
struct BlockCosts {
  double product_step;                           // one step of (1) beside what follows
  double product_megafma, wide_product_megafma;  // bf16 multiply-adds of one SM, for H <= 64 and above
  double feed[kCellCount];                       // what the feeders of a block take for a step of each cell
  double feed_wide, weight_megabyte;             // with W from L2
  double boundary_step, boundary_megabyte;       // one chunk in (2) beside what the bytes of P cost
  double replay_step, replay_megafma;            // one step of one block beside its arithmetic, of one SM
  double launches;                               // three more kernels, and the start of a chunk in each

  explicit BlockCosts(const costs::Costs& all) {
    const costs::Table& of = all.table("rnn.scan_block");
    product_step = of("product_step");
    product_megafma = of("product_megafma"), wide_product_megafma = of("wide_product_megafma");
    for (int cell = 0; cell < kCellCount; ++cell) feed[cell] = of((std::string("feed_") + kCells[cell].costs).c_str());
    feed_wide = of("feed_wide"), weight_megabyte = of("weight_megabyte");
    boundary_step = of("boundary_step"), boundary_megabyte = of("boundary_megabyte");
    replay_step = of("replay_step"), replay_megafma = of("replay_megafma");
    launches = of("launches");
  }
};
constexpr double kReplayResident = 2;  // blocks on an SM whose latencies overlap
constexpr int64_t kShortestChunk = 4;
// The maps take this much memory, or half of what the activations of the gates take where that is more.
constexpr double kMapBytes = 32 << 20;

// Two blocks for every product while that leaves no SM with two of them.
int choose_splits(int64_t products, int sm_count) {
  return 2 * products <= sm_count ? 2 : 1;
}

double replay_time(const ScanShape& shape, int64_t chunks, int sm_count) {
  const auto& costs = costs_here<BlockCosts>();
  const double fmas = 1e-6 * gate_blocks(shape.cell) * shape.H * shape.H * costs.replay_megafma;
  const double blocks = double(ceil_div(shape.B * chunks, sm_count));
  return ceil_div(shape.T, chunks) * (costs.replay_step * std::max(1., blocks / kReplayResident) + fmas * blocks);
}

double products_time(const ScanShape& shape, int64_t chunks, int sm_count) {
  const int64_t H = shape.H, k = ceil_div(H, 16) * 16, n = ceil_div(H, 32) * 32, products = shape.B * (chunks - 1);
  const bool two = has_c(shape.cell), wide = two || H > 64, direct = has_gates(shape.cell) && !two;
  const auto& costs = costs_here<BlockCosts>();
  const int splits = choose_splits(products, sm_count);
  const double blocks = double(ceil_div(products * splits, sm_count));
  const double multiply =
      6e-6 * k * n * k * (two ? 4 : 1) / splits * (wide ? costs.wide_product_megafma : costs.product_megafma);
  const double feed =
      direct && wide ? costs.feed_wide + 12e-6 * H * H * costs.weight_megabyte : costs.feed[int(shape.cell)];
  const double resident = wide ? 1 : 2;
  return ceil_div(shape.T, chunks) *
         (costs.product_step + std::max(multiply * blocks, feed * std::max(1., blocks / resident)));
}

// What BoundariesLayout lays out beside its ring, rounded up.
constexpr int64_t kBoundariesFixed = 8192;

int64_t ring_bytes(const scan::block::Chunked& p, int stages) {
  return int64_t(stages) * p.H * p.padded * int64_t(sizeof(float));
}

}  // namespace

BlockGeometry block_geometry(const ScanShape& shape, int64_t chunks) {
  const DeviceLimits& limits = device_limits();
  BlockGeometry p{};
  p.units = padded_units(shape.H);
  p.padded = states_of(shape.cell) * p.units;
  p.H = has_c(shape.cell) ? p.padded : shape.H;
  p.batch = shape.B;
  p.length = std::max<int64_t>(ceil_div(shape.T, std::max<int64_t>(chunks, 1)), 1);
  p.chunks = std::max<int64_t>(ceil_div(shape.T, p.length), 1);
  p.splits = choose_splits(shape.B * (p.chunks - 1), limits.sm_count);
  p.copy_engine = limits.compute_capability >= 90;
  p.map_stages = ring_bytes(p, 3) + kBoundariesFixed <= limits.max_shared_per_block ? 3 : 2;
  return p;
}

bool block_fits(const ScanShape& shape) {
  const BlockGeometry p = block_geometry(shape, 1);
  const int64_t products = int64_t(product_shared_bytes(shape.cell, p.units)),
                boundaries = ring_bytes(p, 2) + kBoundariesFixed;
  return std::max(products, boundaries) <= device_limits().max_shared_per_block;
}

scan::Stages block_stages(const ScanShape& shape, int64_t chunks) {
  const int sm_count = device_limits().sm_count;
  scan::Stages stages;
  stages.replay = replay_time(shape, chunks, sm_count);
  if (chunks == 1) return stages;
  const auto& costs = costs_here<BlockCosts>();
  const double states = double(states_of(shape.cell)) * shape.H;
  const double boundary = costs.boundary_step + 4e-6 * states * states * costs.boundary_megabyte;
  stages.launches = costs.launches;
  stages.products = products_time(shape, chunks, sm_count);
  stages.boundaries = double(chunks - 1) * boundary * double(ceil_div(shape.B, sm_count));
  return stages;
}

int block_chunks(const ScanShape& shape) {
  if (shape.B == 0 || !block_fits(shape)) return 1;
  const BlockGeometry p = block_geometry(shape, 1);
  const int sm_count = device_limits().sm_count;
  const double gates = 4. * shape.T * shape.B * shape.H * gate_blocks(shape.cell);
  const double map = 4. * shape.B * (p.map_size() + p.padded);
  const int64_t most = std::min<int64_t>(shape.T / kShortestChunk, 1 + int64_t(std::max(kMapBytes, gates / 2) / map));
  int64_t best = 1;
  double best_time = block_stages(shape, 1).us();
  // The best number fills the SMs a whole number of times, or is small because (2) is sequential in it.
  auto consider = [&](int64_t chunks) {
    if (chunks < 2 || chunks > most) return;
    chunks = ceil_div(shape.T, ceil_div(shape.T, chunks));
    const double time = block_stages(shape, chunks).us();
    if (time < best_time) {
      best_time = time;
      best = chunks;
    }
  };
  for (int64_t waves = 1; waves <= 16; ++waves) {
    consider(waves * sm_count / shape.B + 1);
    consider(waves * sm_count / shape.B / 2 + 1);
  }
  for (int64_t chunks = 2; chunks <= 4 * sm_count; chunks += std::max<int64_t>(1, chunks / 8)) consider(chunks);
  return int(best);
}

int64_t block_workspace(const ScanShape& shape, int64_t chunks) {
  const BlockGeometry p = block_geometry(shape, chunks);
  if (p.chunks <= 1) return 0;
  const int64_t weights = int64_t(gate_blocks(shape.cell)) * p.units * p.units;
  return (p.workspace_size() + weights) * int64_t(sizeof(float));
}

void block_chain(const ScanShape& shape, const ScanChain<float>& args, int64_t chunks, cudaStream_t stream) {
  BlockGeometry p = block_geometry(shape, chunks);
  p.workspace = args.workspace;
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) cell_block<cell>(shape, args, p, stream);
  });
}

}  // namespace weft::rnn
