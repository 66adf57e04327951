// The tree of a chain of CSR Jacobians as Python calls it; reports of Newton runs; linear_scan as the fit of its costs
// and tests see it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "scan/chain/csr_tree.h"
#include "scan/newton/report.h"
#include "scan/pointwise/pointwise_scan.h"
#include "scan/pointwise/source.h"
#include "sparse/python_first.h"
#ifdef WEFT_WITH_CUDA
#include "scan/linear/cuda/linear_scan.h"
#endif

namespace py = pybind11;

namespace weft::scan {

namespace {

// None where Python has to look first.
py::object tree_backward(const CsrTree& tree, py::handle grad, const std::vector<py::object>& values,
                         const CsrTree::OfLevels& transposed) {
  if (sparse::python_first() || sparse::python_first(grad)) return py::none();
  for (const py::object& v : values) {
    if (sparse::python_first(v)) return py::none();
  }
  std::vector<at::Tensor> given, found;
  for (const py::object& v : values) given.push_back(THPVariable_Unpack(v.ptr()));
  {
    py::gil_scoped_release released;
    found = tree.backward(THPVariable_Unpack(grad.ptr()), given, transposed);
  }
  return py::cast(std::move(found));
}

}  // namespace

void bind(py::module_& m) {
  py::class_<CsrTree>(m, "CsrTree")
      .def(py::init<CsrTree::OfLevels, CsrTree::OfLevels>(), py::arg("patterns"), py::arg("plans"))
      .def("backward",
           torch::wrap_pybind_function(
               [](const CsrTree& tree, py::handle grad, const std::vector<py::object>& values,
                  const CsrTree::OfLevels& transposed) { return tree_backward(tree, grad, values, transposed); }));
  py::class_<NewtonReport, std::shared_ptr<NewtonReport>>(m, "NewtonReport")
      .def(py::init<>())
      .def("__enter__", [](std::shared_ptr<NewtonReport> report) { push_newton_report(std::move(report)); })
      .def("__exit__", [](NewtonReport&, const py::args&) { pop_newton_report(); })
      .def("runs", [](const NewtonReport& report) {
        std::vector<std::tuple<std::string, int64_t, int64_t, at::Tensor>> found;
        for (const NewtonRun& r : report.runs) found.emplace_back(r.op, r.steps, r.chunks, r.statistics);
        return found;
      });
  m.def_submodule("_testing").def(
      "pointwise_bodies",
      [](const std::string& program) {
        const StepProgram& step = step_program(program);
        return std::array{step_body(step, {{"next", step.next}}),
                          step_body(step, {{"next", step.next}, {"jacobian", step.jacobian}}),
                          step_body(step, {{"g", step.vjp}}),
                          step_body(step, {{"g", step.vjp}, {"jacobian", step.jacobian}})};
      },
      "CUDA statements of a step: next, with its Jacobian, gradients, with the Jacobian.", py::arg("program"));
  m.def(
      "pointwise_chunks",
      [](bool cuda, int64_t steps, int64_t channels, int64_t inputs, bool wanted) {
        PointwisePlan plan = plan_on_cpu(steps, channels, true, wanted);
#ifdef WEFT_WITH_CUDA
        if (cuda) plan = plan_on_cuda(steps, channels, inputs, true, wanted);
#endif
        return plan.chunks;
      },
      "Into how many chunks of time pointwise_scan cuts a sequence on the CPU, or the current CUDA device.",
      py::arg("cuda"), py::arg("steps"), py::arg("channels"), py::arg("inputs"), py::arg("wanted"));
#ifdef WEFT_WITH_CUDA
  m.def(
      "linear_scan_expected",
      [](int device, bool half, int64_t steps, int64_t batch, int64_t hidden) {
        if (hidden < 1 || hidden > kBlockMaxH) throw std::invalid_argument("hidden must be 1 to 128");
        const Expected expected = linear_scan_expected(device, half ? DType::f16 : DType::f32, steps, batch, hidden);
        const Stages& s = expected.stages;
        return std::make_tuple(expected.chunks, std::array{s.launches, s.products, s.boundaries, s.replay});
      },
      "Chunks of a dense linear_scan in float16 or float32 on a GPU, and the microseconds that its launches, products, "
      "boundaries and replay are expected to take.",
      py::arg("device"), py::arg("half"), py::arg("steps"), py::arg("batch"), py::arg("hidden"));
#endif
}

}  // namespace weft::scan
