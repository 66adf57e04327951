// Launches of algorithm "newton" for H <= 32: into how many chunks, and the kernel of a cell and a padded H.
#include "rnn/newton/cuda/newton_warp.cuh"

#include <algorithm>
#include <string>

#include "common/cuda/device_costs.h"
#include "common/launch.cuh"
#include "rnn/newton/forced.h"
#include "scan/linear/cuda/padding.h"

namespace weft::rnn {
namespace {

// One block suffices the compiler, which else saves registers by loading the state in pieces that wait for each other.
template <Cell cell, int HP, typename scalar>
__global__ void __launch_bounds__(kWarp, 1) newton_kernel(ScanShape shape, WarpForward<scalar> a, NewtonWarps warps) {
  __shared__ typename ChunkWalk<cell, HP, scalar>::Shared shared;
  walk_chunk<cell, HP, scalar>(shape, a, warps, shared);
}

constexpr const char* kName = "rnn_newton_warps";

// f.template operator()<cell, HP>() of a shape whose cell has a scan.
template <typename F>
void with_sizes(const ScanShape& shape, const F& f) {
  with_cell(shape.cell, [&]<Cell cell>() {
    if constexpr (scan_max_hidden(cell) > 0) {
      switch (scan::padded_hidden(shape.H)) {
        case 8:
          return f.template operator()<cell, 8>();
        case 16:
          return f.template operator()<cell, 16>();
        case 20:
          return f.template operator()<cell, 20>();
        case 24:
          return f.template operator()<cell, 24>();
        default:
          return f.template operator()<cell, 32>();
      }
    }
  });
}

// Walkers that a multiprocessor has at best, and the fewest steps of a chunk.
struct NewtonCosts {
  double walkers, shortest[kCellCount];
  explicit NewtonCosts(const costs::Costs& all) : walkers(all.table("rnn.newton")("walkers")) {
    for (int cell = 0; cell < kCellCount; ++cell)
      shortest[cell] = all.table(std::string("rnn.newton.") + kCells[cell].costs)("shortest");
  }
};

template <typename scalar>
int64_t resident(const ScanShape& shape) {
  int64_t blocks = 0;
  with_sizes(shape, [&]<Cell cell, int HP>() {
    blocks = resident_blocks(kName, newton_kernel<cell, HP, scalar>, dim3(kWarp), 0);
  });
  return blocks;
}

template <typename scalar>
void forward(const ScanShape& shape, const WarpForward<scalar>& args, const NewtonWarps& warps, cudaStream_t stream) {
  with_sizes(shape, [&]<Cell cell, int HP>() {
    launch_cooperative(kName, newton_kernel<cell, HP, scalar>, warps.chunks.count * shape.B, dim3(kWarp), 0, stream,
                       shape, args, warps);
  });
}

}  // namespace

TimeChunks newton_chunks(const ScanShape& shape, int scalar_bytes) {
  const int64_t at_once = scalar_bytes == 4 ? resident<float>(shape) : resident<double>(shape);
  if (const auto forced = forced_chunks())
    return cut_time(shape.T, std::min({*forced, at_once / shape.B, kMostChunks}));
  const auto& costs = costs_here<NewtonCosts>();
  const auto walkers = std::min({at_once, int64_t(costs.walkers * device_limits().sm_count), kMostChunks * shape.B});
  return choose_chunks(shape.T, shape.B, walkers, int64_t(costs.shortest[int(shape.cell)]));
}

int64_t newton_messages(const ScanShape& shape, const TimeChunks& chunks, int scalar_bytes) {
  int64_t count = 0;
  with_sizes(shape, [&]<Cell cell, int HP>() {
    count = scalar_bytes == 4 ? Messages<cell, HP, float>::count(chunks.count)
                              : Messages<cell, HP, double>::count(chunks.count);
  });
  return shape.B * count;
}

void newton_forward(const ScanShape& shape, const WarpForward<float>& args, const NewtonWarps& warps,
                    cudaStream_t stream) {
  forward(shape, args, warps, stream);
}

void newton_forward(const ScanShape& shape, const WarpForward<double>& args, const NewtonWarps& warps,
                    cudaStream_t stream) {
  forward(shape, args, warps, stream);
}

}  // namespace weft::rnn
