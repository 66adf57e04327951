// Gradients of csr_matmul, csr_matmul_left and csr_matmul_right of any order: the three are the derivatives of one
// function that is linear in the values on a, on b and on the product, and each is differentiated by the other two.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "sparse/csr_matmul.h"
#include "sparse/like_operand.h"

namespace weft::sparse {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Patterns = std::vector<at::Tensor>;

// csr_matmul_left and csr_matmul_right
template <bool kLeft>
at::Tensor call_gradient(at::TensorList patterns, const at::Tensor& other, const at::Tensor& g, bool shared) {
  return (kLeft ? csr_matmul_left_op : csr_matmul_right_op)(patterns, other, g, shared);
}

void save(AutogradContext* ctx, const at::Tensor& first, const at::Tensor& second, const Patterns& patterns) {
  variable_list saved = {first, second};
  saved.insert(saved.end(), patterns.begin(), patterns.end());
  ctx->save_for_backward(std::move(saved));
}

struct SavedProduct {
  at::Tensor first, second;
  Patterns patterns;
  explicit SavedProduct(AutogradContext* ctx) {
    const auto saved = ctx->get_saved_variables();
    first = saved[0], second = saved[1];
    patterns.assign(saved.begin() + 2, saved.end());
  }
};

struct MatmulFunction : torch::autograd::Function<MatmulFunction> {
  static at::Tensor forward(AutogradContext* ctx, const Patterns& patterns, const at::Tensor& x, const at::Tensor& y) {
    at::AutoDispatchBelowADInplaceOrView below;
    save(ctx, x, y, patterns);
    return csr_matmul_op(patterns, x, y);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [x, y, patterns] = SavedProduct(ctx);
    at::Tensor grad_x, grad_y;
    if (ctx->needs_input_grad(0)) grad_x = call_gradient<true>(patterns, y, grads[0], x.dim() == 1);
    if (ctx->needs_input_grad(1)) grad_y = call_gradient<false>(patterns, x, grads[0], y.dim() == 1);
    return {at::Tensor(), grad_x, grad_y};
  }
};

template <bool kLeft>
struct GradientFunction : torch::autograd::Function<GradientFunction<kLeft>> {
  static at::Tensor forward(AutogradContext* ctx, const Patterns& patterns, const at::Tensor& other,
                            const at::Tensor& g, bool shared) {
    at::AutoDispatchBelowADInplaceOrView below;
    save(ctx, other, g, patterns);
    return call_gradient<kLeft>(patterns, other, g, shared);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [other, g, patterns] = SavedProduct(ctx);
    const at::Tensor& h = grads[0];
    at::Tensor grad_other, grad_g;
    if (ctx->needs_input_grad(0)) {
      // h lies on a and `other` on b, or the other way round.
      grad_other = like_operand(call_gradient<!kLeft>(patterns, h, g, other.dim() == 1), other);
    }
    if (ctx->needs_input_grad(1)) {
      grad_g = like_operand(kLeft ? csr_matmul_op(patterns, h, other) : csr_matmul_op(patterns, other, h), g);
    }
    return {at::Tensor(), grad_other, grad_g, at::Tensor()};
  }
};

at::Tensor matmul_autograd(at::TensorList patterns, const at::Tensor& x, const at::Tensor& y) {
  if (needs_grad(x, y)) return MatmulFunction::apply(patterns.vec(), x, y);
  at::AutoDispatchBelowADInplaceOrView below;
  return csr_matmul_op(patterns, x, y);
}

template <bool kLeft>
at::Tensor gradient_autograd(at::TensorList patterns, const at::Tensor& other, const at::Tensor& g, bool shared) {
  if (needs_grad(other, g)) return GradientFunction<kLeft>::apply(patterns.vec(), other, g, shared);
  at::AutoDispatchBelowADInplaceOrView below;
  return call_gradient<kLeft>(patterns, other, g, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("csr_matmul", matmul_autograd);
  m.impl("csr_matmul_left", gradient_autograd<true>);
  m.impl("csr_matmul_right", gradient_autograd<false>);
}
TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("csr_matmul", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
  m.impl("csr_matmul_left", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
  m.impl("csr_matmul_right", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
}

}  // namespace weft::sparse
