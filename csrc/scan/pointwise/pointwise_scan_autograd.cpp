// The gradient of pointwise_scan is pointwise_scan_backward, whose own gradient goes through a loop of torch's
// operations.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "common/saved_variables.h"
#include "scan/pointwise/pointwise_scan.h"

namespace weft::scan {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A tensor as save_for_backward takes it: of one that torch.inference_mode made, which it refuses, a copy.
Tensor savable(const Tensor& t) {
  return t.is_inference() ? t.clone() : t;
}

// What the user called, by the name that reports have.
std::string user_of(const std::string& name) {
  return name == "paragru" ? "weft.nn.ParaGRU" : name == "paralstm" ? "weft.nn.ParaLSTM" : "weft.scan.pointwise_scan";
}

class PointwiseScan : public torch::autograd::Function<PointwiseScan> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::TensorList& init, const at::TensorList& inputs,
                               const at::TensorList& parameters, const std::string& program, bool stacked, bool reverse,
                               const std::string& algorithm, const std::string& name) {
    at::AutoDispatchBelowADInplaceOrView guard;
    variable_list states = pointwise_scan_op(init, inputs, parameters, program, stacked, reverse, algorithm, name);
    variable_list saved;
    for (const at::TensorList list : {init, inputs, parameters, at::TensorList(states)}) {
      for (const Tensor& t : list) saved.push_back(savable(t));
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["states"] = static_cast<int64_t>(init.size());
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    ctx->saved_data["parameters"] = static_cast<int64_t>(parameters.size());
    ctx->saved_data["program"] = program;
    ctx->saved_data["stacked"] = stacked;
    ctx->saved_data["reverse"] = reverse;
    ctx->saved_data["algorithm"] = algorithm;
    ctx->saved_data["name"] = name;
    ctx->set_materialize_grads(false);
    return states;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = saved_variables<PointwiseScan>(ctx, user_of(ctx->saved_data["name"].toStringRef()));
    const auto count = [&](const char* list) { return static_cast<size_t>(ctx->saved_data[list].toInt()); };
    const size_t states = count("states"), inputs = count("inputs"), parameters = count("parameters");
    const size_t arguments = states + inputs + parameters;
    variable_list result(arguments + 5);  // one for each argument of forward
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) return result;
    OptionalTensors given;
    for (const Tensor& g : grads) given.push_back(optional(g));
    c10::List<bool> mask;
    for (size_t i = 0; i < arguments; ++i) mask.push_back(ctx->needs_input_grad(i));
    const at::TensorList all(saved);
    // With create_graph, grad mode is on here and the op's own autograd kernel answers.
    const variable_list found = pointwise_scan_backward_op(
        given, all.slice(0, states), all.slice(states, inputs), all.slice(states + inputs, parameters),
        all.slice(arguments, states), ctx->saved_data["program"].toStringRef(), ctx->saved_data["stacked"].toBool(),
        ctx->saved_data["reverse"].toBool(), ctx->saved_data["algorithm"].toStringRef(), mask);
    for (size_t i = 0; i < arguments; ++i) {
      if (mask[i]) result[i] = found[i];
    }
    return result;
  }
};

variable_list pointwise_forward_autograd(at::TensorList init, at::TensorList inputs, at::TensorList parameters,
                                         c10::string_view program, bool stacked, bool reverse,
                                         c10::string_view algorithm, c10::string_view name) {
  if (needs_grad(init, inputs, parameters)) {
    return PointwiseScan::apply(init, inputs, parameters, std::string(program), stacked, reverse,
                                std::string(algorithm), std::string(name));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return pointwise_scan_op(init, inputs, parameters, program, stacked, reverse, algorithm, name);
}

bool any_needs_grad(const OptionalTensors& list) {
  for (const std::optional<Tensor> t : list) {
    if (needs_grad(t)) return true;
  }
  return false;
}

variable_list pointwise_backward_autograd(const OptionalTensors& grads, at::TensorList init, at::TensorList inputs,
                                          at::TensorList parameters, at::TensorList states, c10::string_view program,
                                          bool stacked, bool reverse, c10::string_view algorithm,
                                          c10::List<bool> output_mask) {
  if (!any_needs_grad(grads) && !needs_grad(init, inputs, parameters, states)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return pointwise_scan_backward_op(grads, init, inputs, parameters, states, program, stacked, reverse, algorithm,
                                      output_mask);
  }
  // The states are functions of the other arguments and are computed again from them: their part of the gradient
  // arrives there.
  const Pointwise problem =
      check_pointwise("pointwise_scan_backward", init, inputs, parameters, program, stacked, reverse, algorithm);
  variable_list found = pointwise_backward_reference(problem, grads, output_mask);
  for (Tensor& t : found) {
    if (!t.defined()) t = at::empty({0}, init[0].options());
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("pointwise_scan", pointwise_forward_autograd);
  m.impl("pointwise_scan_backward", pointwise_backward_autograd);
}

TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("pointwise_scan_backward", torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
}

}  // namespace weft::scan
