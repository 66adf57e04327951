#include "scan/pointwise/pointwise_scan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>

#include "common/check.h"
#include "common/integers.h"

namespace weft::scan {
namespace {

constexpr int64_t kLeastChunk = 64, kMaxChunks = 128, kLeastSteps = 256;

int64_t product(at::IntArrayRef sizes) {
  int64_t n = 1;
  for (const int64_t s : sizes) n *= s;
  return n;
}

// n -> n / inner * outer + n % inner of the dimensions from `first` on, where their strides are of that kind.
std::optional<PointwiseOperand> channels_of(const at::Tensor& t, int64_t first) {
  PointwiseOperand o{nullptr, 0, 0, 1};
  int64_t d = t.dim() - 1;
  const auto skip = [&] {
    while (d >= first && t.size(d) == 1) --d;
  };
  skip();
  while (d >= first && t.stride(d) == o.inner) {
    o.inner *= t.size(d--);
    skip();
  }
  if (d < first) return o;
  o.outer = t.stride(d);
  int64_t size = t.size(d--);
  for (skip(); d >= first; skip()) {
    if (t.stride(d) != o.outer * size) return std::nullopt;
    size *= t.size(d--);
  }
  return o;
}

}  // namespace

std::vector<int64_t> Pointwise::states_shape() const {
  std::vector<int64_t> found{T};
  found.insert(found.end(), shape().begin(), shape().end());
  return found;
}

Pointwise check_pointwise(const char* op, at::TensorList init, at::TensorList inputs, at::TensorList parameters,
                          c10::string_view program, bool stacked, bool reverse, c10::string_view algorithm) {
  Pointwise p;
  try {
    p.step = &step_program(std::string(program));
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  const auto counted = [&](const char* name, at::TensorList list, int64_t want) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(list.size()) == want, op, ": ", name, " must be ", want,
                      " tensors for this program, got ", list.size());
  };
  counted("init", init, p.step->states);
  counted("inputs", inputs, stacked ? 1 : p.step->inputs);
  counted("parameters", parameters, p.step->parameters);
  p.chunks_allowed = algorithm == "auto" || algorithm == "newton";
  p.chunks_wanted = algorithm == "newton";
  TORCH_CHECK_VALUE(p.chunks_allowed || algorithm == "walk", op,
                    ": algorithm must be 'auto', 'walk' or 'newton', got '", algorithm, "'");
  check_floating(op, "init[0]", init[0]);
  const auto like = [&](const char* list, size_t i, const at::Tensor& t) {
    check_like(op, (std::string(list) + "[" + std::to_string(i) + "]").c_str(), t, "init[0]", init[0]);
  };
  const at::IntArrayRef shape = init[0].sizes();
  for (size_t i = 0; i < init.size(); ++i) {
    like("init", i, init[i]);
    TORCH_CHECK_VALUE(init[i].sizes() == shape, op, ": init[", i, "] must have the shape of init[0], ", shape, ", got ",
                      init[i].sizes());
  }
  p.N = product(shape);
  TORCH_CHECK_VALUE(inputs[0].dim() > 0, op, ": inputs[0] must have a dimension of time");
  p.T = inputs[0].size(0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    like("inputs", i, inputs[i]);
    if (stacked) {
      TORCH_CHECK_VALUE(
          inputs[i].dim() == 4 && inputs[i].size(2) == p.step->inputs && inputs[i].size(1) * inputs[i].size(3) == p.N,
          op, ": inputs[0] must be (T, O, ", p.step->inputs, ", W) with O * W = ", p.N, ", got ", inputs[i].sizes());
    } else {
      TORCH_CHECK_VALUE(
          inputs[i].dim() == init[0].dim() + 1 && inputs[i].size(0) == p.T && inputs[i].sizes().slice(1) == shape, op,
          ": inputs[", i, "] must be (", p.T, ", *shape of init ", shape, "), got ", inputs[i].sizes());
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    like("parameters", i, parameters[i]);
    bool fits = parameters[i].dim() <= static_cast<int64_t>(shape.size());
    for (int64_t d = 1; fits && d <= parameters[i].dim(); ++d) {
      fits = parameters[i].size(-d) == 1 || parameters[i].size(-d) == shape[shape.size() - d];
    }
    TORCH_CHECK_VALUE(fits, op, ": parameters[", i, "] must broadcast to the shape of init, ", shape, ", got ",
                      parameters[i].sizes());
  }
  p.init = init.vec();
  p.inputs = inputs.vec();
  p.parameters = parameters.vec();
  p.stacked = stacked;
  p.reverse = reverse;
  p.dtype = init[0].scalar_type();
  p.acc = p.dtype == at::kDouble ? at::kDouble : at::kFloat;
  return p;
}

PointwisePlan plan_pointwise(int64_t T, int64_t N, int64_t batch, int64_t busy, bool allowed, bool wanted) {
  const PointwisePlan whole{1, std::max<int64_t>(1, T)};
  if (!allowed || T <= batch || N == 0) return whole;
  if (!wanted && (T < kLeastSteps || 2 * N > busy)) return whole;
  int64_t chunks = std::min({busy / N, T / kLeastChunk, kMaxChunks});
  if (chunks < 2) {
    if (!wanted) return whole;
    chunks = 2;
  }
  const int64_t chunk = ceil_div(ceil_div(T, chunks), batch) * batch;
  return {ceil_div(T, chunk), chunk};
}

PointwiseOperand describe_channels(const at::Tensor& t, bool timed, std::vector<at::Tensor>& kept) {
  std::optional<PointwiseOperand> o = channels_of(t, timed);
  kept.push_back(o ? t : t.contiguous());
  if (!o) o = channels_of(kept.back(), timed);
  o->data = const_cast<void*>(kept.back().const_data_ptr());
  o->step = timed ? kept.back().stride(0) : 0;
  return *o;
}

namespace {

PointwiseOperand stacked_operand(const at::Tensor& t, int64_t i) {
  const int64_t W = t.size(3);
  return {static_cast<char*>(const_cast<void*>(t.const_data_ptr())) + i * W * t.element_size(), t.stride(0),
          t.stride(1), W};
}

}  // namespace

PointwiseArgs describe_pointwise(const Pointwise& p, const PointwisePlan& plan, std::vector<at::Tensor>& kept) {
  PointwiseArgs a{};
  PointwiseOperand* to = a.operands;
  for (const at::Tensor& t : p.init) *to++ = describe_channels(t, /*timed=*/false, kept);
  if (p.stacked) {
    kept.push_back(p.inputs[0].contiguous());
    const at::Tensor gates = kept.back();
    for (int64_t i = 0; i < p.step->inputs; ++i) *to++ = stacked_operand(gates, i);
  } else {
    for (const at::Tensor& t : p.inputs) *to++ = describe_channels(t, /*timed=*/true, kept);
  }
  for (const at::Tensor& t : p.parameters) *to++ = describe_channels(t.expand(p.shape()), /*timed=*/false, kept);
  a.T = p.T;
  a.N = p.N;
  a.chunk = plan.chunk;
  a.chunks = static_cast<int>(plan.chunks);
  a.reverse = p.reverse;
  return a;
}

PointwiseGradients::PointwiseGradients(const Pointwise& p, const OptionalTensors& grads, at::TensorList states,
                                       const c10::List<bool>& output_mask, const PointwisePlan& plan,
                                       PointwiseArgs& args, std::vector<at::Tensor>& kept)
    : problem_(p) {
  const char* op = "pointwise_scan_backward";
  const StepProgram& step = *p.step;
  const std::vector<int64_t> shape = p.states_shape();
  const auto list = [&](const char* name, size_t size) {
    TORCH_CHECK_VALUE(size == static_cast<size_t>(step.states), op, ": ", name, " must be ", step.states,
                      " tensors, got ", size);
  };
  list("grads", grads.size());
  list("states", states.size());
  const size_t arguments = p.init.size() + p.inputs.size() + p.parameters.size();
  TORCH_CHECK_VALUE(output_mask.size() == arguments, op, ": output_mask must have ", arguments, " elements, got ",
                    output_mask.size());
  for (int64_t i = 0; i < step.states; ++i) {
    check_like(op, "states", states[i], "init[0]", p.init[0]);
    check_shape(op, "states", states[i], shape, "(T, *shape of init)");
    kept.push_back(states[i].contiguous());
    args.states[i] = p.empty() ? nullptr : const_cast<void*>(kept.back().const_data_ptr());
    const std::optional<at::Tensor> grad = grads.get(i);
    if (!grad || !grad->defined()) continue;
    check_like(op, "grads", *grad, "init[0]", p.init[0]);
    check_shape(op, "grads", *grad, shape, "(T, *shape of init)");
    if (p.empty()) continue;
    given_ |= 1u << i;
    args.grads[i] = describe_channels(*grad, /*timed=*/true, kept);
  }
  // Of the tensors that the operator got to the operands of the program: stacked inputs are many.
  size_t argument = 0;
  const at::TensorOptions options = p.init[0].options();
  for (int64_t i = 0; i < step.states; ++i, ++argument) {
    made_.push_back(output_mask[argument] ? at::empty(p.shape(), options) : at::empty({0}, options));
    if (!output_mask[argument] || p.empty()) continue;
    wanted_ |= uint64_t{1} << i;
    args.results[i] = {made_.back().mutable_data_ptr(), 0, 0, p.N};
  }
  for (size_t k = 0; k < p.inputs.size(); ++k, ++argument) {
    made_.push_back(output_mask[argument] ? at::empty(p.inputs[k].sizes(), options) : at::empty({0}, options));
    if (!output_mask[argument] || p.empty()) continue;
    const at::Tensor& made = made_.back();
    for (int64_t i = p.stacked ? 0 : static_cast<int64_t>(k);
         i < (p.stacked ? step.inputs : static_cast<int64_t>(k) + 1); ++i) {
      wanted_ |= uint64_t{1} << (step.states + i);
      args.results[step.states + i] =
          p.stacked ? stacked_operand(made, i) : PointwiseOperand{made.mutable_data_ptr(), p.N, 0, p.N};
    }
  }
  bool sums = false;
  for (int64_t i = 0; i < step.parameters; ++i) sums = sums || output_mask[argument + i];
  if (sums && !p.empty()) sums_ = at::empty({step.parameters, plan.chunks, p.N}, options.dtype(p.acc));
  for (int64_t i = 0; i < step.parameters; ++i, ++argument) {
    made_.push_back(output_mask[argument] ? at::Tensor() : at::empty({0}, options));
    if (!output_mask[argument] || p.empty()) continue;
    wanted_ |= uint64_t{1} << (step.states + step.inputs + i);
    args.results[step.states + step.inputs + i] = {sums_.select(0, i).mutable_data_ptr(), 0, 0, p.N};
  }
}

std::vector<at::Tensor> PointwiseGradients::results() {
  const Pointwise& p = problem_;
  const size_t first = p.init.size() + p.inputs.size();
  // The sums over chunks and over what is broadcast.
  const auto reduced = [&](const at::Tensor& of, const at::Tensor& like) {
    std::vector<int64_t> shape{of.size(0)}, dims{0};
    shape.insert(shape.end(), p.shape().begin(), p.shape().end());
    const int64_t all = static_cast<int64_t>(p.shape().size()), lead = all - like.dim();
    for (int64_t d = 0; d < all; ++d) {
      if (d < lead || (like.size(d - lead) == 1 && p.shape()[d] != 1)) dims.push_back(1 + d);
    }
    return at::sum(of.view(shape), dims).reshape(like.sizes()).to(p.dtype);
  };
  if (p.empty()) {
    for (size_t i = 0; i < made_.size(); ++i) {
      if (!made_[i].defined()) made_[i] = at::zeros(p.parameters[i - first].sizes(), p.init[0].options());
    }
    // Without steps the state at the end is the initial one, which no result has.
    for (size_t i = 0; i < p.init.size(); ++i) made_[i].zero_();
    return made_;
  }
  for (size_t i = first; i < made_.size(); ++i) {
    if (!made_[i].defined()) {
      made_[i] = reduced(sums_.select(0, static_cast<int64_t>(i - first)), p.parameters[i - first]);
    }
  }
  return made_;
}

}  // namespace weft::scan
