// The frontiers have no derivative of their own: weft.vertex's autograd function has.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "vertex/vertex_frontiers.h"

namespace weft::vertex {
namespace {

template <typename... Lists>
void refuse(const char* op, const Lists&... lists) {
  TORCH_CHECK(!needs_grad(lists...), op,
              ": has no derivative as an operator; call it through weft.VertexFunction, which has");
}

std::vector<at::Tensor> forward(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                const at::Tensor& schedule, const at::Tensor& host_schedule, const at::Tensor& program,
                                const at::Tensor& constants, at::ScalarType dtype) {
  refuse("vertex_frontiers", inputs, matrices, vectors);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("weft::vertex_frontiers", "").typed<decltype(forward)>();
  return op.call(inputs, matrices, vectors, schedule, host_schedule, program, constants, dtype);
}

std::vector<at::Tensor> backward(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                 at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                 const at::Tensor& host_schedule, const at::Tensor& program,
                                 const at::Tensor& constants, at::ScalarType dtype) {
  refuse("vertex_frontiers_backward", grads, inputs, matrices, vectors, saved);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("weft::vertex_frontiers_backward", "").typed<decltype(backward)>();
  return op.call(grads, inputs, matrices, vectors, saved, schedule, host_schedule, program, constants, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("vertex_frontiers", forward);
  m.impl("vertex_frontiers_backward", backward);
}

}  // namespace weft::vertex
