// linear_scan on CUDA: choice of algorithm, workspace, registration.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "common/cuda/device_costs.h"
#include "scan/linear/batched.h"
#include "scan/linear/cuda/linear_scan.h"
#include "scan/linear/linear_scan.h"

namespace weft::scan {
namespace {

enum class Algorithm { diagonal, warp, block, batched };

Algorithm choose(const Described& d) {
  if (d.problem.diagonal) return Algorithm::diagonal;
  if (d.args.H <= kWarpMaxH) return Algorithm::warp;
  return d.args.H <= kBlockMaxH ? Algorithm::block : Algorithm::batched;
}

template <typename Arguments, typename Launch>
void run_kernel(const Arguments& args, const at::Tensor& like, Launch launch) {
  at::Tensor workspace;
  const auto allocate = [&](size_t bytes) {
    workspace = at::empty({int64_t(bytes)}, like.options().dtype(at::kByte));
    return workspace.data_ptr();
  };
  launch(args, allocate, at::cuda::getCurrentCUDAStream());
}

void gradients_cuda(const DiagonalBackward& problem) {
  const DescribedGradients d = describe(problem);
  run_kernel(d.args, d.problem.grad, linear_scan_diagonal_gradients);
}

at::Tensor forward_cuda(const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool reverse,
                        bool transpose, bool batch_first) {
  const c10::cuda::OptionalCUDAGuard guard(b.is_cuda() ? std::optional(b.device()) : std::nullopt);
  return linear_scan_forward(linear_scan_cuda, A, b, x0, reverse, transpose, batch_first);
}

Gradients backward_cuda(const at::Tensor& grad, const at::Tensor& A, const std::optional<at::Tensor>& x,
                        const std::optional<at::Tensor>& x0, bool reverse, bool transpose,
                        std::array<bool, 3> output_mask, bool batch_first) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return linear_scan_gradients(linear_scan_cuda, gradients_cuda, grad, A, x, x0, reverse, transpose, output_mask,
                               batch_first);
}

}  // namespace

void linear_scan_cuda(const Problem& problem, const at::Tensor& out) {
  const Described d = describe(problem, out);
  switch (choose(d)) {
    case Algorithm::diagonal:
      return run_kernel(d.args, out, linear_scan_diagonal);
    case Algorithm::warp:
      return run_kernel(d.args, out, linear_scan_warp);
    case Algorithm::block:
      return run_kernel(d.args, out, linear_scan_block);
    default: {
      const Problem& p = d.problem;
      const auto x0 = p.x0.defined() ? std::optional(p.x0) : std::nullopt;
      const auto& costs = device_costs(out.device().index()).table("scan.linear_batched");
      out.copy_(linear_scan_batched(p.A, p.b, x0, p.reverse, p.transpose, costs));
    }
  }
}

namespace {

LinearScan of_contiguous(DType dtype, int64_t T, int64_t B, int64_t H) {
  LinearScan s{};
  s.A_t = B * H * H, s.A_b = H * H, s.A_row = H, s.A_col = 1;
  s.b_t = s.out_t = B * H, s.b_b = s.x0_b = s.out_b = H;
  s.T = T, s.B = B, s.H = H, s.dtype = dtype;
  return s;
}

}  // namespace

int64_t slice_chunks_expected(int device, int64_t T, int64_t B, int64_t H) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  return slice_chunks(of_contiguous(DType::f32, T, B, H));
}

Expected linear_scan_expected(int device, DType dtype, int64_t T, int64_t B, int64_t H) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const LinearScan s = of_contiguous(dtype, T, B, H);
  return H <= kWarpMaxH ? expected_warp(s) : expected_block(s);
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("linear_scan", forward_cuda);
  m.impl("linear_scan_backward", backward_cuda);
}

}  // namespace weft::scan
