// linear_scan on CUDA: choice of algorithm, workspace, registration. The dense step loop at the end is the readable
// fallback; every other route is a kernel under cuda/.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/cuda/linear_scan.h"
#include "scan/linear_scan.h"

namespace weft::scan {
namespace {

enum class Algorithm { diagonal, small, middle, large, sequential };

// A scan over dense matrices costs about H times the work of the recurrence. Below these lengths the steps one after
// the other are as fast.
constexpr int64_t kLargeMinT = 64;

Algorithm choose(const Described& d) {
  if (d.problem.diagonal) return Algorithm::diagonal;
  if (d.args.H <= kSmallMaxH) return Algorithm::small;
  if (d.args.H <= kMiddleMaxH) return Algorithm::middle;
  return d.args.T >= kLargeMinT ? Algorithm::large : Algorithm::sequential;
}

// x[t] = A[t] x[t-1] + b[t] by one batched product per step.
void sequential(const Problem& p, const at::Tensor& out) {
  const int64_t T = p.b.size(0), B = p.b.size(1), H = p.b.size(2);
  // The state is carried in fp32 for fp16 and bf16; their matrices are widened step by step.
  const auto accumulate = p.b.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::NoTF32Guard no_tf32;
  at::Tensor x;
  if (p.x0.defined()) x = p.x0.to(accumulate).unsqueeze(-1);
  for (int64_t i = 0; i < T; ++i) {
    const int64_t t = p.reverse ? T - 1 - i : i;
    const at::Tensor b = p.b.select(0, t).to(accumulate).unsqueeze(-1);
    if (x.defined()) {
      const at::Tensor A = p.A.select(0, t).to(accumulate);
      x = at::baddbmm(b, (p.transpose ? A.transpose(1, 2) : A).expand({B, H, H}), x);
    } else {
      x = b;
    }
    out.select(0, t).copy_(x.squeeze(-1));
  }
}

template <typename Size, typename Launch>
void run_kernel(const LinearScan& args, const at::Tensor& out, Size workspace_bytes, Launch launch) {
  const auto bytes = int64_t(workspace_bytes(args));
  at::Tensor workspace;
  if (bytes > 0) workspace = at::empty({bytes}, out.options().dtype(at::kByte));
  launch(args, bytes > 0 ? workspace.data_ptr() : nullptr, at::cuda::getCurrentCUDAStream());
}

at::Tensor forward_cuda(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool reverse,
                        bool transpose) {
  const c10::cuda::OptionalCUDAGuard guard(b.is_cuda() ? std::optional(b.device()) : std::nullopt);
  return linear_scan_forward(linear_scan_cuda, A, b, x0, reverse, transpose);
}

Gradients backward_cuda(const at::Tensor& grad, const at::Tensor& A, const std::optional<at::Tensor>& x,
                        const std::optional<at::Tensor>& x0, bool reverse, bool transpose,
                        std::array<bool, 3> output_mask) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return linear_scan_gradients(linear_scan_cuda, grad, A, x, x0, reverse, transpose, output_mask);
}

}  // namespace

void linear_scan_cuda(const Problem& problem, const at::Tensor& out) {
  const Described d = describe(problem, out);
  switch (choose(d)) {
    case Algorithm::diagonal:
      return run_kernel(d.args, out, linear_scan_diagonal_workspace_bytes, linear_scan_diagonal);
#if __has_include("scan/cuda/linear_scan_small.cu")
    case Algorithm::small:
      return run_kernel(d.args, out, linear_scan_small_workspace_bytes, linear_scan_small);
#endif
#if __has_include("scan/cuda/linear_scan_middle.cu")
    case Algorithm::middle:
      return run_kernel(d.args, out, linear_scan_middle_workspace_bytes, linear_scan_middle);
#endif
#if __has_include("scan/linear_scan_large_cuda.cpp")
    case Algorithm::large:
      return linear_scan_large_cuda(problem, out);
#endif
    default:
      return sequential(problem, out);
  }
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("linear_scan", forward_cuda);
  m.impl("linear_scan_backward", backward_cuda);
}

}  // namespace weft::scan
