// linear_scan_readout of float and double; other element types have files of their own.
#include "scan/readout/cuda/readout_launch.cuh"

namespace weft::scan {

void readout(const ReadOut& problem, cudaStream_t stream) {
  switch (problem.dtype) {
    case DType::f16:
    case DType::bf16:
      return readout_half(problem, stream);
    case DType::f32:
      return launch_readout<float>(problem, stream);
    case DType::f64:
      return launch_readout<double>(problem, stream);
    default:
      return readout_complex(problem, stream);
  }
}

void readout_gradients(const ReadOutGradients& problem, cudaStream_t stream) {
  switch (problem.scan.dtype) {
    case DType::f16:
    case DType::bf16:
      return readout_half_gradients(problem, stream);
    case DType::f32:
      return launch_readout_gradients<float>(problem, stream);
    case DType::f64:
      return launch_readout_gradients<double>(problem, stream);
    default:
      return readout_complex_gradients(problem, stream);
  }
}

}  // namespace weft::scan
