// linear_scan_readout of complex numbers.
#include "scan/readout/cuda/readout_launch.cuh"

namespace weft::scan {

void readout_complex(const ReadOut& problem, cudaStream_t stream) {
  problem.dtype == DType::c64 ? launch_readout<Complex<float>>(problem, stream)
                              : launch_readout<Complex<double>>(problem, stream);
}

void readout_complex_gradients(const ReadOutGradients& problem, cudaStream_t stream) {
  problem.scan.dtype == DType::c64 ? launch_readout_gradients<Complex<float>>(problem, stream)
                                   : launch_readout_gradients<Complex<double>>(problem, stream);
}

}  // namespace weft::scan
