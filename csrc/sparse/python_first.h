// Whether a call that Python would make through torch.ops may go to C++ at once.
#pragma once
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include "common/autograd.h"

namespace weft::sparse {

// Python has to look first under modes that override functions and under transforms.
inline bool python_first() {
  return at::impl::torch_function_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// And at subclasses, and at what forward-mode AD follows.
inline bool python_first(pybind11::handle tensor) {
  return !THPVariable_CheckExact(tensor.ptr()) || has_tangent(THPVariable_Unpack(tensor.ptr()));
}

}  // namespace weft::sparse
