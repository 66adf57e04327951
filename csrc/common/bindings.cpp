// The costs of GPUs, as Python adds and reads them; the list of element-wise instructions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/costs.h"
#include "common/elementwise.h"
#ifdef WEFT_WITH_CUDA
#include "common/cuda/device_costs.h"
#endif

namespace py = pybind11;

namespace weft::common {
namespace {

using costs::Costs;
using costs::Gpu;

Gpu gpu_of(const std::string& name, int capability, int multiprocessors, double clock_mhz, double bandwidth_gbs) {
  return {name, capability, multiprocessors, clock_mhz, bandwidth_gbs};
}

// (GPU that they were measured on, whether that is another, {table: {name: numbers}})
py::tuple in_python(const Costs& costs) {
  py::dict tables;
  for (const auto& [name, table] : costs.tables) tables[py::str(name)] = py::cast(table.all());
  return py::make_tuple(costs.measured_on.name, costs.extrapolated, tables);
}

}  // namespace

void bind(py::module_& m, py::module_&) {
  py::list elementwise;
  for (const ElementwiseInfo& op : kElementwise) {
    elementwise.append(py::make_tuple(op.name, op.operands, op.derivatives));
  }
  m.attr("ELEMENTWISE") = elementwise;
  m.def(
      "add_costs",
      [](const costs::Measured& tables, const std::string& name, int capability, int multiprocessors, double clock_mhz,
         double bandwidth_gbs) {
        costs::add(gpu_of(name, capability, multiprocessors, clock_mhz, bandwidth_gbs), tables);
      },
      "Adds what was measured on a GPU: {table: {what its numbers go with: {name: numbers}}}.", py::arg("tables"),
      py::kw_only(), py::arg("name"), py::arg("capability"), py::arg("multiprocessors"), py::arg("clock_mhz"),
      py::arg("bandwidth_gbs"));
  m.def(
      "costs_of",
      [](const std::string& name, int capability, int multiprocessors, double clock_mhz, double bandwidth_gbs) {
        return in_python(costs::of(gpu_of(name, capability, multiprocessors, clock_mhz, bandwidth_gbs)));
      },
      "Costs of a GPU, those of the nearest scaled; without a name the first added: (GPU they were measured on, "
      "whether that is another, {table: {name: numbers}}).",
      py::kw_only(), py::arg("name") = "", py::arg("capability") = 0, py::arg("multiprocessors") = 0,
      py::arg("clock_mhz") = 0.0, py::arg("bandwidth_gbs") = 0.0);
#ifdef WEFT_WITH_CUDA
  m.def(
      "gpu_facts",
      [](int device) {
        const Gpu gpu = gpu_facts(device);
        py::dict facts;
        facts["name"] = gpu.name;
        facts["capability"] = gpu.capability;
        facts["multiprocessors"] = gpu.multiprocessors;
        facts["clock_mhz"] = gpu.clock_mhz;
        facts["bandwidth_gbs"] = gpu.bandwidth_gbs;
        return facts;
      },
      "What the driver tells of a device.", py::arg("device"));
#endif
}

}  // namespace weft::common
