// csr_chain on CUDA: device, stream, scratch memory, registration.
#include "sparse/csr_chain.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/csr_chain_kernels.h"

namespace weft::sparse {
namespace {

void chain_cuda(const std::vector<CsrLink>& links, DType dtype, bool wide, int64_t batch) {
  // Of each launch, in torch's memory, so that a captured graph has its own.
  std::vector<at::Tensor> held;
  const auto scratch = [&](int64_t bytes, bool zero) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA, at::cuda::current_device());
    held.push_back(zero ? at::zeros({bytes}, options) : at::empty({bytes}, options));
    return held.back().mutable_data_ptr();
  };
  csr_chain_cuda(links.data(), int64_t(links.size()), dtype, wide, batch, scratch, at::cuda::getCurrentCUDAStream());
}

std::vector<at::Tensor> forward_cuda(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                     at::TensorList values) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return csr_chain_forward(chain_cuda, grad, crows, cols, values);
}

std::vector<at::Tensor> layers_cuda(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                    at::TensorList values, at::TensorList sources, at::IntArrayRef reads) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return csr_chain_forward(chain_cuda, grad, crows, cols, values, sources, reads);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("csr_chain", forward_cuda);
  m.impl("layer_chain", layers_cuda);
}

}  // namespace weft::sparse
