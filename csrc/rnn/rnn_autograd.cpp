// The gradient of weft::rnn is weft::rnn_backward, whose own gradient goes through the reference.
#include <ATen/ops/zeros.h>
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
#include "rnn/rnn_reference.h"

namespace weft::rnn {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// A tensor as save_for_backward takes it: of one that torch.inference_mode made, which it refuses, a copy.
Tensor savable(const Tensor& t) {
  return t.defined() && t.is_inference() ? t.clone() : t;
}

class Rnn : public torch::autograd::Function<Rnn> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& h0,
                               const OptionalTensor& c0, const at::TensorList& weights,
                               const OptionalTensor& batch_sizes, const std::string& cell, bool bidirectional,
                               const std::string& way, int64_t heads) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, h_n, c_n, cells, gates] = rnn_op(input, h0, c0, weights, batch_sizes, cell, bidirectional,
                                                   /*keep_cells=*/true, /*save=*/true, way, heads);
    variable_list saved{input, or_undefined(h0), or_undefined(c0)};
    saved.insert(saved.end(), weights.begin(), weights.end());
    saved.insert(saved.end(), {or_undefined(batch_sizes), output, cells, gates});
    std::transform(saved.begin(), saved.end(), saved.begin(), savable);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["cell"] = cell;
    ctx->saved_data["bidirectional"] = bidirectional;
    ctx->saved_data["backward"] = way;
    ctx->saved_data["heads"] = heads;
    ctx->set_materialize_grads(false);
    if (has_c(parse_cell("weft::rnn", cell))) {
      ctx->mark_non_differentiable({gates});
    } else {
      ctx->mark_non_differentiable({c_n, cells, gates});
    }
    return {output, h_n, c_n, cells, gates};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved =
        saved_variables<Rnn>(ctx, layer_of(parse_cell("weft::rnn", ctx->saved_data["cell"].toStringRef())));
    const size_t operands = saved.size() - 4;  // input, h0, c0 and the weights
    // One gradient per argument of forward; those after the weights have none.
    variable_list result(operands + 5);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) return result;
    c10::List<bool> mask;
    mask.reserve(operands);
    // needs_input_grad counts the tensors that were there.
    for (size_t i = 0, edge = 0; i < operands; ++i) {
      mask.push_back(saved[i].defined() && ctx->needs_input_grad(edge++));
    }
    const std::string &cell = ctx->saved_data["cell"].toStringRef(), &way = ctx->saved_data["backward"].toStringRef();
    // With create_graph, grad mode is on here and the op's own autograd kernel answers with the reference.
    const auto found =
        rnn_backward_op(optional(grads[0]), optional(grads[1]), optional(grads[2]), optional(grads[3]), saved[0],
                        optional(saved[1]), optional(saved[2]), at::TensorList(saved).slice(3, operands - 3),
                        optional(saved[operands]), saved[operands + 1], saved[operands + 2], saved[operands + 3], cell,
                        ctx->saved_data["bidirectional"].toBool(), mask, way, ctx->saved_data["heads"].toInt());
    for (size_t i = 0; i < operands; ++i) {
      if (mask[i]) result[i] = found[i];
    }
    return result;
  }
};

Results rnn_autograd(const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0, at::TensorList weights,
                     const OptionalTensor& batch_sizes, c10::string_view cell, bool bidirectional, bool keep_cells,
                     bool save, c10::string_view way, int64_t heads) {
  if (!needs_grad(input, h0, c0, weights)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rnn_op(input, h0, c0, weights, batch_sizes, cell, bidirectional, keep_cells, save, way, heads);
  }
  OptionalTensor h = h0, c = c0;
  if (way == "scan" && heads == 1 && scan_max_hidden(parse_cell("weft::rnn", cell)) > 0 && !h0 && !c0 &&
      input.dim() == 3 && weights.size() > 1 && weights[1].dim() == 2) {
    // The scan's kernels read an initial state in both passes: it is made once.
    h = at::zeros_symint({bidirectional ? 2 : 1, input.sym_size(1), weights[1].sym_size(1)}, input.options());
    if (has_c(parse_cell("weft::rnn", cell))) c = h;
  }
  const auto r =
      Rnn::apply(input, h, c, weights, batch_sizes, std::string(cell), bidirectional, std::string(way), heads);
  return {r[0], r[1], r[2], r[3], r[4]};
}

std::vector<Tensor> rnn_backward_autograd(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                          const OptionalTensor& grad_c_n, const OptionalTensor& grad_cells,
                                          const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
                                          at::TensorList weights, const OptionalTensor& batch_sizes,
                                          const Tensor& output, const Tensor& cells, const Tensor& gates,
                                          c10::string_view cell_name, bool bidirectional, c10::List<bool> output_mask,
                                          c10::string_view way, int64_t heads) {
  if (!needs_grad(grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, weights, output, cells, gates)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return rnn_backward_op(grad_output, grad_h_n, grad_c_n, grad_cells, input, h0, c0, weights, batch_sizes, output,
                           cells, gates, cell_name, bidirectional, output_mask, way, heads);
  }
  const char* op = "weft::rnn_backward";
  TORCH_CHECK(
      !batch_sizes || !batch_sizes->unsafeGetTensorImpl()->is_python_dispatch(), op,
      ": in a compiled graph, where the values of batch_sizes are unknown, packed input is differentiable once");
  const RnnArgs args{
      input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional, parse_backward(op, way), heads};
  const RnnGrads grads{grad_output, grad_h_n, grad_c_n, grad_cells};
  const RnnSizes sizes = check_rnn(op, args);
  check_rnn_saved(op, args, sizes, grads, output, cells, gates, output_mask);
  // output, cells and gates are functions of the other arguments and are computed again from them: their part of the
  // gradient arrives there.
  return rnn_backward_reference(grads, args, sizes, output_mask);
}

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("rnn", &rnn_autograd);
  m.impl("rnn_backward", &rnn_backward_autograd);
}

TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("rnn_backward", torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
}

}  // namespace
}  // namespace weft::rnn
