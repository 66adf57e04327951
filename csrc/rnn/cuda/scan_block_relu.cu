// scan_rnn's chain for middle H and one kind of cell; a file each, so that they compile side by side.
#include "rnn/cuda/scan_block.cuh"

namespace weft::scan_rnn {

void relu_middle(const ScanRnnShape& shape, const ScanRnnChain<float>& args, Middle p, cudaStream_t stream) {
  launch_cell<Cell::kRnnRelu>(shape, args, p, stream);
}

}  // namespace weft::scan_rnn
