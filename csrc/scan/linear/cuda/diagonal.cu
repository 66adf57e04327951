// The diagonal scan and its gradients of real numbers; diagonal_complex.cu has those of complex ones.
#include "scan/linear/cuda/diagonal_complex.h"
#include "scan/linear/cuda/diagonal_launch.cuh"

namespace weft::scan {
namespace {

template <bool kGradients>
void run_any(const DiagonalGradients& g, const Workspace& workspace, cudaStream_t stream) {
  if (g.scan.T == 0 || g.scan.B == 0 || g.scan.H == 0) return;
  switch (g.scan.dtype) {
    case DType::f16:
      return run<__half, kGradients>(g, workspace, stream);
    case DType::bf16:
      return run<__nv_bfloat16, kGradients>(g, workspace, stream);
    case DType::f32:
      return run<float, kGradients>(g, workspace, stream);
    case DType::f64:
      return run<double, kGradients>(g, workspace, stream);
    case DType::c64:
    case DType::c128:
      return linear_scan_diagonal_complex(g, kGradients, workspace, stream);
  }
}

}  // namespace

void linear_scan_diagonal(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  DiagonalGradients forward{};
  forward.scan = scan;
  run_any<false>(forward, workspace, stream);
}

void linear_scan_diagonal_gradients(const DiagonalGradients& problem, const Workspace& workspace, cudaStream_t stream) {
  run_any<true>(problem, workspace, stream);
}

}  // namespace weft::scan
