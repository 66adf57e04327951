// Entry points of the scan's CUDA kernels: the number of chunks, the workspace, and the way to the cell's own file.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/cuda/device_costs.h"
#include "common/integers.h"
#include "common/launch.cuh"
#include "rnn/scan/cuda/scan_block.h"
#include "rnn/scan/cuda/scan_kernels.h"
#include "scan/linear/cuda/padding.h"
#include "scan/linear/cuda/warp_chunks.h"

namespace weft::rnn {

// Of one cell, in a file of its own.
template <Cell cell, typename scalar>
void cell_forward(const ScanShape& shape, const WarpForward<scalar>& args, cudaStream_t stream);
template <Cell cell, typename scalar>
void cell_chain(const ScanShape& shape, const ScanChain<scalar>& args, int chunks, cudaStream_t stream);
template <Cell cell>
void cell_slice_maps(const ScanShape& shape, const ScanChain<float>& args, int chunks, const scan::SliceMaps& told,
                     const scan::Workspace& workspace, cudaStream_t stream);
template <Cell cell>
void cell_slice_replay(const ScanShape& shape, const ScanChain<float>& args, int chunks, const float* maps,
                       cudaStream_t stream);

namespace {

template <typename scalar>
void forward(const ScanShape& shape, const WarpForward<scalar>& args, cudaStream_t stream) {
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) cell_forward<cell>(shape, args, stream);
  });
}

template <typename scalar>
void chain(const ScanShape& shape, const ScanChain<scalar>& args, int chunks, cudaStream_t stream) {
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) cell_chain<cell>(shape, args, chunks, stream);
  });
}

// How the products of a padded H are laid out: blocks per (chunk, batch), and how many of them a scheduler holds at
// once. By padded H: 8, 16, 20, 24, 32.
struct Products {
  double blocks_per_pair;
  int resident;
};
constexpr Products kScaledProducts[] = {{1 / 7.0, 4}, {1 / 3.0, 3}, {1 / 3.0, 2}, {1, 4}, {1, 2}};
constexpr Products kDirectProducts[] = {{1, 8}, {1, 4}, {1, 2}, {1, 2}, {1, 2}};
constexpr Products kTwoStateProducts[] = {{1, 6}, {1, 3}, {1, 2}, {2, 2}, {3, 2}};

const Products& products_of(const ScanShape& shape) {
  const int size = scan::hidden_size_index(shape.H);
  return has_c(shape.cell)       ? kTwoStateProducts[size]
         : has_gates(shape.cell) ? kDirectProducts[size]
                                 : kScaledProducts[size];
}

// Microseconds: a chunk at the boundary; a step of the product where a scheduler has one block, and for each of
// several; a step of the replay, likewise.
struct StageCosts {
  double boundary, product, product_each, replay, replay_each;
};

struct WarpCosts {
  double launches;
  StageCosts costs[kCellCount][scan::kHiddenSizes];

  explicit WarpCosts(const costs::Costs& all) : launches(all.table("scan.warp")("launches")) {
    const auto read = [&](const char* cell, StageCosts* into) {
      const costs::Table& table = all.table(std::string("rnn.scan_warp.") + cell);
      for (int i = 0; i < scan::kHiddenSizes; ++i) {
        const auto of = [&](const char* name) { return table.numbers(name).at(i); };
        into[i] = {of("boundary"), of("product"), of("product_each"), of("replay"), of("replay_each")};
      }
    };
    for (int cell = 0; cell < kCellCount; ++cell) read(kCells[cell].costs, costs[cell]);
  }

  const StageCosts& of(const ScanShape& shape) const {
    return costs[int(shape.cell)][scan::hidden_size_index(shape.H)];
  }
};

constexpr int64_t kMostChunks = 4096;

int64_t padded_states(Cell cell, int64_t H) {
  return states_of(cell) * scan::padded_hidden(H);
}

scan::Stages warp_stages(const ScanShape& shape, int64_t chunks, bool of_slice = false) {
  const Products& products = products_of(shape);
  const auto& costs = costs_here<WarpCosts>();
  const StageCosts& cost = costs.of(shape);
  const double warps = scan::schedulers(), length = double(ceil_div(shape.T, chunks));
  const double pairs = double(chunks) * shape.B;
  scan::Stages stages;
  stages.replay = length * scan::step_time(pairs, warps, cost.replay, cost.replay_each, 16);
  if (chunks == 1 && !of_slice) return stages;
  double blocks = std::ceil((pairs - shape.B) * products.blocks_per_pair);
  if (of_slice) blocks += std::ceil(shape.B * products.blocks_per_pair);
  stages.launches = costs.launches;
  stages.products = length * scan::step_time(blocks, warps, cost.product, cost.product_each, products.resident);
  stages.boundaries = double(chunks) * cost.boundary;
  return stages;
}

}  // namespace

