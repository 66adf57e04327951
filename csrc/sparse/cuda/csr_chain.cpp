// csr_chain on CUDA: device, stream, the barrier's counter, registration.
#include "sparse/csr_chain.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/csr_chain_kernels.h"

namespace weft::sparse {
namespace {

void chain_cuda(const std::vector<CsrLink>& links, DType dtype, bool wide, int64_t batch) {
  // Zeroed for each launch, in torch's memory, so that a captured graph has its own.
  std::vector<at::Tensor> counters;
  const auto counter = [&] {
    counters.push_back(
        at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(at::kCUDA, at::cuda::current_device())));
    return reinterpret_cast<unsigned*>(counters.back().mutable_data_ptr<int>());
  };
  csr_chain_cuda(links.data(), int64_t(links.size()), dtype, wide, batch, counter, at::cuda::getCurrentCUDAStream());
}

std::vector<at::Tensor> forward_cuda(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                     at::TensorList values) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return csr_chain_forward(chain_cuda, grad, crows, cols, values);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("csr_chain", forward_cuda);
}

}  // namespace weft::sparse
