// linear_scan_readout on CUDA, by pointers and a stream: no torch header. No size is 0. They throw std::runtime_error
// where a launch fails.
#pragma once
#include <cuda_runtime_api.h>

#include "scan/readout/readout_args.h"

namespace weft::scan {

constexpr int64_t kReadOutMaxN = 128;

void readout(const ReadOut& problem, cudaStream_t stream);
void readout_gradients(const ReadOutGradients& problem, cudaStream_t stream);

}  // namespace weft::scan
