#include "common/legacy_vmap.h"

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>
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
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<Tensor> t : value.toOptionalTensorList()) {
      if (t) visit(*t);
    }
  }
}

template <typename Change>
c10::IValue with_each_tensor(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor> t : value.toOptionalTensorList()) {
      changed.push_back(t ? std::optional<Tensor>(change(*t)) : std::nullopt);
    }
    return changed;
  }
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

}  // namespace

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

  std::vector<std::vector<Tensor>> parts;  // one list for each tensor of the results
  torch::jit::Stack results;
  for (int64_t index = 0; index < size; ++index) {
    results.clear();
    for (const auto& argument : arguments) {
      results.push_back(with_each_tensor(argument, [&](const Tensor& t) { return select_level(t, level, index); }));
    }
    op.callBoxed(&results);
    size_t place = 0;
    for (const auto& value : results) {
      for_each_tensor(value, [&](const Tensor& t) {
        if (index == 0) parts.emplace_back();
        parts[place++].push_back(t);
      });
    }
  }
  size_t place = 0;
  for (const auto& value : results) {
    stack->push_back(with_each_tensor(value, [&](const Tensor& t) {
      const std::vector<Tensor>& all = parts[place++];
      return t.defined() ? at::addBatchDim(at::stack(all), level, 0) : t;
    }));
  }
}

}  // namespace weft
