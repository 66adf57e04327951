// The gradient of weft::scan_rnn is weft::scan_rnn_backward, whose own gradient goes through the reference.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "common/autograd.h"
#include "scan/scan_rnn.h"
#include "scan/scan_rnn_reference.h"

namespace weft {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

using ForwardSignature = Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                 const OptionalTensor&, const OptionalTensor&, c10::string_view, bool, bool);
using BackwardSignature = ScanRnnGrads(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                       const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                                       const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
                                       const Tensor&, const Tensor&, c10::string_view, bool, std::array<bool, 7>);

const c10::TypedOperatorHandle<ForwardSignature>& forward_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("weft::scan_rnn", "").typed<ForwardSignature>();
  return op;
}

const c10::TypedOperatorHandle<BackwardSignature>& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("weft::scan_rnn_backward", "").typed<BackwardSignature>();
  return op;
}

class ScanRnn : public torch::autograd::Function<ScanRnn> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& h0, const OptionalTensor& c0,
                               const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                               const OptionalTensor& b_hh, const std::string& cell, bool reverse) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, h_n, c_n, gates, cells] =
        forward_op().call(input, h0, c0, w_ih, w_hh, b_ih, b_hh, cell, reverse, /*save=*/true);
    ctx->save_for_backward(
        {input, h0, or_undefined(c0), w_ih, w_hh, or_undefined(b_ih), or_undefined(b_hh), output, gates, cells});
    ctx->saved_data["cell"] = cell;
    ctx->saved_data["reverse"] = reverse;
    ctx->set_materialize_grads(false);
    if (cell == "lstm") {
      ctx->mark_non_differentiable({gates, cells});
    } else {
      ctx->mark_non_differentiable({c_n, gates, cells});
    }
    return {output, h_n, c_n, gates, cells};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    // One gradient per argument of forward; the last two are not tensors.
    variable_list result(9);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    std::array<bool, 7> mask;
    // needs_input_grad counts the tensors that were there.
    for (size_t i = 0, edge = 0; i < 7; ++i) mask[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    const std::string cell = ctx->saved_data["cell"].toStringRef();
    // With create_graph, grad mode is on here and the op's own autograd kernel answers with the reference.
    const auto found =
        backward_op().call(optional(grads[0]), optional(grads[1]), optional(grads[2]), saved[0], saved[1],
                           optional(saved[2]), saved[3], saved[4], optional(saved[5]), optional(saved[6]), saved[7],
                           saved[8], saved[9], cell, ctx->saved_data["reverse"].toBool(), mask);
    const std::array<Tensor, 7> gradients = std::apply([](const auto&... g) { return std::array{g...}; }, found);
    for (size_t i = 0; i < 7; ++i) {
      if (mask[i]) result[i] = gradients[i];
    }
    return result;
  }
};

Results scan_rnn_autograd(const Tensor& input, const Tensor& h0, const OptionalTensor& c0, const Tensor& w_ih,
                          const Tensor& w_hh, const OptionalTensor& b_ih, const OptionalTensor& b_hh,
                          c10::string_view cell, bool reverse, bool save) {
  if (!needs_grad(input, h0, c0, w_ih, w_hh, b_ih, b_hh)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op().call(input, h0, c0, w_ih, w_hh, b_ih, b_hh, cell, reverse, save);
  }
  const auto r = ScanRnn::apply(input, h0, c0, w_ih, w_hh, b_ih, b_hh, std::string(cell), reverse);
  return {r[0], r[1], r[2], r[3], r[4]};
}

ScanRnnGrads scan_rnn_backward_autograd(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                        const OptionalTensor& grad_c_n, const Tensor& input, const Tensor& h0,
                                        const OptionalTensor& c0, const Tensor& w_ih, const Tensor& w_hh,
                                        const OptionalTensor& b_ih, const OptionalTensor& b_hh, const Tensor& output,
                                        const Tensor& gates, const Tensor& cells, c10::string_view cell_name,
                                        bool reverse, std::array<bool, 7> output_mask) {
  if (!needs_grad(grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, b_ih, b_hh, output, gates, cells)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, b_ih, b_hh, output, gates,
                              cells, cell_name, reverse, output_mask);
  }
  const char* op = "weft::scan_rnn_backward";
  const Cell cell = parse_cell(op, cell_name);
  const auto sizes = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  check_scan_rnn_saved(op, cell, sizes, input, grad_output, grad_h_n, grad_c_n, output, gates, cells);
  // output, gates and cells are functions of the other arguments and are computed again from them: their part of the
  // gradient arrives there.
  return scan_rnn_backward_reference(grad_output, grad_h_n, grad_c_n, input, h0, c0, w_ih, w_hh, b_ih, b_hh, cell,
                                     reverse, output_mask);
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("scan_rnn", &scan_rnn_autograd);
  m.impl("scan_rnn_backward", &scan_rnn_backward_autograd);
}

}  // namespace
}  // namespace weft
