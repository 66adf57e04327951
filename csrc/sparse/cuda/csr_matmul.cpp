// csr_matmul and its gradients on CUDA: device, stream, registration.
#include "sparse/csr_matmul.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/csr_matmul_kernels.h"

namespace weft::sparse {
namespace {

at::Tensor matmul_cuda(at::TensorList patterns, const at::Tensor& x, const at::Tensor& y) {
  const c10::cuda::OptionalCUDAGuard guard(x.is_cuda() ? std::optional(x.device()) : std::nullopt);
  return csr_matmul_forward([](const CsrMatmul& m) { csr_matmul_cuda(m, at::cuda::getCurrentCUDAStream()); }, patterns,
                            x, y);
}

at::Tensor left_cuda(at::TensorList patterns, const at::Tensor& y, const at::Tensor& g, bool shared) {
  const c10::cuda::OptionalCUDAGuard guard(y.is_cuda() ? std::optional(y.device()) : std::nullopt);
  return csr_matmul_left_forward([](const CsrMatmul& m) { csr_matmul_left_cuda(m, at::cuda::getCurrentCUDAStream()); },
                                 patterns, y, g, shared);
}

at::Tensor right_cuda(at::TensorList patterns, const at::Tensor& x, const at::Tensor& g, bool shared) {
  const c10::cuda::OptionalCUDAGuard guard(x.is_cuda() ? std::optional(x.device()) : std::nullopt);
  return csr_matmul_right_forward(
      [](const CsrMatmul& m) { csr_matmul_right_cuda(m, at::cuda::getCurrentCUDAStream()); }, patterns, x, g, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("csr_matmul", matmul_cuda);
  m.impl("csr_matmul_left", left_cuda);
  m.impl("csr_matmul_right", right_cuda);
}

}  // namespace weft::sparse
