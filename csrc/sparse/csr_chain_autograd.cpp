// csr_chain and layer_chain under autograd: products one after the other, each differentiable to any order.
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "sparse/csr_chain.h"
#include "sparse/csr_mm.h"

namespace weft::sparse {
namespace {

std::vector<at::Tensor> chain_autograd(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                       at::TensorList values) {
  if (!needs_grad(grad, values)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return csr_chain_op(grad, crows, cols, values);
  }
  std::vector<at::Tensor> out;
  at::Tensor x = grad;
  for (size_t k = 0; k < values.size(); ++k) {
    if (crows[k].sym_numel() == 0) {
      x = at::mul(values[k], x);
    } else {
      x = csr_mm_op({crows[k], cols[k]}, {}, values[k], x.unsqueeze(-1)).squeeze(-1);
    }
    out.push_back(x);
  }
  return out;
}

std::vector<at::Tensor> layers_autograd(const at::Tensor& grad, at::TensorList crows, at::TensorList cols,
                                        at::TensorList values, at::TensorList sources, at::IntArrayRef reads) {
  if (!needs_grad(grad, values)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return layer_chain_op(grad, crows, cols, values, sources, reads);
  }
  return csr_chain_op(grad, crows, cols, written_values(grad, crows, cols, values, sources, reads));
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("csr_chain", chain_autograd);
  m.impl("layer_chain", layers_autograd);
}
TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("layer_chain", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
}

}  // namespace weft::sparse
