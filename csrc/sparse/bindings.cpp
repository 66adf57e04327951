// Planned products as Python calls them: the op with patterns that do not change. By torch's own way from Python a list
// of so many tensors takes more of the host than the rest of a small product.
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "sparse/csr_matmul.h"
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

void bind(py::module_& m, py::module_&) {
  py::class_<Product>(m, "Product")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("patterns"))
      .def("__call__", torch::wrap_pybind_function(
                           [](const Product& product, py::handle x, py::handle y) { return product(x, y); }));
}

}  // namespace weft::sparse
