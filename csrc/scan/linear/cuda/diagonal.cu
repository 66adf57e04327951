// The diagonal scan and its gradients of real numbers; diagonal_complex.cu has those of complex ones.
#include "scan/linear/cuda/diagonal_complex.h"
#include "scan/linear/cuda/diagonal_launch.cuh"
#include "scan/linear/cuda/diagonal_told.h"

namespace weft::scan {
namespace {

template <bool kGradients>
void run_any(const DiagonalGradients& g, const Workspace& workspace, cudaStream_t stream) {
  if (g.scan.T == 0 || g.scan.B == 0 || g.scan.H == 0) return;
  if (is_complex(g.scan.dtype)) return linear_scan_diagonal_complex(g, kGradients, workspace, stream);
  with_element<__half, __nv_bfloat16>(g.scan.dtype, [&]<typename T>(T*) { run<T, kGradients>(g, workspace, stream); });
}

}  // namespace

bool linear_scan_diagonal_told(const LinearScan& scan, void* message, cudaStream_t stream) {
  DiagonalGradients forward{};
  forward.scan = scan;
  if (scan.T == 0 || scan.B == 0 || scan.H == 0) return false;
  if (scan.dtype == DType::f64) return run_told<double>(forward, message, stream);
  return scan.dtype == DType::f32 && run_told<float>(forward, message, stream);
}

void linear_scan_diagonal(const LinearScan& scan, const Workspace& workspace, cudaStream_t stream) {
  DiagonalGradients forward{};
  forward.scan = scan;
  run_any<false>(forward, workspace, stream);
}

void linear_scan_diagonal_gradients(const DiagonalGradients& problem, const Workspace& workspace, cudaStream_t stream) {
  run_any<true>(problem, workspace, stream);
}

}  // namespace weft::scan
