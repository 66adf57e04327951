// torch's older vmap, which torch.autograd.grad(is_grads_batched=True), and with it vectorised Jacobians and gradcheck,
// still use. Its own fallback takes no lists of tensors.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace weft {

// A Batched kernel for any op: one call for each index of the mapped dimension. The rules for torch.func.vmap are
// Python's.
void one_by_one(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace weft
