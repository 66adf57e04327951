// max_pool_values under autograd: its result has no gradient.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "sparse/max_pool_values.h"

namespace weft::sparse {
namespace {

at::Tensor pool_values_autograd(const at::Tensor& input, const at::Tensor& crow, const at::Tensor& col,
                                at::IntArrayRef kernel, at::IntArrayRef stride, at::IntArrayRef padding,
                                at::IntArrayRef dilation, at::IntArrayRef output) {
  at::AutoDispatchBelowADInplaceOrView below;
  return max_pool_values_op(input, crow, col, kernel, stride, padding, dilation, output);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("max_pool_values", pool_values_autograd);
}

}  // namespace weft::sparse
