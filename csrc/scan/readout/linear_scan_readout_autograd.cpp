// Gradients of linear_scan_readout of any order: the first backward is the registered linear_scan_readout_backward;
// under create_graph that is made of differentiable ops.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/saved_variables.h"
#include "scan/readout/linear_scan_readout.h"

namespace weft::scan::read_out {
namespace {

struct ReadOutFunction : torch::autograd::Function<ReadOutFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& A,
                                                const at::Tensor& b, const at::Tensor& c, const OptionalTensor& x0,
                                                bool reverse, bool batch_first) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [y, starts] = linear_scan_readout_op(A, b, c, x0, reverse, batch_first, true);
    ctx->save_for_backward({A, b, c, or_undefined(x0), starts});
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["batch_first"] = batch_first;
    ctx->mark_non_differentiable({starts});
    return {y, starts};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = saved_variables<ReadOutFunction>(ctx, "weft.scan.linear_scan");
    const std::array<bool, 4> mask = {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                      saved[3].defined() && ctx->needs_input_grad(3)};
    auto [grad_A, grad_b, grad_c, grad_x0] = linear_scan_readout_backward_op(
        grads[0], saved[0], saved[1], saved[2], optional(saved[3]), saved[4], ctx->saved_data["reverse"].toBool(),
        ctx->saved_data["batch_first"].toBool(), mask);
    return {grad_A, grad_b, grad_c, grad_x0, at::Tensor(), at::Tensor()};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(const at::Tensor& A, const at::Tensor& b, const at::Tensor& c,
                                                    const OptionalTensor& x0, bool reverse, bool batch_first,
                                                    bool save) {
  if (needs_grad(A, b, c, x0)) {
    const auto results = ReadOutFunction::apply(A, b, c, x0, reverse, batch_first);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return linear_scan_readout_op(A, b, c, x0, reverse, batch_first, save);
}

ReadOutGradientsOf backward_autograd(const at::Tensor& grad, const at::Tensor& A, const at::Tensor& b,
                                     const at::Tensor& c, const OptionalTensor& x0, const at::Tensor& starts,
                                     bool reverse, bool batch_first, std::array<bool, 4> output_mask) {
  if (needs_grad(grad, A, b, c, x0)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return composed_readout_gradients(grad, A, b, c, x0, reverse, batch_first, output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return linear_scan_readout_backward_op(grad, A, b, c, x0, starts, reverse, batch_first, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("linear_scan_readout", forward_autograd);
  m.impl("linear_scan_readout_backward", backward_autograd);
}

}  // namespace weft::scan::read_out
