// rnn, as Python sees it: what the scan's kernels hold, how time is cut, and what a call would do on a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "rnn/cells/cells.h"
#include "rnn/newton/chunks.h"
#include "rnn/scan/limits.h"
#ifdef WEFT_WITH_CUDA
#include "common/cuda/captured.h"
#include "rnn/report.h"
#endif

namespace py = pybind11;

namespace weft::rnn {
#ifdef WEFT_WITH_CUDA
namespace {

py::object layout(const std::optional<RnnPass>& pass) {
  if (!pass) return py::none();
  py::dict facts;
  facts["tier"] = pass->tier;
  facts["product"] = pass->product;
  facts["groups"] = pass->groups;
  facts["blocks"] = pass->blocks;
  facts["threads"] = pass->threads;
  facts["sequences"] = pass->sequences;
  facts["cluster"] = pass->cluster;
  facts["directions"] = pass->directions;
  return facts;
}

void bind_cuda(py::module_& m, py::module_& testing) {
  m.def(
      "report",
      [](int device, const std::string& cell, const std::string& dtype, int64_t input_size, int64_t hidden_size,
         int layers, int directions, int64_t steps, int64_t batch, bool packed, bool trains, int heads) {
        RnnReport report;
        {
          py::gil_scoped_release release;
          report = rnn_report(
              device, {cell, dtype, steps, batch, input_size, hidden_size, layers, directions, packed, trains, heads});
        }
        py::dict facts;
        facts["why_not"] = report.why_not.empty() ? py::object(py::none()) : py::str(report.why_not);
        facts["forward"] = layout(report.forward);
        facts["backward"] = layout(report.backward);
        facts["microseconds"] =
            report.microseconds > 0 ? py::object(py::float_(report.microseconds)) : py::object(py::none());
        return facts;
      },
      "How weft::rnn runs on a GPU: why it has no kernel, or None; for each pass None or how its recurrence is laid "
      "out (tier, product, groups of all directions, blocks of a group, threads of a block, sequences of a group, "
      "cluster of blocks that pool their rows, directions at the same time); the microseconds expected, or None.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("input_size"), py::arg("hidden_size"),
      py::arg("layers"), py::arg("directions"), py::arg("steps"), py::arg("batch"), py::arg("packed"),
      py::arg("trains"), py::arg("heads") = 1);
  m.def(
      "row_chunks",
      [](int device, const std::string& cell, int64_t hidden, int64_t steps, int64_t batch) {
        py::gil_scoped_release release;
        return rnn_row_chunks(device, {cell, "float32", steps, batch, 1, hidden, 1, 1, false, false}).count;
      },
      "Chunks that algorithm=\"newton\" makes rows of a batch of, where a warp does not hold a layer of one direction; "
      "1 where that is not expected to be faster.",
      py::arg("device"), py::arg("cell"), py::arg("hidden"), py::arg("steps"), py::arg("batch"));
  m.def(
      "geometries",
      [](int device, const std::string& cell, const std::string& dtype, int64_t hidden, int64_t batch, int directions,
         bool packed, bool backward, int heads) {
        py::list list;
        for (const auto& g :
             rnn_geometries(device, {cell, dtype, 1, batch, 1, hidden, 1, directions, packed, true, heads}, backward)) {
          py::dict amounts;
          for (const auto& [name, amount] : g.amounts) amounts[py::str(name)] = amount;
          list.append(py::make_tuple(g.text, g.defines, g.step_us, g.launches, amounts));
        }
        return list;
      },
      "(text for WEFT_RNN_GEOMETRY, macros, expected microseconds of a step, launches of the kernel, amount of each "
      "cost in a step of one) of each geometry that fits.",
      py::arg("device"), py::arg("cell"), py::arg("dtype"), py::arg("hidden"), py::arg("batch"), py::arg("directions"),
      py::arg("packed"), py::arg("backward"), py::arg("heads") = 1);
  m.def(
      "scan_expected",
      [](int device, const std::string& cell, int hidden, int64_t steps, int64_t batch) {
        const scan::Expected expected = rnn_scan_expected(device, cell, hidden, steps, batch);
        const scan::Stages& s = expected.stages;
        return std::make_tuple(expected.chunks, std::array{s.launches, s.products, s.boundaries, s.replay});
      },
      "Chunks of the chain of backward=\"scan\" on a GPU, and the microseconds that its launches, products, boundaries "
      "and replay are expected to take.",
      py::arg("device"), py::arg("cell"), py::arg("hidden"), py::arg("steps"), py::arg("batch"));
  m.def("slice_chunks", rnn_slice_chunks, "Chunks of time for rnn_slice_maps on a GPU that are expected to be fastest.",
        py::arg("device"), py::arg("cell"), py::arg("hidden"), py::arg("steps"), py::arg("batch"));
  m.def("slice_map_floats", rnn_slice_floats, "Floats that rnn_slice_maps keeps of a chunk and row on a GPU.",
        py::arg("cell"), py::arg("hidden"));
  testing.def("captured", &captured_count, "Tensors that CUDA graphs keep, of all rooms.");
}

}  // namespace
#endif

void bind(py::module_& m, py::module_& testing) {
  py::dict most;
  py::dict cells;
  for (int i = 0; i < kCellCount; ++i) {
    const Cell cell = Cell(i);
    most[kCells[i].name] = scan_max_hidden(cell);
    py::dict traits;
    traits["costs"] = kCells[i].costs;
    traits["gates"] = gate_blocks(cell);
    traits["saved"] = saved_blocks(cell);
    traits["states"] = states_of(cell);
    traits["kept"] = kept_states(cell);
    cells[kCells[i].name] = traits;
  }
  m.attr("cells") = cells;
  m.attr("scan_max_hidden") = most;
  m.attr("scan_max_hidden_fp64") = kWarpHidden;
  m.def(
      "time_chunks",
      [](int64_t steps, int64_t sequences, int64_t walkers, int64_t shortest) {
        const TimeChunks chunks = choose_chunks(steps, sequences, walkers, shortest);
        return std::make_tuple(chunks.count, chunks.length);
      },
      "Chunks of time that algorithm=\"newton\" cuts sequences into, and the steps of one.", py::arg("steps"),
      py::arg("sequences"), py::arg("walkers"), py::arg("shortest"));
#ifdef WEFT_WITH_CUDA
  bind_cuda(m, testing);
#endif
}

}  // namespace weft::rnn
