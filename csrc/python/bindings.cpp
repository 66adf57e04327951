// The Python module weft._C: loading it registers the operators; pybind11 carries only what is not a tensor. Each room
// binds its own in <room>/bindings.cpp.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace weft::costs {
void bind(py::module_& m);
}
namespace weft::offload {
void bind(py::module_& m);
}
namespace weft::rnn {
void bind(py::module_& m);
}
namespace weft::scan {
void bind(py::module_& m);
}
namespace weft::sparse {
void bind(py::module_& m);
}
namespace weft::vertex {
void bind(py::module_& m);
}

#ifdef WEFT_WITH_CUDA
namespace weft::jit {
void bind(py::module_& m);
}
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "Weft's compiled operators; use them through torch.ops.weft or the weft package.";
  m.def_submodule("_testing", "What only tests use.");
  weft::costs::bind(m);
  weft::offload::bind(m);
  weft::rnn::bind(m);
  weft::scan::bind(m);
  weft::sparse::bind(m);
  weft::vertex::bind(m);
#ifdef WEFT_WITH_CUDA
  m.attr("with_cuda") = true;
  weft::jit::bind(m);
#else
  m.attr("with_cuda") = false;
#endif
}
