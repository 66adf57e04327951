// What the autograd kernels of all rooms ask of their tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>

namespace weft {

using OptionalTensor = std::optional<at::Tensor>;

inline bool requires_grad(const at::Tensor& t) {
  return t.defined() && t.requires_grad();
}
inline bool requires_grad(const OptionalTensor& t) {
  return t && requires_grad(*t);
}
inline bool requires_grad(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return requires_grad(t); });
}

// Whether forward-mode AD follows the tensor: a C++ node refuses it, where a kernel alone would lose the tangent.
inline bool has_tangent(const at::Tensor& t) {
  return t.defined() && t._fw_grad(0).defined();
}
inline bool has_tangent(const OptionalTensor& t) {
  return t && has_tangent(*t);
}
inline bool has_tangent(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return has_tangent(t); });
}

// Whether a call on these tensors has to leave a node in the graph.
template <typename... Tensors>
bool needs_grad(const Tensors&... tensors) {
  return (at::GradMode::is_enabled() && (requires_grad(tensors) || ...)) || (has_tangent(tensors) || ...);
}

// An argument as save_for_backward takes it, and back.
inline at::Tensor or_undefined(const OptionalTensor& t) {
  return t ? *t : at::Tensor();
}
inline OptionalTensor optional(const at::Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

}  // namespace weft
