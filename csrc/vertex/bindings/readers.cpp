#include "vertex/bindings/readers.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace weft::vertex {

namespace {

[[noreturn]] void not_integers(const std::string& where, const std::string& got) {
  throw py::type_error(where + "expected integers, got " + got);
}

template <typename T>
int64_t load(const char* from, bool swapped) {
  T value;
  if (!swapped) {
    std::memcpy(&value, from, sizeof(T));
  } else {
    char bytes[sizeof(T)];
    std::reverse_copy(from, from + sizeof(T), bytes);
    std::memcpy(&value, bytes, sizeof(T));
  }
  // What no index can be stays out of range for every graph.
  if constexpr (sizeof(T) == 8 && std::is_unsigned_v<T>) return std::min<T>(value, INT64_MAX);
  return static_cast<int64_t>(value);
}

template <typename T>
void load_all(const char* data, const int64_t* shape, const int64_t* strides, int dims, bool swapped,
              std::vector<int64_t>& out) {
  const int64_t rows = dims == 2 ? shape[0] : 1, columns = shape[dims - 1];
  const int64_t row_stride = dims == 2 ? strides[0] : 0, stride = strides[dims - 1];
  const size_t begin = out.size();
  out.resize(begin + rows * columns);
  int64_t* to = out.data() + begin;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) *to++ = load<T>(data + r * row_stride + c * stride, swapped);
  }
}

void load_all(const char* data, int64_t itemsize, bool is_signed, const int64_t* shape, const int64_t* strides,
              int dims, bool swapped, std::vector<int64_t>& out) {
  const auto as = [&]<typename T>(T) { load_all<T>(data, shape, strides, dims, swapped, out); };
  switch (itemsize) {
    case 1:
      return is_signed ? as(int8_t()) : as(uint8_t());
    case 2:
      return is_signed ? as(int16_t()) : as(uint16_t());
    case 4:
      return is_signed ? as(int32_t()) : as(uint32_t());
    default:
      return is_signed ? as(int64_t()) : as(uint64_t());
  }
}

// What is asked of torch through its Python objects: a binding that includes torch's headers compiles for a quarter
// of a minute, and a tensor is read in a microsecond this way too.
struct Torch {
  py::object tensor, strided, boolean;
  struct Type {
    py::object dtype;
    int64_t itemsize;
    bool is_signed;
  };
  std::vector<Type> types;
  py::str data_ptr{"data_ptr"}, device{"device"}, type{"type"}, dtype{"dtype"}, layout{"layout"}, shape{"shape"},
      stride{"stride"};

  Torch() {
    const auto torch = py::module_::import("torch");
    tensor = torch.attr("Tensor");
    strided = torch.attr("strided");
    boolean = torch.attr("bool");
    for (const auto& [name, itemsize, is_signed] :
         std::initializer_list<std::tuple<const char*, int64_t, bool>>{{"int64", 8, true},
                                                                       {"int32", 4, true},
                                                                       {"int16", 2, true},
                                                                       {"int8", 1, true},
                                                                       {"uint8", 1, false},
                                                                       {"uint16", 2, false},
                                                                       {"uint32", 4, false},
                                                                       {"uint64", 8, false}}) {
      types.push_back({torch.attr(name), itemsize, is_signed});
    }
  }

  static const Torch& get() {
    static const Torch* const torch = new Torch();  // never freed: Python may be gone before statics are
    return *torch;
  }

  bool is_tensor(PyObject* object) const {
    const int found = PyObject_IsInstance(object, tensor.ptr());
    if (found < 0) throw py::error_already_set();
    return found == 1;
  }
};

}  // namespace

