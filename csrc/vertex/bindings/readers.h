// Integers of graphs, read from whatever Python has for them: numbers, sequences, buffers, tensors of torch.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "vertex/graph/graphs.h"

namespace weft::vertex {

namespace py = pybind11;

inline std::string type_name(PyObject* object) {
  return Py_TYPE(object)->tp_name;
}

// "(2, 5)", as Python writes a shape.
std::string text(const std::vector<int64_t>& shape);

// The message's beginning is written only where something is wrong.
struct Where {
  const GraphsBuilder& builder;
  int64_t graph, vertex = -1;
  operator std::string() const { return builder.where(graph, vertex); }
};

// Appends the array's elements to `out` in C order and gives its shape; nothing where `object` is no array.
std::optional<std::vector<int64_t>> read_array(PyObject* object, const std::string& where, std::vector<int64_t>& out);

// What no index can be stays out of range for every graph.
int64_t read_index(PyObject* object, const Where& where);

// One row of integers, appended to `out`.
void read_row(PyObject* object, const Where& where, const char* name, std::vector<int64_t>& out);

// Goes through what can be iterated in a definite order. A list may change while an element's own code runs.
template <typename F>
int64_t for_each(PyObject* object, const std::string& expected, F&& visit) {
  const auto refuse = [&]() { throw py::type_error(expected + type_name(object)); };
  if (PyUnicode_Check(object) || PyDict_Check(object) || PyAnySet_Check(object)) refuse();
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(object, ""));
  if (!items) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    refuse();
  }
  int64_t i = 0;
  for (; i < PySequence_Fast_GET_SIZE(items.ptr()); ++i) {
    const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(items.ptr(), i));
    visit(item.ptr(), i);
  }
  return i;
}

}  // namespace weft::vertex
