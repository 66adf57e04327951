// H that the CUDA kernels of backward="scan" hold. Torch-free.
#pragma once
#include "rnn/cells/cell.h"

namespace weft::rnn {

// Where a warp holds a chunk, and a sequence in the forward pass; all that the scan holds in double.
constexpr int kWarpHidden = 32;

// Where a block holds a chunk, in float.
constexpr int scan_max_hidden(Cell cell) {
  return cell == Cell::kLstm ? 64 : 128;
}

}  // namespace weft::rnn
