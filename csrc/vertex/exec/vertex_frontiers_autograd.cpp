// The frontiers have no derivative of their own: weft.vertex's autograd function has.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "common/autograd.h"
#include "common/legacy_vmap.h"
#include "common/refused_gradient.h"
#include "vertex/exec/vertex_frontiers.h"
#include "vertex/program/object.h"

namespace weft::vertex {
namespace {

using Results = std::vector<at::Tensor>;

// What `call` returns; a gradient through it is refused where one of the operands requires it, and a tangent at once.
template <typename Call, typename... Lists>
Results refused(const char* op, const Call& call, const Lists&... lists) {
  const at::Tensor* input = nullptr;
  const auto look = [&](at::TensorList list, const auto& wanted) {
    const auto found = std::find_if(list.begin(), list.end(), wanted);
    if (input == nullptr && found != list.end()) input = &*found;
  };
  (look(lists, [](const at::Tensor& t) { return has_tangent(t); }), ...);
  (look(lists, [](const at::Tensor& t) { return needs_grad(t); }), ...);
  const auto below = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call();
  };
  if (input == nullptr) return below();
  return RefusedGradient::apply(*input, std::string(op), below);
}

Results forward_autograd(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                         const at::Tensor& schedule, const at::Tensor& host_schedule, const ProgramPointer& program,
                         c10::SymInt num_vertices, c10::SymInt num_inner, c10::SymInt num_edges) {
  const auto call = [&] {
    return vertex_frontiers_op(inputs, matrices, vectors, schedule, host_schedule, program, num_vertices, num_inner,
                               num_edges);
  };
  return refused("vertex_frontiers", call, inputs, matrices, vectors);
}

Results backward_autograd(at::TensorList grads, at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                          at::TensorList saved, const at::Tensor& schedule, const at::Tensor& host_schedule,
                          const ProgramPointer& program, at::IntArrayRef of_inputs, at::IntArrayRef of_matrices,
                          at::IntArrayRef of_vectors, bool overlap) {
  const auto call = [&] {
    return vertex_frontiers_backward_op(grads, inputs, matrices, vectors, saved, schedule, host_schedule, program,
                                        of_inputs, of_matrices, of_vectors, overlap);
  };
  return refused("vertex_frontiers_backward", call, grads, inputs, matrices, vectors, saved);
}

}  // namespace

TORCH_LIBRARY_IMPL(weft, Autograd, m) {
  m.impl("vertex_frontiers", forward_autograd);
  m.impl("vertex_frontiers_backward", backward_autograd);
}

TORCH_LIBRARY_IMPL(weft, Batched, m) {
  m.impl("vertex_frontiers_backward", torch::CppFunction::makeFromBoxedFunction<&one_by_one>());
}

}  // namespace weft::vertex
