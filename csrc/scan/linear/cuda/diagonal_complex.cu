// The diagonal scan and its gradients of complex numbers.
#include "scan/linear/cuda/diagonal_complex.h"

#include "scan/linear/cuda/diagonal_launch.cuh"

namespace weft::scan {

void linear_scan_diagonal_complex(const DiagonalGradients& problem, bool gradients, const Workspace& workspace,
                                  cudaStream_t stream) {
  const auto run_of = [&]<typename T>() {
    gradients ? run<T, true>(problem, workspace, stream) : run<T, false>(problem, workspace, stream);
  };
  if (problem.scan.dtype == DType::c64) {
    run_of.template operator()<Complex<float>>();
  } else {
    run_of.template operator()<Complex<double>>();
  }
}

}  // namespace weft::scan
