// conv_pattern, conv_values and conv_values_backward on CUDA: device, stream, registration.
#include "sparse/conv_values.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/conv_values_kernels.h"

namespace weft::sparse {
namespace {

std::tuple<at::Tensor, at::Tensor> pattern_cuda(at::TensorList windows, int64_t groups, int64_t in_channels,
                                                int64_t out_channels, int64_t output_positions, bool wide) {
  const c10::cuda::OptionalCUDAGuard guard(!windows.empty() && windows[0].is_cuda() ? std::optional(windows[0].device())
                                                                                    : std::nullopt);
  return conv_pattern_forward([](const Conv& c) { conv_pattern_cuda(c, at::cuda::getCurrentCUDAStream()); }, windows,
                              groups, in_channels, out_channels, output_positions, wide);
}

at::Tensor values_cuda(const at::Tensor& weight, at::TensorList windows, int64_t groups) {
  const c10::cuda::OptionalCUDAGuard guard(weight.is_cuda() ? std::optional(weight.device()) : std::nullopt);
  return conv_values_forward([](const Conv& c) { conv_values_cuda(c, at::cuda::getCurrentCUDAStream()); }, weight,
                             windows, groups);
}

at::Tensor values_backward_cuda(const at::Tensor& grad, at::TensorList windows, int64_t groups, int64_t out_channels,
                                int64_t in_channels) {
  const c10::cuda::OptionalCUDAGuard guard(grad.is_cuda() ? std::optional(grad.device()) : std::nullopt);
  return conv_values_gradient([](const Conv& c) { conv_values_backward_cuda(c, at::cuda::getCurrentCUDAStream()); },
                              grad, windows, groups, out_channels, in_channels);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("conv_pattern", pattern_cuda);
  m.impl("conv_values", values_cuda);
  m.impl("conv_values_backward", values_backward_cuda);
}

}  // namespace weft::sparse
