// What a call of a vertex function depends on, compared with what the call before had. A training step of few vertices
// is bound by what the host does, and in Python these comparisons cost more than the launches.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace weft::vertex {
namespace {

// What a trace depends on of a tensor, its first dimension aside where that counts vertices.
class Facts {
 public:
  Facts(const at::Tensor& t, bool rows)
      : rows_(rows), grad_(t.requires_grad()), contiguous_(dense(t)), options_(t.options()) {
    const auto sizes = t.sym_sizes().slice(rows);
    sizes_.assign(sizes.begin(), sizes.end());
  }
  bool hold(const at::Tensor& t) const {
    return t.requires_grad() == grad_ && t.scalar_type() == options_.dtype().toScalarType() &&
           t.device() == options_.device() && t.dim() >= rows_ && t.sym_sizes().slice(rows_) == sizes_ &&
           dense(t) == contiguous_;
  }

 private:
  // Of inputs nobody asks: they may lie as they like.
  bool dense(const at::Tensor& t) const { return rows_ || (t.layout() == at::kStrided && t.is_contiguous()); }
  bool rows_, grad_, contiguous_;
  at::TensorOptions options_;
  std::vector<c10::SymInt> sizes_;
};

bool same_name(PyObject* a, PyObject* b) {
  return a == b || (PyUnicode_Check(a) && PyUnicode_Check(b) && PyUnicode_Compare(a, b) == 0);
}

// Objects by identity. It keeps nothing of what it looks at alive, or modules could not be collected that keep it:
// its owner in Python does.
class Snapshot {
 public:
  // Modules; dictionaries; objects that are empty; tensors; lists; tensors without hooks.
  Snapshot(const std::vector<py::object>& modules, const std::vector<py::dict>& tables,
           const std::vector<py::object>& empty, const std::vector<py::object>& tensors,
           const std::vector<py::list>& lists, const std::vector<py::object>& unhooked) {
    for (const py::object& m : modules) modules_.push_back({m.ptr(), Py_TYPE(m.ptr()), attributes(m.ptr())});
    for (const py::dict& t : tables) {
      auto& [dict, entries] = tables_.emplace_back(t.ptr(), Entries());
      for (const auto& [key, value] : t) entries.emplace_back(key.ptr(), value.ptr());
    }
    for (const py::object& e : empty) empty_.push_back(e.ptr());
    for (const py::list& l : lists) {
      auto& [list, items] = lists_.emplace_back(l.ptr(), std::vector<PyObject*>());
      for (const auto& item : l) items.push_back(item.ptr());
    }
    for (const py::object& t : unhooked) {
      THPVariable_Unpack(t.ptr());  // which it is
      unhooked_.push_back(t.ptr());
    }
    for (const py::object& t : tensors) {
      tensors_.push_back({t.ptr(), Py_TYPE(t.ptr()), Facts(THPVariable_Unpack(t.ptr()), /*rows=*/false)});
    }
  }

  // Whether it is of this very module, not one that a copy of it was made from, and all is as it was.
  bool holds(py::handle module) const {
    const auto same_module = [](const Module& m) {
      return Py_TYPE(m.object) == m.type && attributes(m.object) == m.attributes;
    };
    const auto same = [](const auto& t) { return unchanged(t.first, t.second); };
    const auto same_items = [](const auto& l) {
      const auto size = static_cast<Py_ssize_t>(l.second.size());
      return PyList_GET_SIZE(l.first) == size &&
             std::equal(l.second.begin(), l.second.end(), PySequence_Fast_ITEMS(l.first));
    };
    return modules_.front().object == module.ptr() && std::all_of(modules_.begin(), modules_.end(), same_module) &&
           std::all_of(tables_.begin(), tables_.end(), same) &&
           std::all_of(empty_.begin(), empty_.end(), [](PyObject* e) { return py::len(e) == 0; }) &&
           std::all_of(lists_.begin(), lists_.end(), same_items) &&
           std::none_of(unhooked_.begin(), unhooked_.end(), has_hooks) &&
           std::all_of(tensors_.begin(), tensors_.end(), [](const Tensor& t) {
             return Py_TYPE(t.object) == t.type && t.facts.hold(THPVariable_Unpack(t.object));
           });
  }

 private:
  using Entries = std::vector<std::pair<PyObject*, PyObject*>>;
  struct Module {
    PyObject* object;
    PyTypeObject* type;
    PyObject* attributes;
  };
  struct Tensor {
    PyObject* object;
    PyTypeObject* type;
    Facts facts;
  };

  // Its __dict__.
  static PyObject* attributes(PyObject* object) {
    const auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!dict) throw py::error_already_set();
    return dict.ptr();
  }