scan::Stages scan_stages(const ScanShape& shape, int chunks) {
  return shape.H <= kWarpHidden ? warp_stages(shape, chunks) : block_stages(shape, chunks);
}

int scan_chunks(const ScanShape& shape) {
  const bool small = shape.H <= kWarpHidden;
  // For experiments and tests: this many, whatever the model says.
  if (const char* forced = std::getenv("WEFT_RNN_SCAN_CHUNKS"); forced && *forced) {
    char* end = nullptr;
    const long chunks = std::strtol(forced, &end, 10);
    if (*end != 0 || chunks < 1) throw std::runtime_error("weft: WEFT_RNN_SCAN_CHUNKS must be a positive number");
    const int64_t most = small || block_fits(shape) ? std::clamp<int64_t>(shape.T, 1, kMostChunks) : 1;
    return int(std::min<int64_t>(chunks, most));
  }
  if (shape.T == 0 || shape.B == 0) return 1;
  if (!small) return block_chunks(shape);
  const auto time = [&](int64_t chunks) { return warp_stages(shape, chunks).us(); };
  const int64_t most = std::min<int64_t>(shape.T / 4, kMostChunks);
  return int(scan::cheapest_chunks(most, shape.B, scan::schedulers(), products_of(shape).blocks_per_pair, time));
}

int scan_slice_chunks(const ScanShape& shape) {
  if (const char* forced = std::getenv("WEFT_RNN_SCAN_CHUNKS"); forced && *forced) return scan_chunks(shape);
  // The time goes up in stairs, and the first chunk's maps end them where no rule for a whole looks.
  const int64_t most = std::min<int64_t>(shape.T / 4, kMostChunks);
  int64_t best = 1;
  double least = warp_stages(shape, 1, true).us();
  for (int64_t chunks = 2; chunks <= most; ++chunks) {
    const double time = warp_stages(shape, chunks, true).us();
    if (time < least) best = chunks, least = time;
  }
  return int(best);
}

int64_t scan_chain_workspace(const ScanShape& shape, int chunks) {
  if (shape.H > kWarpHidden) return block_workspace(shape, chunks);
  if (chunks <= 1) return 0;
  return int64_t(chunks) * shape.B * scan_slice_floats(shape.cell, shape.H) * int64_t(sizeof(float));
}

// A map and the gradient entering it.
int64_t scan_slice_floats(Cell cell, int64_t H) {
  const int64_t S = padded_states(cell, H);
  return scan::map_floats(S) + S;
}

int64_t scan_slice_starts(const ScanShape& shape, int chunks) {
  return int64_t(chunks) * shape.B * padded_states(shape.cell, shape.H) * int64_t(sizeof(float));
}

void scan_slice_maps(const ScanShape& shape, const ScanChain<float>& args, int chunks, const scan::SliceMaps& told,
                     const scan::Workspace& workspace, cudaStream_t stream) {
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) cell_slice_maps<cell>(shape, args, chunks, told, workspace, stream);
  });
}

void scan_slice_replay(const ScanShape& shape, const ScanChain<float>& args, int chunks, const float* maps,
                       cudaStream_t stream) {
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) cell_slice_replay<cell>(shape, args, chunks, maps, stream);
  });
}

void warp_forward(const ScanShape& shape, const WarpForward<float>& args, cudaStream_t stream) {
  forward(shape, args, stream);
}

void warp_forward(const ScanShape& shape, const WarpForward<double>& args, cudaStream_t stream) {
  forward(shape, args, stream);
}

void scan_chain(const ScanShape& shape, const ScanChain<float>& args, int chunks, cudaStream_t stream) {
  if (shape.H > kWarpHidden) return block_chain(shape, args, chunks, stream);
  chain(shape, args, chunks, stream);
}

void scan_chain(const ScanShape& shape, const ScanChain<double>& args, int, cudaStream_t stream) {
  chain(shape, args, 1, stream);
}

}  // namespace weft::rnn
