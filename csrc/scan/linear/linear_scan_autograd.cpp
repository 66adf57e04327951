// Gradients of linear_scan of any order: the first backward is the registered linear_scan_backward; under create_graph
// that op is made of differentiable ops, linear_scan among them.
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/saved_variables.h"
#include "scan/linear/linear_scan.h"

namespace weft::scan {
namespace {

Gradients differentiable_backward(const at::Tensor& grad, const at::Tensor& A, const OptionalTensor& x,
                                  const OptionalTensor& x0, bool reverse, bool transpose,
                                  std::array<bool, 3> output_mask) {  // with time first
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // As in the kernels, sums of half-precision products are float sums.
  const auto accumulate = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;  // of what is dense
  auto product = [&](const at::Tensor& left, const at::Tensor& right) {
    return at::matmul(left.to(accumulate), right.to(accumulate)).to(grad.scalar_type());
  };
  const auto T = grad.sym_size(0);
  const auto B = grad.sym_size(1), H = grad.sym_size(2);
  const bool varying = A.dim() == 3 && A.sym_sizes() == grad.sym_sizes();
  const bool constant = !varying && (A.dim() == 1 || (A.dim() == 3 && A.sym_sizes() != c10::SymIntArrayRef({T, H, H})));
  const bool diagonal = varying || constant;
  const bool shared = !diagonal && (A.dim() == 3 || (A.sym_size(1) == 1 && B != 1));
  const at::Tensor matrices = (constant ? A.expand_symint(grad.sym_sizes()) : A).conj();
  at::Tensor grad_A, grad_b, grad_x0;
  if (T == 0) {
    if (output_mask[0]) grad_A = at::zeros_like(A);
    if (output_mask[1]) grad_b = at::zeros_like(grad);
    if (output_mask[2] && x0.has_value()) grad_x0 = at::zeros_like(*x0);
    return {grad_A, grad_b, grad_x0};
  }
  const auto n = T - 1;
  const c10::SymInt early = reverse ? 1 : 0, late = reverse ? 0 : 1, first = reverse ? n : 0;
  auto steps = [&](const at::Tensor& t, const c10::SymInt& begin, const c10::SymInt& length) {
    return t.narrow_symint(0, begin, length);
  };
  auto join = [&](const at::Tensor& at_first_side, const at::Tensor& at_last_side) {
    return reverse ? at::cat({at_last_side, at_first_side}) : at::cat({at_first_side, at_last_side});
  };
  at::Tensor lambda = grad;
  if (n > 0) {
    const at::Tensor end = steps(grad, n - first, 1);
    lambda = join(
        linear_scan_op(steps(matrices, late, n), steps(grad, early, n), end.squeeze(0), !reverse, !transpose, false),
        end);
  }
  if (output_mask[0]) {
    const at::Tensor start =
        x0.has_value() ? x0->expand_symint({B, H}).unsqueeze(0) : at::zeros_like(steps(grad, 0, 1));
    const at::Tensor previous = n > 0 ? join(start, steps(*x, early, n)) : start;
    const at::Tensor &rows = transpose && !diagonal ? previous : lambda,
                     &columns = &rows == &lambda ? previous : lambda;
    if (diagonal) {
      grad_A = at::mul(lambda, previous.conj());
      if (constant) grad_A = grad_A.sum_to_size_symint(A.sym_sizes());
    } else if (shared) {
      grad_A = product(rows.transpose(1, 2), columns);
      if (A.dim() == 4) grad_A = grad_A.unsqueeze(1);
    } else {
      grad_A = at::mul(rows.unsqueeze(-1), columns.unsqueeze(-2));
    }
  }
  if (output_mask[2] && x0.has_value()) {
    const at::Tensor l = steps(lambda, first, 1).squeeze(0), m = steps(matrices, first, 1).squeeze(0);
    grad_x0 = diagonal ? at::mul(m, l) : product(transpose ? m : m.transpose(-1, -2), l.unsqueeze(-1)).squeeze(-1);
    if (x0->dim() == 1) grad_x0 = grad_x0.sum_to_size_symint(x0->sym_sizes());
  }
  if (output_mask[1]) grad_b = lambda;
  return {grad_A, grad_b, grad_x0};
}

struct LinearScanFunction : torch::autograd::Function<LinearScanFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& A, const at::Tensor& b,
                            const OptionalTensor& x0, bool reverse, bool transpose, bool batch_first) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor x = linear_scan_op(A, b, x0, reverse, transpose, batch_first);
    // Only the gradient of A looks at x. Within a backward of its own, needs_input_grad would speak of that one.
    ctx->save_for_backward({A, A.requires_grad() ? x : at::Tensor(), or_undefined(x0)});
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["transpose"] = transpose;
    ctx->saved_data["batch_first"] = batch_first;
    return x;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = saved_variables<LinearScanFunction>(ctx, "weft.scan.linear_scan");
    const std::array<bool, 3> mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                      saved[2].defined() && ctx->needs_input_grad(2)};
    auto [grad_A, grad_b, grad_x0] = linear_scan_backward_op(
        grads[0], saved[0], optional(saved[1]), optional(saved[2]), ctx->saved_data["reverse"].toBool(),
        ctx->saved_data["transpose"].toBool(), mask, ctx->saved_data["batch_first"].toBool());
    return {grad_A, grad_b, grad_x0, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor forward_autograd(const at::Tensor& A, const at::Tensor& b, const OptionalTensor& x0, bool reverse,
                            bool transpose, bool batch_first) {
  if (needs_grad(A, b, x0)) return LinearScanFunction::apply(A, b, x0, reverse, transpose, batch_first);
  at::AutoDispatchBelowADInplaceOrView below;
  return linear_scan_op(A, b, x0, reverse, transpose, batch_first);
}

Gradients backward_autograd(const at::Tensor& grad, const at::Tensor& A, const OptionalTensor& x,
                            const OptionalTensor& x0, bool reverse, bool transpose, std::array<bool, 3> output_mask,
                            bool batch_first) {
  if (needs_grad(grad, A, x, x0)) {
    const auto turned = [&](const at::Tensor& t) {
      return batch_first && t.defined() && t.dim() >= 3 ? t.transpose(0, 1) : t;
    };
    auto [grad_A, grad_b, grad_x0] = differentiable_backward(
        turned(grad), turned(A), x ? OptionalTensor(turned(*x)) : x, x0, reverse, transpose, output_mask);
    return {turned(grad_A), turned(grad_b), grad_x0};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return linear_scan_backward_op(grad, A, x, x0, reverse, transpose, output_mask, batch_first);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("linear_scan", forward_autograd);
  m.impl("linear_scan_backward", backward_autograd);
}

}  // namespace weft::scan
