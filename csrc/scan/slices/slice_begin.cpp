#include "scan/slices/slice_begin.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common/check.h"
#include "common/op_handle.h"
#include "scan/slices/slice_args.h"

namespace weft::scan {
namespace {

const OpHandle<at::Tensor(const at::Tensor&, const at::Tensor&, bool)> slice_message_op("weft::slice_message");

void check_slice(const char* op, const at::Tensor& A, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(like.dim() == 3 && like.size(0) > 0, op, ": ", name,
                    " must be (T, B, H) with at least one step, got ", like.sizes());
  check_like(op, "A", A, name, like);
  check_shape(op, "A", A, like.sizes(), "(T, B, H)");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> slice_begin(ScanTold scan, const at::Tensor& A, const at::Tensor& b,
                                               const std::optional<at::Tensor>& x0, bool first, bool reverse) {
  check_slice("slice_begin", A, "b", b);
  const bool wide = b.scalar_type() == at::kDouble;
  const bool is_row =
      !x0 || (x0->sizes() == b.sizes().slice(1) && x0->scalar_type() == b.scalar_type() && x0->device() == b.device());
  if (scan != nullptr && is_row && b.numel() > 0 && (wide || b.scalar_type() == at::kFloat)) {
    const int64_t channels = b.size(1) * b.size(2);
    const at::Tensor x = at::empty(b.sizes(), b.options());
    const at::Tensor message =
        at::empty({slice_message_numbers(channels, channels)}, b.options().dtype(wide ? at::kLong : at::kInt));
    if (scan({A, b, x0.value_or(at::Tensor()), true, reverse, false}, x, message)) return {x, message};
  }
  const at::Tensor x = linear_scan_op(A, b, x0, reverse, false, false);
  return {x, slice_message_op(first ? A.narrow(0, 0, 0) : A, x.select(0, reverse ? 0 : x.size(0) - 1), true)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> slice_begin_gradients(const at::Tensor& grad,
                                                                     const std::optional<at::Tensor>& grad_entered,
                                                                     const std::optional<at::Tensor>& grad_end,
                                                                     const at::Tensor& A, const at::Tensor& x,
                                                                     const std::optional<at::Tensor>& start, bool first,
                                                                     bool reverse, bool of_A) {
  check_slice("slice_begin_gradients", A, "grad", grad);
  TORCH_CHECK_VALUE(first || start, "slice_begin_gradients: start must be given on all ranks but the first");
  auto [grad_A, grad_b, grad_start] =
      linear_scan_backward_op(grad, A, x, start, reverse, false, {of_A, true, !first}, false);
  if (!of_A) grad_A = at::empty({0}, grad.options());
  at::Tensor given = grad_start;
  if (first) {
    given = at::zeros(grad.sizes().slice(1), grad.options());
  } else if (grad_entered) {
    given = at::add(*grad_entered, grad_start);
  }
  return {grad_A, grad_b, grad_end ? at::stack({given, *grad_end}) : given.unsqueeze(0)};
}

TORCH_LIBRARY_IMPL(weft, CompositeExplicitAutograd, m) {
  m.impl("slice_begin", [](const at::Tensor& A, const at::Tensor& b, const std::optional<at::Tensor>& x0, bool first,
                           bool reverse) { return slice_begin(nullptr, A, b, x0, first, reverse); });
  m.impl("slice_begin_gradients", slice_begin_gradients);
}

}  // namespace weft::scan
