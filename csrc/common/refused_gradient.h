// The autograd kernel of an operator without a gradient: its floating results are part of the graph, and a backward
// that reaches them is refused by name, as forward-mode AD is at once.
#pragma once
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <string>

#include "common/autograd.h"

namespace weft {

class RefusedGradient : public torch::autograd::Function<RefusedGradient> {
 public:
  using Results = torch::autograd::variable_list;

  // `input` is the argument that a gradient would be of, and `call` calls the operator.
  static Results forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input, const std::string& op,
                         const std::function<Results()>& call) {
    refuse_if(has_tangent(input), op);
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["op"] = op;
    Results results = call(), integers;
    for (const at::Tensor& t : results) {
      if (!t.is_floating_point()) integers.push_back(t);
    }
    ctx->mark_non_differentiable(integers);
    return results;
  }
  static Results backward(torch::autograd::AutogradContext* ctx, const Results&) {
    refuse_if(true, ctx->saved_data["op"].toStringRef());
    return {};
  }

 private:
  static void refuse_if(bool asked, const std::string& op) {
    TORCH_CHECK(!asked, op, ": not differentiable; give it a detached tensor");
  }
};

}  // namespace weft
