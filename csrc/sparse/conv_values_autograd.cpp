// Gradients of conv_values and conv_values_backward of any order: both are linear, each the other's adjoint.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "sparse/conv_values.h"

namespace weft::sparse {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Tables = std::vector<at::Tensor>;

struct ConvValuesFunction : torch::autograd::Function<ConvValuesFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& weight, const Tables& windows, int64_t groups) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward(windows);
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["out_channels"] = weight.size(0) / groups;
    ctx->saved_data["in_channels"] = weight.size(1);
    return conv_values_op(weight, windows, groups);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {conv_values_backward_op(grads[0], ctx->get_saved_variables(), ctx->saved_data["groups"].toInt(),
                                    ctx->saved_data["out_channels"].toInt(), ctx->saved_data["in_channels"].toInt()),
            at::Tensor(), at::Tensor()};
  }
};

struct ConvValuesBackwardFunction : torch::autograd::Function<ConvValuesBackwardFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& grad, const Tables& windows, int64_t groups,
                            int64_t out_channels, int64_t in_channels) {
    at::AutoDispatchBelowADInplaceOrView below;
    ctx->save_for_backward(windows);
    ctx->saved_data["groups"] = groups;
    return conv_values_backward_op(grad, windows, groups, out_channels, in_channels);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {conv_values_op(grads[0], ctx->get_saved_variables(), ctx->saved_data["groups"].toInt()), at::Tensor(),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor values_autograd(const at::Tensor& weight, at::TensorList windows, int64_t groups) {
  if (needs_grad(weight)) return ConvValuesFunction::apply(weight, windows.vec(), groups);
  at::AutoDispatchBelowADInplaceOrView below;
  return conv_values_op(weight, windows, groups);
}

at::Tensor values_backward_autograd(const at::Tensor& grad, at::TensorList windows, int64_t groups,
                                    int64_t out_channels, int64_t in_channels) {
  if (needs_grad(grad)) {
    return ConvValuesBackwardFunction::apply(grad, windows.vec(), groups, out_channels, in_channels);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return conv_values_backward_op(grad, windows, groups, out_channels, in_channels);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("conv_values", values_autograd);
  m.impl("conv_values_backward", values_backward_autograd);
}
TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("conv_values", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
  m.impl("conv_values_backward", torch::CppFunction::makeFromBoxedFunction<one_by_one>());
}

}  // namespace weft::sparse
