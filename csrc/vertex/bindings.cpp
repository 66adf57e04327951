// The room's submodule of the library: graphs and schedules, programs, the operators' calls, the call cache.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "vertex/graph/schedule.h"
#include "vertex/program/program.h"
#include "vertex/program/source.h"

namespace py = pybind11;

namespace weft::vertex {

void bind_call_cache(py::module_& vertex);
void bind_frontiers(py::module_& vertex);
void bind_graphs(py::module_& vertex);

void bind(py::module_& m) {
  auto vertex = m.def_submodule("vertex", "Graphs, schedules and programs as integers.");
  bind_graphs(vertex);
  vertex.def(
      "kernel_body",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, bool backward, size_t step,
         bool leaves, int each) {
        const Program program = Program::parse(code, constants);
        const Step& kernel = (backward ? program.backward : program.forward).at(step);
        return py::make_tuple(kernel_body(program, kernel, leaves, each), kernel.buffers);
      },
      "The source of a step and its buffers, for the tests.", py::arg("code"), py::arg("constants"),
      py::arg("backward"), py::arg("step"), py::arg("leaves"), py::arg("each") = 1);
  vertex.def(
      "tail_body",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, bool backward) {
        const Program program = Program::parse(code, constants);
        return tail_body(program, backward ? program.backward : program.forward);
      },
      "The source of the last frontiers, for the tests.", py::arg("code"), py::arg("constants"), py::arg("backward"));
  vertex.def(
      "multiply_adds",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, const std::vector<int32_t>& schedule,
         bool backward) { return multiply_adds(Program::parse(code, constants), Schedule::tasks(schedule), backward); },
      "Of the products of a pass.", py::arg("code"), py::arg("constants"), py::arg("schedule"), py::arg("backward"));
  bind_frontiers(vertex);
  bind_call_cache(vertex);
}

}  // namespace weft::vertex
