// The diagonal scan of complex numbers, or its gradients: what linear_scan.h says of both. No size is 0.
#pragma once
#include "scan/linear/cuda/linear_scan.h"

namespace weft::scan {

void linear_scan_diagonal_complex(const DiagonalGradients& problem, bool gradients, const Workspace& workspace,
                                  cudaStream_t stream);

}  // namespace weft::scan
