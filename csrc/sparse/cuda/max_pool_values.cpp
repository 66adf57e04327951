// max_pool_values on CUDA: device, stream, registration.
#include "sparse/max_pool_values.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/max_pool_values_kernels.h"

namespace weft::sparse {
namespace {

at::Tensor pool_values_cuda(const at::Tensor& input, const at::Tensor& crow, const at::Tensor& col,
                            at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, at::IntArrayRef output) {
  const c10::cuda::OptionalCUDAGuard guard(input.is_cuda() ? std::optional(input.device()) : std::nullopt);
  return max_pool_values_forward([](const MaxPool& m) { max_pool_values_cuda(m, at::cuda::getCurrentCUDAStream()); },
                                 input, crow, col, kernel, stride, padding, dilation, output);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("max_pool_values", pool_values_cuda);
}

}  // namespace weft::sparse
