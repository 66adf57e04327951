// H that the CUDA kernels of backward="scan" hold. Torch-free.
#pragma once
namespace weft::rnn {

// Where a warp holds a chunk, and a sequence in the forward pass; all that the scan holds in double.
constexpr int kWarpHidden = 32;

// Where a block holds a chunk, in float: scan_max_hidden of cells.h.

}  // namespace weft::rnn
