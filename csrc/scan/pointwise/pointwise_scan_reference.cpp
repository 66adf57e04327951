// pointwise_scan as a loop of torch's operations, for gradients of gradients.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "scan/pointwise/pointwise_scan.h"

namespace weft::scan {
namespace {

using at::Tensor;

// torch's method of the instruction's name, but for roundings, which it has none for, and a choice.
Tensor applied(Elementwise op, const Tensor& a, const Tensor& b, const Tensor& c) {
  const auto type = a.scalar_type();
  if (op == Elementwise::kFloat16) return a.to(at::kHalf).to(type);
  if (op == Elementwise::kBFloat16) return a.to(at::kBFloat16).to(type);
  if (op == Elementwise::kSelect) return at::where(a != 0, b, c);
  const auto by_method = [&](const auto& t) -> Tensor {
    switch (op) {
#define WEFT_UNARY(name, Name, ...)         \
  case Elementwise::k##Name:                \
    if constexpr (requires { t.name(); }) { \
      return t.name();                      \
    }                                       \
    break;
#define WEFT_SCALAR WEFT_UNARY
#define WEFT_BINARY(name, Name, ...) \
  case Elementwise::k##Name:         \
    return t.name(b).to(type);  // a comparison is of booleans
#define WEFT_TERNARY(name, Name, ...) \
  case Elementwise::k##Name:          \
    break;
#include "common/elementwise.def"
    }
    TORCH_CHECK(false, "pointwise_scan: torch has no ", info(op).name);
  };
  return by_method(a);
}

// The states after a step, from the first registers: states, inputs and parameters.
std::vector<Tensor> run_step(const StepProgram& step, std::vector<Tensor> registers) {
  const at::TensorOptions options = registers[0].options();
  registers.resize(step.registers());
  for (const int32_t k : step.needed(step.next)) {
    const StepProgram::Instruction& i = step.code[k];
    Tensor& result = registers[step.first() + k];
    const auto& o = i.operands;
    switch (i.kind) {
      case StepProgram::Kind::kConstant:
        result = at::full({}, i.constant, options);
        break;
      case StepProgram::Kind::kStop:
        result = registers[o[0]].detach();
        break;
      case StepProgram::Kind::kElementwise:
        result = applied(i.op, registers[o[0]], registers[o[1]], registers[o[2]]);
        break;
    }
  }
  std::vector<Tensor> found;
  for (const int32_t r : step.next) found.push_back(registers[r]);
  return found;
}

}  // namespace

std::vector<Tensor> pointwise_backward_reference(const Pointwise& p, const OptionalTensors& grads,
                                                 const c10::List<bool>& output_mask) {
  const StepProgram& step = *p.step;
  // An edge of the graph for each argument, also for those that are the same tensor.
  const auto own = [](const std::vector<Tensor>& list) {
    std::vector<Tensor> found;
    for (const Tensor& t : list) {
      found.push_back(t.requires_grad() ? t.view_as(t) : t.detach().requires_grad_());
    }
    return found;
  };
  const std::vector<Tensor> init = own(p.init), inputs = own(p.inputs), parameters = own(p.parameters);
  std::vector<std::vector<Tensor>> x;  // of each input the steps
  for (int64_t i = 0; i < step.inputs; ++i) {
    Tensor all = inputs[p.stacked ? 0 : i];
    if (p.stacked) all = all.select(2, i).reshape(p.states_shape());
    x.push_back(all.to(p.acc).unbind(0));
  }
  std::vector<Tensor> h, wide;
  for (const Tensor& t : init) h.push_back(t.to(p.acc));
  for (const Tensor& t : parameters) wide.push_back(t.to(p.acc));
  std::vector<std::vector<Tensor>> all(step.states);
  for (int64_t k = 0; k < p.T; ++k) {
    std::vector<Tensor> registers = h;
    for (const auto& steps : x) registers.push_back(steps[p.reverse ? p.T - 1 - k : k]);
    registers.insert(registers.end(), wide.begin(), wide.end());
    h = run_step(step, std::move(registers));
    for (int32_t i = 0; i < step.states; ++i) all[i].push_back(h[i].expand(p.shape()));
  }
  std::vector<Tensor> outputs, given, wanted;
  for (int32_t i = 0; i < step.states && p.T > 0; ++i) {
    const std::optional<Tensor> grad = grads.get(i);
    if (!grad || !grad->defined()) continue;
    if (p.reverse) std::reverse(all[i].begin(), all[i].end());
    const Tensor states = at::stack(all[i]).to(p.dtype);
    if (!states.requires_grad()) continue;
    outputs.push_back(states);
    given.push_back(*grad);
  }
  size_t argument = 0;
  for (const auto* list : {&init, &inputs, &parameters}) {
    for (const Tensor& t : *list) {
      if (output_mask[argument++]) wanted.push_back(t);
    }
  }
  std::vector<Tensor> found(wanted.size());
  if (!outputs.empty() && !wanted.empty()) {
    found = torch::autograd::grad(outputs, wanted, given, /*retain_graph=*/true, /*create_graph=*/true,
                                  /*allow_unused=*/true);
  }
  std::vector<Tensor> results;
  size_t next = 0;
  argument = 0;
  for (const auto* list : {&init, &inputs, &parameters}) {
    for (const Tensor& t : *list) {
      if (!output_mask[argument++]) {
        results.emplace_back();
        continue;
      }
      const Tensor& g = found[next++];
      results.push_back(g.defined() ? g : at::zeros(t.sizes(), t.options()));
    }
  }
  return results;
}

}  // namespace weft::scan
