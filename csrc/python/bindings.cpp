// The Python module weft._C: loading it registers the operators; pybind11 carries only what is not a tensor. Each room
// binds its own in <room>/bindings.cpp, to a submodule of its name, and what only tests use to _C._testing.
#include <pybind11/pybind11.h>

namespace py = pybind11;

#define WEFT_ROOM(name)                               \
  namespace weft::name {                              \
  void bind(py::module_& room, py::module_& testing); \
  }

WEFT_ROOM(common)
WEFT_ROOM(sparse)
WEFT_ROOM(scan)
WEFT_ROOM(rnn)
WEFT_ROOM(vertex)
WEFT_ROOM(offload)
#ifdef WEFT_WITH_CUDA
WEFT_ROOM(jit)
#endif

PYBIND11_MODULE(_C, m) {
  m.doc() = "Weft's compiled operators; use them through torch.ops.weft or the weft package.";
  auto testing = m.def_submodule("_testing", "What only tests use.");
  const auto bind = [&](const char* name, const char* doc, void (*to)(py::module_&, py::module_&)) {
    auto room = m.def_submodule(name, doc);
    to(room, testing);
  };
  bind("common", "Costs of GPUs, element-wise instructions.", weft::common::bind);
  bind("sparse", "Planned products.", weft::sparse::bind);
  bind("scan", "Chains of Jacobians, reports of Newton runs, what a scan is expected to cost.", weft::scan::bind);
  bind("rnn", "What cells there are, how a layer would run on a GPU.", weft::rnn::bind);
  bind("vertex", "Graphs, schedules and programs as integers.", weft::vertex::bind);
  bind("offload", "The engine and its policy.", weft::offload::bind);
#ifdef WEFT_WITH_CUDA
  m.attr("with_cuda") = true;
  bind("jit", "Compiles kernels at run time.", weft::jit::bind);
#else
  m.attr("with_cuda") = false;
#endif
}