std::optional<std::vector<int64_t>> read_array(PyObject* object, const std::string& where, std::vector<int64_t>& out) {
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) return std::nullopt;
  if (PyObject_CheckBuffer(object)) {
    struct View {
      Py_buffer buffer;
      bool held = false;
      ~View() {
        if (held) PyBuffer_Release(&buffer);
      }
    } view;
    if (PyObject_GetBuffer(object, &view.buffer, PyBUF_RECORDS_RO) != 0) {
      PyErr_Clear();
      not_integers(where, type_name(object) + " whose buffer cannot be read");
    }
    view.held = true;
    const Py_buffer& buffer = view.buffer;
    const char* format = buffer.format == nullptr ? "B" : buffer.format;
    if (std::strcmp(format, "O") == 0) return std::nullopt;
    bool swapped = false;
    if (*format != '\0' && std::strchr("@=<>!", *format) != nullptr) {
      const bool little = std::endian::native == std::endian::little;
      swapped = *format == '<' ? !little : (*format == '>' || *format == '!') && little;
      ++format;
    }
    const bool is_signed = *format != '\0' && std::strchr("bhilqn", *format) != nullptr;
    const bool is_unsigned = *format != '\0' && std::strchr("BHILQN", *format) != nullptr;
    if (format[0] == '\0' || format[1] != '\0' || !(is_signed || is_unsigned)) {
      const char* kind = std::strcmp(format, "?") == 0                                ? "booleans"
                         : *format != '\0' && std::strchr("efdg", *format) != nullptr ? "floating-point numbers"
                                                                                      : nullptr;
      not_integers(where, kind != nullptr ? kind : type_name(object) + " of format '" + buffer.format + "'");
    }
    std::vector<int64_t> shape(buffer.shape, buffer.shape + buffer.ndim);
    const std::vector<int64_t> strides(buffer.strides, buffer.strides + buffer.ndim);
    if (buffer.ndim == 1 || buffer.ndim == 2) {
      load_all(static_cast<const char*>(buffer.buf), buffer.itemsize, is_signed, shape.data(), strides.data(),
               buffer.ndim, swapped, out);
    }
    return shape;
  }
  const Torch& torch = Torch::get();
  if (!torch.is_tensor(object)) return std::nullopt;
  const py::handle tensor(object);
  const py::object device = tensor.attr(torch.device).attr(torch.type);
  if (py::cast<std::string_view>(device) != "cpu") {
    throw py::type_error(where + "expected a tensor on the CPU, got one on " +
                         py::cast<std::string>(py::str(tensor.attr(torch.device))));
  }
  const py::object dtype = tensor.attr(torch.dtype);
  const Torch::Type* type = nullptr;
  for (const auto& candidate : torch.types) {
    if (candidate.dtype.is(dtype)) type = &candidate;
  }
  if (type == nullptr) not_integers(where, "a tensor of " + py::cast<std::string>(py::str(dtype)));
  if (!py::object(tensor.attr(torch.layout)).is(torch.strided)) {
    not_integers(where, "a tensor of layout " + py::cast<std::string>(py::str(tensor.attr(torch.layout))));
  }
  const auto shape = py::cast<std::vector<int64_t>>(tensor.attr(torch.shape));
  auto strides = py::cast<std::vector<int64_t>>(tensor.attr(torch.stride)());
  for (int64_t& stride : strides) stride *= type->itemsize;
  const auto address = py::cast<uintptr_t>(tensor.attr(torch.data_ptr)());
  if (shape.size() == 1 || shape.size() == 2) {
    load_all(reinterpret_cast<const char*>(address), type->itemsize, type->is_signed, shape.data(), strides.data(),
             static_cast<int>(shape.size()), false, out);
  }
  return shape;
}

std::string text(const std::vector<int64_t>& shape) {
  std::string result = "(";
  for (size_t i = 0; i < shape.size(); ++i) result += (i ? ", " : "") + std::to_string(shape[i]);
  return result + (shape.size() == 1 ? ",)" : ")");
}

int64_t read_index(PyObject* object, const Where& where) {
  int overflow = 0;
  if (PyLong_CheckExact(object)) {
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 ? value : overflow > 0 ? INT64_MAX : INT64_MIN;
  }
  const auto refuse = [&]() { not_integers(where, type_name(object)); };
  if (PyBool_Check(object)) refuse();
  const Torch& torch = Torch::get();
  if (torch.is_tensor(object) && py::object(py::handle(object).attr(torch.dtype)).is(torch.boolean)) refuse();
  const auto integer = py::reinterpret_steal<py::object>(PyNumber_Index(object));
  if (!integer) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    refuse();
  }
  const int64_t value = PyLong_AsLongLongAndOverflow(integer.ptr(), &overflow);
  return overflow == 0 ? value : overflow > 0 ? INT64_MAX : INT64_MIN;
}

void read_row(PyObject* object, const Where& where, const char* name, std::vector<int64_t>& out) {
  if (const auto shape = read_array(object, where, out)) {
    if (shape->size() != 1) {
      throw py::value_error(std::string(where) + name + " must have one dimension, got shape " + text(*shape));
    }
    return;
  }
  // Rows are many and mostly short lists, so that the message is not made in advance.
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
    const auto hold = py::reinterpret_borrow<py::object>(object);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i));
      out.push_back(read_index(item.ptr(), where));
    }
    return;
  }
  for_each(object, std::string(where) + name + " must be a sequence of integers, got ",
           [&](PyObject* item, int64_t) { out.push_back(read_index(item, where)); });
}

}  // namespace weft::vertex
