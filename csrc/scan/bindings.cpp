// The tree of a chain of CSR Jacobians, and a backward pass along layers, as Python calls them; reports of Newton runs;
// linear_scan as the fit of its costs and tests see it.
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
#include "scan/chain/layer_gradients.h"
#include "scan/newton/report.h"
#include "scan/pointwise/pointwise_scan.h"
#include "scan/pointwise/source.h"
#include "sparse/csr_chain.h"
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

// The links of a net's layers, which do not change from step to step; called with what does.
class LayerChain {
 public:
  using Tensors = std::vector<at::Tensor>;
  LayerChain(Tensors crows, Tensors cols, Tensors sources, std::vector<int64_t> reads)
      : crows_(std::move(crows)), cols_(std::move(cols)), sources_(std::move(sources)), reads_(std::move(reads)) {}
  // layer_chain(grad, ..., values), values in any shape that has the batch first where there is one.
  Tensors operator()(const at::Tensor& grad, Tensors values) const {
    for (size_t k = 0; k < values.size() && k < reads_.size(); ++k) {
      if (reads_[k] != 0 && values[k].dim() != 2) values[k] = values[k].flatten(1);
    }
    return sparse::layer_chain_op(grad, crows_, cols_, values, sources_, reads_);
  }

 private:
  Tensors crows_, cols_, sources_;
  std::vector<int64_t> reads_;
};

// (settings, input, flat gradient of the output, its shape, weight, wants weight, wants bias)
using GivenLayer =
    std::tuple<std::optional<ConvSettings>, at::Tensor, at::Tensor, std::vector<int64_t>, at::Tensor, bool, bool>;

// A weight's gradient and a bias's, or None, of each layer.
std::vector<std::pair<py::object, py::object>> gradients_of(std::vector<GivenLayer> given, bool branches) {
  std::vector<LayerGradient> found;
  {
    py::gil_scoped_release released;
    std::vector<Layer> layers;
    for (auto& [conv, input, grad, shape, weight, wants_weight, wants_bias] : given) {
      layers.push_back(
          {std::move(conv), std::move(input), grad.view(shape), std::move(weight), wants_weight, wants_bias});
    }
    found = layer_gradients(layers, branches);
  }
  const auto object = [](const at::Tensor& t) { return t.defined() ? py::cast(t) : py::object(py::none()); };
  std::vector<std::pair<py::object, py::object>> results;
  for (const LayerGradient& f : found) results.emplace_back(object(f.weight), object(f.bias));
  return results;
}

}  // namespace

void bind(py::module_& m, py::module_& testing) {
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
  py::class_<LayerChain>(m, "LayerChain")
      .def(py::init<LayerChain::Tensors, LayerChain::Tensors, LayerChain::Tensors, std::vector<int64_t>>(),
           py::arg("crows"), py::arg("cols"), py::arg("sources"), py::arg("reads"))
      .def("__call__", torch::wrap_pybind_function_no_gil(
                           [](const LayerChain& chain, const at::Tensor& grad, LayerChain::Tensors values) {
                             return chain(grad, std::move(values));
                           }));
  py::class_<ConvSettings>(m, "ConvSettings")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, int64_t>(), py::arg("stride"),
           py::arg("padding"), py::arg("dilation"), py::arg("groups"));
  m.def("layer_gradients", torch::wrap_pybind_function(gradients_of),
        "Gradients of the weight and the bias of each layer, given as (ConvSettings or None, input, flat gradient of "
        "the output, its shape, weight, whether the weight's is wanted, and the bias's).",
        py::arg("layers"), py::arg("branches"));
  testing.def(
      "pointwise_bodies",
      [](const std::string& program) {
        const StepProgram& step = step_program(program);
        return std::array{
            step_body(step, {{"next", step.next}}), step_body(step, {{"next", step.next}, {"jacobian", step.jacobian}}),
            step_body(step, {{"g", step.vjp}}), step_body(step, {{"g", step.vjp}, {"jacobian", step.jacobian}})};
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
  m.def("slice_chunks", slice_chunks_expected, "Chunks of time for slice_maps on a GPU, of contiguous tensors.",
        py::arg("device"), py::arg("steps"), py::arg("batch"), py::arg("hidden"));
  m.def("slice_map_floats", slice_map_floats, "Floats that slice_maps keeps of a chunk and row on a GPU.",
        py::arg("hidden"));
#endif
}

}  // namespace weft::scan
