// Entry points of scan_rnn's CUDA kernels: the number of chunks, the workspace, and the way to the cell's own file.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "common/launch.cuh"
#include "scan/cuda/padding.h"
#include "scan/cuda/scan_rnn.h"
#include "scan/cuda/scan_rnn_middle.h"

namespace weft {
namespace scan_rnn {

#define WEFT_DECLARE_CELL(name)                                                          \
  template <typename scalar>                                                             \
  void name##_forward(const ScanRnnShape&, const ScanRnnForward<scalar>&, cudaStream_t); \
  template <typename scalar>                                                             \
  void name##_chain(const ScanRnnShape&, const ScanRnnChain<scalar>&, int, cudaStream_t);
WEFT_DECLARE_CELL(tanh)
WEFT_DECLARE_CELL(relu)
WEFT_DECLARE_CELL(gru)
WEFT_DECLARE_CELL(lstm)
#undef WEFT_DECLARE_CELL

namespace {

template <typename scalar>
void forward(const ScanRnnShape& shape, const ScanRnnForward<scalar>& args, cudaStream_t stream) {
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
void chain(const ScanRnnShape& shape, const ScanRnnChain<scalar>& args, int chunks, cudaStream_t stream) {
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

// Microseconds on an H200 at H = 20: a step of a replaying warp, alone and per (chunk, batch) where the chip is full; a
// chunk at the boundary; a step of the chunk product, likewise.
struct Costs {
  double replay, replay_full, boundary, product, product_full;
};

Costs costs(const ScanRnnShape& shape) {
  const double h = shape.H / 20.0;
  switch (shape.cell) {
    case Cell::kGru:
      return {0.20, 6.2e-4, 0.25, 0.75 * h * h, 1.1e-3 * h * h * h};
    case Cell::kLstm:
      return {0.24, 6.5e-4, 0.44, 1.45 * h * h, 2.1e-3 * h * h * h};
    default:
      return {0.12, 2.0e-4, 0.25, 1.35 * h * h, 5.5e-4 * h * h * h};
  }
}

// What the two further launches of a chunked chain cost where nothing hides them.
constexpr double kChunkedOverhead = 6;

}  // namespace
}  // namespace scan_rnn

int scan_rnn_chunks(const ScanRnnShape& shape) {
  const bool small = shape.H <= kScanRnnSmallHidden;
  // For tests: this many, whatever the model says.
  if (const char* forced = std::getenv("WEFT_SCAN_RNN_CHUNKS")) {
    const int64_t most = small || scan_rnn::middle_fits(shape) ? std::max<int64_t>(shape.T, 1) : 1;
    return int(std::clamp<int64_t>(std::atoi(forced), 1, most));
  }
  if (!small) return scan_rnn::middle_chunks(shape);
  const auto cost = scan_rnn::costs(shape);
  const double full = 132.0 / device_limits().sm_count;
  auto time = [&](int64_t count) {
    const double length = double((shape.T + count - 1) / count), pairs = double(count) * shape.B;
    const double replay = length * std::max(cost.replay, pairs * cost.replay_full * full);
    if (count == 1) return replay;
    return scan_rnn::kChunkedOverhead + replay + count * cost.boundary +
           length * std::max(cost.product, pairs * cost.product_full * full);
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= std::min<int64_t>(shape.T / 4, 4096); count += std::max<int64_t>(1, count / 8)) {
    if (time(count) < time(best)) best = count;
  }
  return int(best);
}

int64_t scan_rnn_chain_workspace(const ScanRnnShape& shape, int chunks) {
  if (shape.H > kScanRnnSmallHidden) return scan_rnn::middle_workspace(shape, chunks);
  if (chunks <= 1) return 0;
  // Per chunk and batch a map and the gradient entering it.
  const int64_t S = (shape.cell == Cell::kLstm ? 2 : 1) * padded_hidden(shape.H);
  const int64_t floats = map_floats(S) + S;
  return int64_t(chunks) * shape.B * floats * int64_t(sizeof(float));
}

void scan_rnn_forward(const ScanRnnShape& shape, const ScanRnnForward<float>& args, cudaStream_t stream) {
  scan_rnn::forward(shape, args, stream);
}

void scan_rnn_forward(const ScanRnnShape& shape, const ScanRnnForward<double>& args, cudaStream_t stream) {
  scan_rnn::forward(shape, args, stream);
}

void scan_rnn_chain(const ScanRnnShape& shape, const ScanRnnChain<float>& args, int chunks, cudaStream_t stream) {
  if (shape.H > kScanRnnSmallHidden) return scan_rnn::middle_chain(shape, args, chunks, stream);
  scan_rnn::chain(shape, args, chunks, stream);
}

void scan_rnn_chain(const ScanRnnShape& shape, const ScanRnnChain<double>& args, int, cudaStream_t stream) {
  scan_rnn::chain(shape, args, 1, stream);
}

}  // namespace weft
