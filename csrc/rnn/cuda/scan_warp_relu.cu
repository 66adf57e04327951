// scan_rnn's kernels for one kind of cell; a file each, so that they compile side by side.
#include "rnn/cuda/scan_warp.cuh"

namespace weft {
namespace scan_rnn {

template <typename scalar>
void relu_forward(const ScanRnnShape& shape, const ScanRnnForward<scalar>& args, cudaStream_t stream) {
  dispatch_hidden<ForCell<Cell::kRnnRelu>::template Forward>(shape.H, shape, args, stream);
}

template <typename scalar>
void relu_chain(const ScanRnnShape& shape, const ScanRnnChain<scalar>& args, int chunks, cudaStream_t stream) {
  dispatch_hidden<ForCell<Cell::kRnnRelu>::template Chain>(shape.H, shape, args, chunks, stream);
}

template void relu_forward(const ScanRnnShape&, const ScanRnnForward<float>&, cudaStream_t);
template void relu_forward(const ScanRnnShape&, const ScanRnnForward<double>&, cudaStream_t);
template void relu_chain(const ScanRnnShape&, const ScanRnnChain<float>&, int, cudaStream_t);
template void relu_chain(const ScanRnnShape&, const ScanRnnChain<double>&, int, cudaStream_t);

}  // namespace scan_rnn
}  // namespace weft
