// linear_scan_readout of half types.
#include "scan/readout/cuda/readout_launch.cuh"

namespace weft::scan {

void readout_half(const ReadOut& problem, cudaStream_t stream) {
  problem.dtype == DType::f16 ? launch_readout<__half>(problem, stream)
                              : launch_readout<__nv_bfloat16>(problem, stream);
}

void readout_half_gradients(const ReadOutGradients& problem, cudaStream_t stream) {
  problem.scan.dtype == DType::f16 ? launch_readout_gradients<__half>(problem, stream)
                                   : launch_readout_gradients<__nv_bfloat16>(problem, stream);
}

}  // namespace weft::scan
