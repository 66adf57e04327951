// Entry points of the scan's CUDA kernels: the number of chunks, the workspace, and the way to the cell's own file.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "common/launch.cuh"
#include "rnn/cuda/scan_block.h"
#include "rnn/cuda/scan_kernels.h"
#include "scan/cuda/padding.h"
#include "scan/cuda/warp_chunks.h"

namespace weft::rnn {

#define WEFT_DECLARE_CELL(name)                                                    \
  template <typename scalar>                                                       \
  void name##_forward(const ScanShape&, const WarpForward<scalar>&, cudaStream_t); \
  template <typename scalar>                                                       \
  void name##_chain(const ScanShape&, const ScanChain<scalar>&, int, cudaStream_t);
WEFT_DECLARE_CELL(tanh)
WEFT_DECLARE_CELL(relu)
WEFT_DECLARE_CELL(gru)
WEFT_DECLARE_CELL(lstm)
#undef WEFT_DECLARE_CELL

namespace {

template <typename scalar>
void forward(const ScanShape& shape, const WarpForward<scalar>& args, cudaStream_t stream) {
  switch (shape.cell) {
    case Cell::kGru:
      return gru_forward(shape, args, stream);
    case Cell::kLstm:
      return lstm_forward(shape, args, stream);
    case Cell::kRnnRelu:
      return relu_forward(shape, args, stream);
    case Cell::kRnnTanh:
      return tanh_forward(shape, args, stream);
  }
}

template <typename scalar>
void chain(const ScanShape& shape, const ScanChain<scalar>& args, int chunks, cudaStream_t stream) {
  switch (shape.cell) {
    case Cell::kGru:
      return gru_chain(shape, args, chunks, stream);
    case Cell::kLstm:
      return lstm_chain(shape, args, chunks, stream);
    case Cell::kRnnRelu:
      return relu_chain(shape, args, chunks, stream);
    case Cell::kRnnTanh:
      return tanh_chain(shape, args, chunks, stream);
  }
}

// Microseconds on an H200: a chunk at the boundary; a step of the product where a scheduler has one block, and for each
// of several; a step of the replay, likewise; blocks of the product per (chunk, batch), and how many of them a
// scheduler holds at once.
struct Costs {
  double boundary, product, product_each, replay, replay_each, blocks_per_pair;
  int resident;
};

const Costs& costs(const ScanShape& shape) {
  // By padded H: 8, 16, 20, 24, 32.
  static constexpr Costs kRnn[] = {{0.11, 0.67, 0.28, 0.12, 0.050, 1 / 7.0, 4},
                                   {0.18, 0.83, 0.52, 0.13, 0.060, 1 / 3.0, 3},
                                   {0.19, 0.92, 0.67, 0.14, 0.062, 1 / 3.0, 2},
                                   {0.22, 0.52, 0.35, 0.20, 0.070, 1, 4},
                                   {0.24, 0.83, 0.75, 0.24, 0.083, 1, 2}};
  static constexpr Costs kGru[] = {{0.11, 0.28, 0.12, 0.27, 0.11, 1, 8},
                                   {0.19, 0.46, 0.28, 0.33, 0.14, 1, 4},
                                   {0.19, 0.60, 0.46, 0.25, 0.16, 1, 2},
                                   {0.22, 0.63, 0.48, 0.33, 0.18, 1, 2},
                                   {0.23, 1.12, 0.98, 0.40, 0.20, 1, 2}};
  static constexpr Costs kLstm[] = {{0.22, 0.46, 0.23, 0.27, 0.13, 1, 6},
                                    {0.32, 0.88, 0.66, 0.33, 0.17, 1, 3},
                                    {0.33, 1.30, 1.10, 0.29, 0.20, 1, 2},
                                    {0.44, 1.05, 0.87, 0.33, 0.23, 2, 2},
                                    {0.48, 1.62, 1.40, 0.35, 0.27, 3, 2}};
  const int size = scan::hidden_size_index(shape.H);
  return shape.cell == Cell::kGru ? kGru[size] : shape.cell == Cell::kLstm ? kLstm[size] : kRnn[size];
}

constexpr int64_t kMostChunks = 4096;

}  // namespace

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
  const auto& cost = costs(shape);
  const double warps = scan::schedulers();
  auto time = [&](int64_t count) {
    const double length = double((shape.T + count - 1) / count), pairs = double(count) * shape.B;
    const double replay = length * scan::step_time(pairs, warps, cost.replay, cost.replay_each, 16);
    if (count == 1) return replay;
    const double blocks = std::ceil((pairs - shape.B) * cost.blocks_per_pair);
    return scan::kChunkedOverhead + replay + count * cost.boundary +
           length * scan::step_time(blocks, warps, cost.product, cost.product_each, cost.resident);
  };
  const int64_t most = std::min<int64_t>(shape.T / 4, kMostChunks);
  return int(scan::cheapest_chunks(most, shape.B, warps, cost.blocks_per_pair, time));
}

int64_t scan_chain_workspace(const ScanShape& shape, int chunks) {
  if (shape.H > kWarpHidden) return block_workspace(shape, chunks);
  if (chunks <= 1) return 0;
  // Per chunk and batch a map and the gradient entering it.
  const int64_t S = (shape.cell == Cell::kLstm ? 2 : 1) * scan::padded_hidden(shape.H);
  const int64_t floats = scan::map_floats(S) + S;
  return int64_t(chunks) * shape.B * floats * int64_t(sizeof(float));
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
