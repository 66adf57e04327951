// weft::rnn_backward under torch's older vmap, which torch.autograd.grad(is_grads_batched=True), and with it vectorised
// Jacobians and gradcheck, still use: one call for each index. That vmap's own fallback takes no lists of tensors; the
// rules for torch.func.vmap are in python/weft/_fake.py.
#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace weft {
namespace {

using at::Tensor;

// Calls `visit` on every tensor of an argument or result.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) visit(t);
  }
}

template <typename Change>
c10::IValue with_each_tensor(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (!value.isTensorList()) return value;
  std::vector<Tensor> changed = value.toTensorVector();
  for (Tensor& t : changed) t = change(t);
  return changed;
}

// What a tensor is at one index of the dimension that is mapped at `level`; other levels stay mapped.
Tensor select_level(const Tensor& tensor, int64_t level, int64_t index) {
  const auto* batched = tensor.defined() ? at::maybeGetBatchedImpl(tensor) : nullptr;
  if (batched == nullptr) return tensor;
  const auto dims = batched->bdims();
  const auto found = std::find_if(dims.begin(), dims.end(), [&](const auto& d) { return d.level() == level; });
  if (found == dims.end()) return tensor;
  at::BatchDims others;
  for (const auto& d : dims) {
    if (d.level() != level) others.emplace_back(d.level(), d.dim() - (d.dim() > found->dim() ? 1 : 0));
  }
  const Tensor value = batched->value().select(found->dim(), index);
  return others.empty() ? value : at::makeBatched(value, others);
}

void one_by_one(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  int64_t level = -1, size = 0;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const Tensor& t) {
      const auto* batched = t.defined() ? at::maybeGetBatchedImpl(t) : nullptr;
      if (batched == nullptr || batched->bdims().back().level() <= level) return;
      level = batched->bdims().back().level();  // the innermost: levels ascend
      size = batched->value().size(batched->bdims().back().dim());
    });
  }
  TORCH_CHECK(size > 0, "weft: vmap over no element is not supported");

  std::vector<std::vector<Tensor>> results;  // one list for each result of the op
  for (int64_t index = 0; index < size; ++index) {
    torch::jit::Stack call;
    for (const auto& argument : arguments) {
      call.push_back(with_each_tensor(argument, [&](const Tensor& t) { return select_level(t, level, index); }));
    }
    op.callBoxed(&call);
    const std::vector<Tensor> found = call.at(0).toTensorVector();
    results.resize(found.size());
    for (size_t i = 0; i < found.size(); ++i) results[i].push_back(found[i]);
  }
  std::vector<Tensor> joined;
  for (const auto& parts : results) joined.push_back(at::addBatchDim(at::stack(parts), level, 0));
  stack->emplace_back(joined);
}

TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("rnn_backward", torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
}

}  // namespace
}  // namespace weft
