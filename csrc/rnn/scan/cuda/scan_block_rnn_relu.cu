// The scan by blocks of one cell; a file each, so that they compile side by side.
#include "rnn/scan/cuda/scan_block.cuh"

template void weft::rnn::cell_block<weft::rnn::Cell::kRnnRelu>(const ScanShape&, const ScanChain<float>&, BlockGeometry,
                                                               cudaStream_t);
