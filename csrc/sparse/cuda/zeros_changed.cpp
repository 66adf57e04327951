// zeros_changed on CUDA: device, stream, registration.
#include "sparse/zeros_changed.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "sparse/cuda/zeros_changed_kernels.h"

namespace weft::sparse {
namespace {

void compare_cuda(const std::vector<StoredZeros>& parts, int element_size, int* changed) {
  zeros_changed_cuda(parts.data(), int64_t(parts.size()), element_size, changed, at::cuda::getCurrentCUDAStream());
}

at::Tensor zeros_cuda(at::TensorList weights, at::TensorList stored) {
  const c10::cuda::OptionalCUDAGuard guard(!weights.empty() && weights[0].is_cuda() ? std::optional(weights[0].device())
                                                                                    : std::nullopt);
  return zeros_changed_forward(compare_cuda, weights, stored);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("zeros_changed", zeros_cuda);
}

}  // namespace weft::sparse
