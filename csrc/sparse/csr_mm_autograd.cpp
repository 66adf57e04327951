// Gradients of csr_mm and csr_sampled_mm of any order: <out, csr_mm(values, x)> is linear in values, x and out, and the
// derivative by each of the three is one of the two ops.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "sparse/csr_mm.h"
#include "sparse/csr_transpose.h"
#include "sparse/like_operand.h"
#include "sparse/tensors.h"

namespace weft::sparse {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Pattern = std::vector<at::Tensor>;

Pattern call_transpose(const at::Tensor& crow, const at::Tensor& col, const c10::SymInt& columns) {
  auto [t_crow, t_col, index] = csr_transpose_op(crow, col, columns);
  return {t_crow, t_col, index};
}

Pattern transposed_or_made(const char* op, const Pattern& pattern, const Pattern& transposed,
                           const c10::SymInt& columns) {
  if (!transposed.empty()) return transposed;
  TORCH_CHECK_VALUE(pattern.size() == 2, op, ": a pattern with an index is differentiable only beside its transposed");
  return call_transpose(pattern[0], pattern[1], columns);
}

// Two operands and the two patterns.
void save(AutogradContext* ctx, const at::Tensor& first, const at::Tensor& second, const Pattern& pattern,
          const Pattern& transposed) {
  variable_list saved = {first, second};
  saved.insert(saved.end(), pattern.begin(), pattern.end());
  saved.insert(saved.end(), transposed.begin(), transposed.end());
  ctx->save_for_backward(std::move(saved));
  ctx->saved_data["tensors"] = int64_t(pattern.size());
}

struct Saved {
  at::Tensor first, second;
  Pattern pattern, transposed;
  explicit Saved(AutogradContext* ctx) {
    const auto saved = ctx->get_saved_variables();
    const auto middle = saved.begin() + 2 + ctx->saved_data["tensors"].toInt();
    first = saved[0], second = saved[1];
    pattern.assign(saved.begin() + 2, middle);
    transposed.assign(middle, saved.end());
  }
};

// As arguments of a Function, patterns are vectors, which it does not take for variables.
struct CsrMmFunction : torch::autograd::Function<CsrMmFunction> {
  static at::Tensor forward(AutogradContext* ctx, const Pattern& pattern, const Pattern& transposed,
                            const OptionalTensor& values, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView below;
    save(ctx, or_undefined(values), x, pattern, transposed_or_made("csr_mm", pattern, transposed, x.sym_size(-2)));
    return csr_mm_op(pattern, {}, values, x);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [values, x, pattern, transposed] = Saved(ctx);
    const at::Tensor& grad = grads[0];
    at::Tensor grad_values, grad_x;
    if (values.defined() && ctx->needs_input_grad(0)) {
      const bool shared = values.dim() == 1;
      grad_values = pattern.size() == 2 ? csr_sampled_mm_op(pattern, transposed, grad, x, shared)
                                        : csr_sampled_mm_op({transposed[0], transposed[1]}, pattern, x, grad, shared);
    }
    if (ctx->needs_input_grad(values.defined() ? 1 : 0)) {
      grad_x = like_operand(csr_mm_op(transposed, pattern, optional(values), grad), x);
    }
    return {at::Tensor(), at::Tensor(), grad_values, grad_x};
  }
};

struct CsrSampledMmFunction : torch::autograd::Function<CsrSampledMmFunction> {
  static at::Tensor forward(AutogradContext* ctx, const Pattern& pattern, const Pattern& transposed,
                            const at::Tensor& left, const at::Tensor& right, bool shared) {
    at::AutoDispatchBelowADInplaceOrView below;
    save(ctx, left, right, pattern, transposed_or_made("csr_sampled_mm", pattern, transposed, right.sym_size(-2)));
    return csr_sampled_mm_op(pattern, {}, left, right, shared);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto [left, right, pattern, transposed] = Saved(ctx);
    const at::Tensor& grad = grads[0];
    at::Tensor grad_left, grad_right;
    if (ctx->needs_input_grad(0)) grad_left = like_operand(csr_mm_op(pattern, transposed, grad, right), left);
    if (ctx->needs_input_grad(1)) grad_right = like_operand(csr_mm_op(transposed, pattern, grad, left), right);
    return {at::Tensor(), at::Tensor(), grad_left, grad_right, at::Tensor()};
  }
};

at::Tensor mm_autograd(at::TensorList pattern, at::TensorList transposed, const OptionalTensor& values,
                       const at::Tensor& x) {
  if (needs_grad(values, x)) return CsrMmFunction::apply(pattern.vec(), transposed.vec(), values, x);
  at::AutoDispatchBelowADInplaceOrView below;
  return csr_mm_op(pattern, transposed, values, x);
}

at::Tensor sampled_mm_autograd(at::TensorList pattern, at::TensorList transposed, const at::Tensor& left,
                               const at::Tensor& right, bool shared) {
  if (needs_grad(left, right)) return CsrSampledMmFunction::apply(pattern.vec(), transposed.vec(), left, right, shared);
  at::AutoDispatchBelowADInplaceOrView below;
  return csr_sampled_mm_op(pattern, transposed, left, right, shared);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("csr_mm", mm_autograd);
  m.impl("csr_sampled_mm", sampled_mm_autograd);
}
TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("csr_mm", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
  m.impl("csr_sampled_mm", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
}

}  // namespace weft::sparse
