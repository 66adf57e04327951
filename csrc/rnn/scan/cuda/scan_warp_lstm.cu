// The forward pass and the scan by warps for one kind of cell; a file each, so that they compile side by side.
#include "rnn/scan/cuda/scan_warp.cuh"

namespace weft::rnn {

template <typename scalar>
void lstm_forward(const ScanShape& shape, const WarpForward<scalar>& args, cudaStream_t stream) {
  dispatch_hidden<ForCell<Cell::kLstm>::template Forward>(shape.H, shape, args, stream);
}

template <typename scalar>
void lstm_chain(const ScanShape& shape, const ScanChain<scalar>& args, int chunks, cudaStream_t stream) {
  dispatch_hidden<ForCell<Cell::kLstm>::template Chain>(shape.H, shape, args, chunks, stream);
}

template void lstm_forward(const ScanShape&, const WarpForward<float>&, cudaStream_t);
template void lstm_forward(const ScanShape&, const WarpForward<double>&, cudaStream_t);
template void lstm_chain(const ScanShape&, const ScanChain<float>&, int, cudaStream_t);
template void lstm_chain(const ScanShape&, const ScanChain<double>&, int, cudaStream_t);

}  // namespace weft::rnn
