// The scan by blocks for one kind of cell; a file each, so that they compile side by side.
#include "rnn/scan/cuda/scan_block.cuh"

namespace weft::rnn {

void tanh_block(const ScanShape& shape, const ScanChain<float>& args, BlockGeometry p, cudaStream_t stream) {
  launch_cell<Cell::kRnnTanh>(shape, args, p, stream);
}

}  // namespace weft::rnn
