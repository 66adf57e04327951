// vertex, as Python sees it: graphs and schedules, programs, the operators' calls, the call cache.
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace weft::vertex {

void bind_call_cache(py::module_& vertex);
void bind_frontiers(py::module_& vertex);
void bind_graphs(py::module_& vertex);
void bind_persistent(py::module_& vertex);
#ifdef WEFT_WITH_CUDA
void bind_training(py::module_& vertex);
#endif

void bind(py::module_& vertex, py::module_&) {
  bind_graphs(vertex);
  bind_frontiers(vertex);
  bind_call_cache(vertex);
  bind_persistent(vertex);
#ifdef WEFT_WITH_CUDA
  bind_training(vertex);
#endif
}

}  // namespace weft::vertex
