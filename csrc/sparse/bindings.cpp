// Planned products as Python calls them: the op with patterns that do not change. By torch's own way from Python a list
// of so many tensors takes more of the host than the rest of a small product.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "sparse/csr_matmul.h"
#include "sparse/plan.h"
#include "sparse/python_first.h"

namespace py = pybind11;

namespace weft::sparse {
namespace {

class Product {
 public:
  explicit Product(std::vector<at::Tensor> patterns) : patterns_(std::move(patterns)) {}

  // csr_matmul(patterns, x, y), through the dispatcher; None where Python has to look first, and where y wants a
  // gradient, which takes more patterns.
  py::object operator()(py::handle x, py::handle y) const {
    if (python_first() || python_first(x) || python_first(y)) return py::none();
    const at::Tensor &a = THPVariable_Unpack(x.ptr()), &b = THPVariable_Unpack(y.ptr());
    if (needs_grad(b)) return py::none();
    at::Tensor values;
    {
      py::gil_scoped_release released;
      values = csr_matmul_op(patterns_, a, b);
    }
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(values)));
  }

 private:
  std::vector<at::Tensor> patterns_;
};

}  // namespace

void bind(py::module_& m, py::module_& testing) {
  py::class_<Product>(m, "Product")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("patterns"))
      .def("__call__", torch::wrap_pybind_function(
                           [](const Product& product, py::handle x, py::handle y) { return product(x, y); }));
  testing.def(
      "sparse_kept_bytes", [](int64_t bytes) { return std::exchange(kept_bytes(), bytes); },
      "Sets the host memory that plans may take for columns of rows; returns what it was.", py::arg("bytes"));
  testing.def(
      "sparse_rows_kept",
      [](const std::vector<int64_t>& counts, int64_t bytes) {
        KeptColumns<int32_t> kept(int64_t(counts.size()), bytes);
        std::vector<bool> found;
        for (size_t i = 0; i < counts.size(); ++i) {
          kept.keep(int64_t(i), std::vector<int32_t>(size_t(counts[i]), int32_t(i)));
          const std::vector<int32_t>* columns = kept.find(int64_t(i), counts[i]);
          found.push_back(columns != nullptr && int64_t(columns->size()) == counts[i]);
        }
        return found;
      },
      "Which rows of so many columns a plan keeps in so many bytes.", py::arg("counts"), py::arg("bytes"));
}

}  // namespace weft::sparse
