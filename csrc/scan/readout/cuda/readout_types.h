// Which file has the kernels of which element type.
#pragma once
#include "scan/readout/cuda/readout.h"

namespace weft::scan {

void readout_half(const ReadOut& problem, cudaStream_t stream);
void readout_half_gradients(const ReadOutGradients& problem, cudaStream_t stream);
void readout_complex(const ReadOut& problem, cudaStream_t stream);
void readout_complex_gradients(const ReadOutGradients& problem, cudaStream_t stream);

}  // namespace weft::scan
