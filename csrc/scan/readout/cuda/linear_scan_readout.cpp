// linear_scan_readout on CUDA: registration, and what the kernels do not take.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "scan/readout/cuda/readout.h"
#include "scan/readout/linear_scan_readout.h"

namespace weft::scan::read_out {
namespace {

void run(const ReadOut& problem, const at::Tensor&) {
  readout(problem, at::cuda::getCurrentCUDAStream());
}
void run_gradients(const ReadOutGradients& problem, const at::Tensor&) {
  readout_gradients(problem, at::cuda::getCurrentCUDAStream());
}
bool fits(const at::Tensor& A) {
  return A.dim() == 0 || A.size(-1) <= kReadOutMaxN;
}
std::tuple<at::Tensor, at::Tensor> forward_cuda(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                                                const std::optional<at::Tensor>& x0, bool reverse, bool batch_first,
                                                bool save) {
  const c10::cuda::OptionalCUDAGuard guard(b.is_cuda() ? std::optional(b.device()) : std::nullopt);
  return readout_forward(fits(A) ? run : nullptr, A, b, c, x0, reverse, batch_first, save);
}

ReadOutGradientsOf backward_cuda(const at::Tensor& grad, const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                                 const std::optional<at::Tensor>& x0, const at::Tensor& starts, bool reverse,
                                 bool batch_first, std::array<bool, 4> output_mask) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return readout_gradients(fits(A) ? run_gradients : nullptr, grad, A, b, c, x0, starts, reverse, batch_first,
                           output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("linear_scan_readout", forward_cuda);
  m.impl("linear_scan_readout_backward", backward_cuda);
}

}  // namespace weft::scan::read_out