  // Whether something else happens where the tensor gets a gradient.
  static bool has_hooks(PyObject* tensor) {
    const auto* const t = reinterpret_cast<THPVariable*>(tensor);
    const auto any = [](PyObject* hooks) { return hooks != nullptr && PyObject_IsTrue(hooks) != 0; };
    return any(t->backward_hooks) || any(t->post_accumulate_grad_hooks);
  }

  static bool unchanged(PyObject* dict, const Entries& entries) {
    if (PyDict_Size(dict) != static_cast<Py_ssize_t>(entries.size())) return false;
    Py_ssize_t next = 0;
    PyObject *key = nullptr, *value = nullptr;
    for (const auto& [old_key, old_value] : entries) {
      if (!PyDict_Next(dict, &next, &key, &value) || value != old_value || !same_name(key, old_key)) return false;
    }
    return true;
  }

  std::vector<Module> modules_;
  std::vector<std::pair<PyObject*, Entries>> tables_;
  std::vector<PyObject*> empty_, unhooked_;
  std::vector<std::pair<PyObject*, std::vector<PyObject*>>> lists_;
  std::vector<Tensor> tensors_;
};

// Tensors by name, with a row per vertex.
class Inputs {
 public:
  explicit Inputs(const py::dict& inputs) {
    for (const auto& [name, x] : inputs) {
      inputs_.emplace_back(py::reinterpret_borrow<py::object>(name), Facts(THPVariable_Unpack(x.ptr()), /*rows=*/true));
    }
  }

  // Whether these differ in nothing but their values and their number of rows, which is `count`.
  bool hold(const py::dict& inputs, int64_t count) const {
    if (inputs.size() != inputs_.size()) return false;
    auto expected = inputs_.begin();
    for (const auto& [name, x] : inputs) {
      const auto& [expected_name, facts] = *expected++;
      if (!same_name(name.ptr(), expected_name.ptr()) || !THPVariable_Check(x.ptr())) return false;
      const at::Tensor& t = THPVariable_Unpack(x.ptr());
      if (!facts.hold(t) || t.sym_size(0) != count) return false;
    }
    return true;
  }

 private:
  std::vector<std::pair<py::object, Facts>> inputs_;
};

// Counters of steps on the CPU one up, each a number of float32 or float64; what they are then.
std::vector<double> count_up(const std::vector<at::Tensor>& counters) {
  std::vector<double> found;
  for (const at::Tensor& t : counters) {  // all, before one is changed
    TORCH_CHECK(t.is_cpu() && t.numel() == 1, "count_up: a counter must be one number on the CPU");
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble,
                     "count_up: a counter must be float32 or float64");
  }
  for (const at::Tensor& t : counters) {
    void* const data = t.mutable_data_ptr();
    if (t.scalar_type() == at::kDouble) {
      found.push_back(++*static_cast<double*>(data));
    } else {
      found.push_back(++*static_cast<float*>(data));
    }
    t.unsafeGetTensorImpl()->bump_version();
  }
  return found;
}

// What a trace depends on besides the module and its inputs, as one number.
int64_t modes(at::Device device) {
  const at::DeviceType type = device.type();
  const bool casts = at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type);
  int64_t found = casts ? 1 + static_cast<int64_t>(at::autocast::get_autocast_dtype(type)) : 0;
  found = found << 8 | static_cast<int64_t>(c10::get_default_dtype_as_scalartype());
  for (const bool on :
       {at::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), at::autocast::is_autocast_enabled(at::kCPU)}) {
    found = found << 1 | static_cast<int64_t>(on);
  }
  return found;
}

}  // namespace

void bind_call_cache(py::module_& vertex) {
  py::class_<Snapshot>(vertex, "Snapshot", "Modules as they are, by identity; who makes it keeps them alive.")
      .def(py::init<const std::vector<py::object>&, const std::vector<py::dict>&, const std::vector<py::object>&,
                    const std::vector<py::object>&, const std::vector<py::list>&, const std::vector<py::object>&>(),
           py::arg("modules"), py::arg("tables"), py::arg("empty"), py::arg("tensors"),
           py::arg("lists") = std::vector<py::list>(), py::arg("unhooked") = std::vector<py::object>())
      .def("holds", &Snapshot::holds);
  py::class_<Inputs>(vertex, "Inputs", "What is pulled, but for its values and the number of its rows.")
      .def(py::init<const py::dict&>())
      .def("hold", &Inputs::hold);
  vertex.def("count_up", torch::wrap_pybind_function(&count_up), "Counters on the CPU one up; what they are then.");
  vertex.def("modes", &modes, "What a trace depends on besides the module and its inputs.");
}

}  // namespace weft::vertex
