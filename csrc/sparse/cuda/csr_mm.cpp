// csr_mm and csr_sampled_mm on CUDA: device, stream, registration.
#include "sparse/csr_mm.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/csr_mm_kernels.h"

namespace weft::sparse {
namespace {

at::Tensor mm_cuda(at::TensorList pattern, at::TensorList /*transposed*/, const std::optional<at::Tensor>& values,
                   const at::Tensor& x) {
  const c10::cuda::OptionalCUDAGuard guard(x.is_cuda() ? std::optional(x.device()) : std::nullopt);
  return csr_mm_forward([](const CsrMm& args) { csr_mm_cuda(args, at::cuda::getCurrentCUDAStream()); }, pattern, values,
                        x);
}

at::Tensor sampled_mm_cuda(at::TensorList pattern, at::TensorList /*transposed*/, const at::Tensor& left,
                           const at::Tensor& right, bool shared) {
  const c10::cuda::OptionalCUDAGuard guard(left.is_cuda() ? std::optional(left.device()) : std::nullopt);
  return csr_sampled_mm_forward(
      [](const CsrSampledMm& args) { csr_sampled_mm_cuda(args, at::cuda::getCurrentCUDAStream()); }, pattern, left,
      right, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("csr_mm", mm_cuda);
  m.impl("csr_sampled_mm", sampled_mm_cuda);
}

}  // namespace weft::sparse
