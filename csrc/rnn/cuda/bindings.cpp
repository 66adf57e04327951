// rnn, as Python sees it: what a call would do on a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "rnn/plan.h"

namespace py = pybind11;

namespace weft::rnn {

void bind(py::module_& m) {
  m.def(
      "rnn_plan",
      [](int device, const std::string& cell, const std::string& dtype, int64_t input_size, int64_t hidden_size,
         int layers, int directions, int64_t steps, int64_t batch, bool packed, bool trains) {
        RnnPlanReport report;
        {
          py::gil_scoped_release release;
          report = rnn_plan_report(
              device, {cell, dtype, steps, batch, input_size, hidden_size, layers, directions, packed, trains});
        }
        py::dict facts;
        facts["why_not"] = report.why_not.empty() ? py::object(py::none()) : py::str(report.why_not);
        facts["forward"] = report.forward;
        facts["backward"] = report.backward;
        facts["microseconds"] =
            report.microseconds > 0 ? py::object(py::float_(report.microseconds)) : py::object(py::none());
        return facts;
      },
      "How weft::rnn runs on a GPU: why it has no kernel, or None; how the recurrences are laid out; the microseconds "
      "expected.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("input_size"), py::arg("hidden_size"),
      py::arg("layers"), py::arg("directions"), py::arg("steps"), py::arg("batch"), py::arg("packed"),
      py::arg("trains"));
  m.def(
      "rnn_geometries",
      [](int device, const std::string& cell, const std::string& dtype, int64_t hidden, int64_t batch, int directions,
         bool packed, bool backward) {
        py::list list;
        for (const auto& g :
             rnn_geometries(device, {cell, dtype, 1, batch, 1, hidden, 1, directions, packed, true}, backward)) {
          py::dict amounts;
          for (const auto& [name, amount] : g.amounts) amounts[py::str(name)] = amount;
          list.append(py::make_tuple(g.text, g.defines, g.step_us, g.launches, amounts));
        }
        return list;
      },
      "(text for WEFT_RNN_GEOMETRY, macros, expected microseconds of a step, launches of the kernel, amount of each "
      "cost in a step of one) of each geometry that fits.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("hidden"), py::arg("batch"), py::arg("directions"),
      py::arg("packed"), py::arg("backward"));
}

}  // namespace weft::rnn
