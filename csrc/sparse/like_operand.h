// Gradients of operands that have a batch or not.
#pragma once
#include <ATen/core/Tensor.h>

namespace weft::sparse {

// An operand that the batch shares gets the sum over the batch; one with a batch that is summed gets the same in every
// sample.
inline at::Tensor like_operand(const at::Tensor& grad, const at::Tensor& operand) {
  return grad.dim() > operand.dim() ? grad.sum(0) : grad.expand_symint(operand.sym_sizes());
}

}  // namespace weft::sparse
