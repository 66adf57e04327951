// The gradient of weft::rnn_cell is weft::rnn_cell_backward, whose own gradient goes through the reference.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "common/saved_variables.h"
#include "rnn/rnn.h"
#include "rnn/step/rnn_cell.h"
#include "rnn/step/rnn_cell_reference.h"

namespace weft::rnn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using CellResults = std::tuple<Tensor, Tensor, Tensor>;

class RnnCell : public torch::autograd::Function<RnnCell> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& h, const OptionalTensor& c,
                               const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                               const OptionalTensor& b_hh, const std::string& cell, int64_t heads) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [h_next, c_next, gates] = rnn_cell_op(input, h, c, w_ih, w_hh, b_ih, b_hh, cell, /*save=*/true, heads);
    ctx->save_for_backward(
        {input, h, or_undefined(c), w_ih, w_hh, or_undefined(b_ih), or_undefined(b_hh), h_next, c_next, gates});
    ctx->saved_data["cell"] = cell;
    ctx->saved_data["heads"] = heads;
    ctx->set_materialize_grads(false);
    if (c) {
      ctx->mark_non_differentiable({gates});
    } else {
      ctx->mark_non_differentiable({c_next, gates});
    }
    return {h_next, c_next, gates};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    constexpr size_t kOperands = std::tuple_size_v<RnnCellMask>;
    variable_list result(kOperands + 2);  // the cell's name and the heads have none
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) return result;
    const auto saved = saved_variables<RnnCell>(
        ctx, layer_of(parse_cell("weft::rnn_cell", ctx->saved_data["cell"].toStringRef())) + "Cell");
    RnnCellMask mask;
    // needs_input_grad counts the tensors that were there.
    for (size_t i = 0, edge = 0; i < kOperands; ++i) mask[i] = saved[i].defined() && ctx->needs_input_grad(edge++);
    // With create_graph, grad mode is on here and the op's own autograd kernel answers with the reference.
    const auto found =
        rnn_cell_backward_op(optional(grads[0]), optional(grads[1]), saved[0], saved[1], optional(saved[2]), saved[3],
                             saved[4], optional(saved[5]), optional(saved[6]), saved[7], saved[8], saved[9],
                             ctx->saved_data["cell"].toStringRef(), mask, ctx->saved_data["heads"].toInt());
    for (size_t i = 0; i < kOperands; ++i) {
      if (mask[i]) result[i] = found[i];
    }
    return result;
  }
};

CellResults rnn_cell_autograd(const Tensor& input, const Tensor& h, const OptionalTensor& c, const Tensor& w_ih,
                              const Tensor& w_hh, const OptionalTensor& b_ih, const OptionalTensor& b_hh,
                              c10::string_view cell, bool save, int64_t heads) {
  if (!needs_grad(input, h, c, w_ih, w_hh, b_ih, b_hh)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rnn_cell_op(input, h, c, w_ih, w_hh, b_ih, b_hh, cell, save, heads);
  }
  const auto r = RnnCell::apply(input, h, c, w_ih, w_hh, b_ih, b_hh, std::string(cell), heads);
  return {r[0], r[1], r[2]};
}

std::vector<Tensor> rnn_cell_backward_autograd(const OptionalTensor& grad_h_next, const OptionalTensor& grad_c_next,
                                               const Tensor& input, const Tensor& h, const OptionalTensor& c,
                                               const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                                               const OptionalTensor& b_hh, const Tensor& h_next, const Tensor& c_next,
                                               const Tensor& gates, c10::string_view cell, RnnCellMask mask,
                                               int64_t heads) {
  if (!needs_grad(grad_h_next, grad_c_next, input, h, c, w_ih, w_hh, b_ih, b_hh, h_next, c_next, gates)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rnn_cell_backward_op(grad_h_next, grad_c_next, input, h, c, w_ih, w_hh, b_ih, b_hh, h_next, c_next, gates,
                                cell, mask, heads);
  }
  const char* op = "weft::rnn_cell_backward";
  const RnnCellArgs args{input, h, c, w_ih, w_hh, b_ih, b_hh, parse_cell(op, cell), heads};
  const RnnCellGrads grads{grad_h_next, grad_c_next};
  check_rnn_cell(op, args);
  check_rnn_cell_saved(op, args, grads, {h_next, c_next, gates});
  // h_next, c_next and gates are functions of the other arguments and are computed again from them: their part of the
  // gradient arrives there.
  return rnn_cell_backward_reference(grads, args, mask);
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("rnn_cell", &rnn_cell_autograd);
  m.impl("rnn_cell_backward", &rnn_cell_backward_autograd);
}

TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("rnn_cell_backward", torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
}

}  // namespace
}  // namespace weft::rnn
