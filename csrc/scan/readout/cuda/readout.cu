// linear_scan_readout of float and double; other element types have files of their own.
#include "scan/readout/cuda/readout_launch.cuh"

namespace weft::scan {

void readout(const ReadOut& problem, cudaStream_t stream) {
  if (is_half(problem.dtype)) return readout_half(problem, stream);
  if (is_complex(problem.dtype)) return readout_complex(problem, stream);
  problem.dtype == DType::f32 ? launch_readout<float>(problem, stream) : launch_readout<double>(problem, stream);
}

void readout_gradients(const ReadOutGradients& problem, cudaStream_t stream) {
  const DType dtype = problem.scan.dtype;
  if (is_half(dtype)) return readout_half_gradients(problem, stream);
  if (is_complex(dtype)) return readout_complex_gradients(problem, stream);
  dtype == DType::f32 ? launch_readout_gradients<float>(problem, stream)
                      : launch_readout_gradients<double>(problem, stream);
}

}  // namespace weft::scan
