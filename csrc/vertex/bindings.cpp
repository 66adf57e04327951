// Graphs and their schedules, as Python sees them: what weft.Graphs is made from and what it keeps.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "vertex/graphs.h"
#include "vertex/program/program.h"
#include "vertex/program/source.h"
#include "vertex/schedule.h"

namespace py = pybind11;

namespace weft::vertex {

void bind_frontiers(py::module_& vertex);
void bind_known(py::module_& vertex);

namespace {

// An integer array of up to two dimensions, read from whatever has a buffer or is a tensor.
struct Array {
  std::vector<int64_t> shape;
  std::vector<int64_t>* values;
};

std::string type_name(PyObject* object) {
  return Py_TYPE(object)->tp_name;
}

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

// Appends the array's elements to `out` in C order and gives its shape; nothing where `object` is no array.
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

// The message's beginning is written only where something is wrong.
struct Where {
  const GraphsBuilder& builder;
  int64_t graph, vertex = -1;
  operator std::string() const { return builder.where(graph, vertex); }
};

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

// One row of integers, appended to `out`.
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

Graphs from_children(const py::object& children) {
  const std::string op = "Graphs.from_children";
  GraphsBuilder builder(op);
  std::vector<int64_t> values, rows;
  for_each(
      children.ptr(), op + ": children must be a sequence with an entry per graph, got ",
      [&](PyObject* graph, int64_t g) {
        values.clear();
        rows.assign(1, 0);
        if (const auto shape = read_array(graph, Where{builder, g}, values)) {
          if (shape->size() != 2) {
            throw py::value_error(builder.where(g) + "children must have shape (vertices, slots), got " + text(*shape));
          }
          rows.resize((*shape)[0] + 1);
          for (int64_t v = 0; v <= (*shape)[0]; ++v) rows[v] = v * (*shape)[1];
        } else {
          for_each(graph, builder.where(g) + "children must be a sequence with a row per vertex, got ",
                   [&](PyObject* row, int64_t v) {
                     read_row(row, {builder, g, v}, "children", values);
                     rows.push_back(static_cast<int64_t>(values.size()));
                   });
        }
        builder.add_children(values, rows);
      });
  return builder.finish();
}

// The entries of a second argument with one per graph. A batch of another length is the first graph's fault that has
// no partner.
std::vector<py::object> entries(const py::object& object, const GraphsBuilder& builder, const std::string& op,
                                const char* name, int64_t graphs) {
  std::vector<py::object> result;
  for_each(object.ptr(), op + ": " + name + " must be a sequence with an entry per graph, got ",
           [&](PyObject* item, int64_t) { result.push_back(py::reinterpret_borrow<py::object>(item)); });
  const int64_t got = static_cast<int64_t>(result.size());
  if (got != graphs) {
    throw py::value_error(builder.where(std::min(got, graphs)) + name + " has " + std::to_string(got) +
                          " entries for " + std::to_string(graphs) + " graphs");
  }
  return result;
}

std::vector<py::object> entries(const py::object& object, const std::string& op, const char* name) {
  std::vector<py::object> result;
  for_each(object.ptr(), op + ": " + name + " must be a sequence with an entry per graph, got ",
           [&](PyObject* item, int64_t) { result.push_back(py::reinterpret_borrow<py::object>(item)); });
  return result;
}

Graphs from_parents(const py::object& parents, const py::object& slots) {
  const std::string op = "Graphs.from_parents";
  GraphsBuilder builder(op);
  const auto graphs = entries(parents, op, "parents");
  const int64_t n = static_cast<int64_t>(graphs.size());
  std::vector<py::object> slot_rows;
  if (!slots.is_none()) slot_rows = entries(slots, builder, op, "slots", n);
  std::vector<int64_t> values, slot_values;
  for (int64_t g = 0; g < n; ++g) {
    values.clear();
    read_row(graphs[g].ptr(), {builder, g}, "parents", values);
    if (slots.is_none()) {
      builder.add_parents(values);
    } else {
      slot_values.clear();
      read_row(slot_rows[g].ptr(), {builder, g}, "slots", slot_values);
      builder.add_parents(values, slot_values);
    }
  }
  return builder.finish();
}

Graphs from_edges(const py::object& edges, const py::object& num_vertices) {
  const std::string op = "Graphs.from_edges";
  GraphsBuilder builder(op);
  const auto graphs = entries(edges, op, "edges");
  const int64_t n = static_cast<int64_t>(graphs.size());
  const auto sizes = entries(num_vertices, builder, op, "num_vertices", n);
  std::vector<int64_t> values;
  for (int64_t g = 0; g < n; ++g) {
    values.clear();
    const int64_t size = read_index(sizes[g].ptr(), {builder, g});
    int64_t columns = 0;
    const auto refuse = [&](const std::string& got) {
      throw py::value_error(builder.where(g) + "edges must have shape (edges, 2) or (edges, 3), got " + got);
    };
    if (const auto shape = read_array(graphs[g].ptr(), Where{builder, g}, values)) {
      const bool empty = shape->size() == 1 && (*shape)[0] == 0;
      if (!empty && (shape->size() != 2 || ((*shape)[1] != 2 && (*shape)[1] != 3))) refuse(text(*shape));
      columns = empty ? 2 : (*shape)[1];
    } else {
      for_each(graphs[g].ptr(), builder.where(g) + "edges must be a sequence of rows, got ",
               [&](PyObject* row, int64_t e) {
                 const size_t before = values.size();
                 read_row(row, {builder, g}, "a row of edges", values);
                 const int64_t got = static_cast<int64_t>(values.size() - before);
                 if (e == 0) columns = got;
                 if ((got != 2 && got != 3) || got != columns) {
                   refuse("row " + std::to_string(e) + " of " + std::to_string(got) + " numbers" +
                          (got != columns ? " after rows of " + std::to_string(columns) : ""));
                 }
               });
      if (values.empty()) columns = 2;
    }
    builder.add_edges(values, static_cast<int>(columns), size);
  }
  return builder.finish();
}

Graphs chain(const py::object& lengths, bool reverse) {
  const std::string op = "Graphs.chain";
  GraphsBuilder builder(op);
  const auto rows = entries(lengths, op, "lengths");
  for (size_t g = 0; g < rows.size(); ++g) {
    builder.add_chain(read_index(rows[g].ptr(), {builder, static_cast<int64_t>(g)}), reverse);
  }
  return builder.finish();
}

// The graphs with a type per vertex, and the table of names.
py::tuple with_types(const Graphs& graphs, const py::object& types) {
  const std::string op = "Graphs.with_types";
  std::vector<int32_t> codes;
  py::dict table;
  py::list names;
  for_each(types.ptr(), op + ": types must be a sequence of names, got ", [&](PyObject* item, int64_t v) {
    if (!PyUnicode_Check(item)) {
      throw py::type_error(op + ": types[" + std::to_string(v) + "] must be a str, got " + type_name(item));
    }
    // A plain str also of what only derives from it, such as NumPy's.
    const auto plain = py::reinterpret_steal<py::object>(PyUnicode_FromObject(item));
    PyObject* const name = plain.ptr();
    PyObject* known = PyDict_GetItemWithError(table.ptr(), name);
    if (known == nullptr) {
      if (PyErr_Occurred()) throw py::error_already_set();
      table[plain] = py::int_(names.size());
      known = PyDict_GetItem(table.ptr(), name);
      names.append(plain);
    }
    codes.push_back(static_cast<int32_t>(PyLong_AsLong(known)));
  });
  if (static_cast<int64_t>(codes.size()) != graphs.num_vertices()) {
    throw py::value_error(op + ": " + std::to_string(codes.size()) + " types for " +
                          std::to_string(graphs.num_vertices()) + " vertices");
  }
  return py::make_tuple(graphs.with_types(codes), py::tuple(names));
}

py::tuple type_names(const Graphs& graphs, const py::tuple& names) {
  const auto types = graphs.types();
  py::tuple result(types.size());
  for (size_t v = 0; v < types.size(); ++v) result[v] = names[types[v]];
  return result;
}

Graphs batch(const py::list& parts, bool typed) {
  std::vector<const Graphs*> pointers;
  pointers.reserve(parts.size());
  py::detail::make_caster<Graphs> caster;  // one for all: to make one takes longer than to copy a tree
  for (const auto& part : parts) {
    if (!caster.load(part, false)) throw py::type_error("batch: got " + type_name(part.ptr()));
    pointers.push_back(&py::detail::cast_op<const Graphs&>(caster));
  }
  return Graphs::batch(pointers, typed);
}

Graphs from_bytes(const py::bytes& bytes, int64_t num_types) {
  const auto view = static_cast<std::string_view>(bytes);
  std::vector<int32_t> block(view.size() / sizeof(int32_t));
  std::memcpy(block.data(), view.data(), block.size() * sizeof(int32_t));
  Graphs graphs = Graphs::from_block(block);
  for (const int32_t type : graphs.types()) {
    if (type >= num_types) throw std::invalid_argument("Graphs: the serialised form is damaged");
  }
  return graphs;
}

// `kinds` as (slots in ascending order, whether all children are summed).
Schedule schedule(const Graphs& graphs, const std::vector<std::pair<std::vector<int32_t>, bool>>& kinds,
                  const std::vector<int32_t>& kind_of_type) {
  std::vector<Kind> converted;
  for (const auto& [slots, sum] : kinds) converted.push_back({slots, sum});
  return Schedule(graphs, converted, kind_of_type);
}

// (first, length) in the block of every array, by name.
py::dict layout(const Schedule& schedule) {
  static constexpr std::pair<const char*, Schedule::Array> kArrays[] = {{"tasks", Schedule::kTaskTable},
                                                                        {"frontiers", Schedule::kFrontierTask},
                                                                        {"slots", Schedule::kSlots},
                                                                        {"vertices", Schedule::kVertexOf},
                                                                        {"gather", Schedule::kGather},
                                                                        {"runs", Schedule::kRuns},
                                                                        {"first_edge", Schedule::kFirstEdge},
                                                                        {"edge_children", Schedule::kEdgeChild},
                                                                        {"edge_parents", Schedule::kEdgeParent},
                                                                        {"first_use", Schedule::kFirstUse},
                                                                        {"users", Schedule::kUsers},
                                                                        {"first_sum_use", Schedule::kFirstSumUse},
                                                                        {"sum_use_edges", Schedule::kSumUseEdge}};
  static_assert(std::size(kArrays) == Schedule::kNumArrays);
  py::dict result;
  for (const auto& [name, which] : kArrays) {
    result[name] = py::make_tuple(schedule.offset(which), schedule.size(which));
  }
  return result;
}

}  // namespace

void bind(py::module_& m) {
  auto vertex = m.def_submodule("vertex", "Graphs and schedules as integers.");
  const auto write = [](void (Graphs::*array)(int64_t*) const) {
    return [array](const Graphs& graphs, uintptr_t address) { (graphs.*array)(reinterpret_cast<int64_t*>(address)); };
  };
  py::class_<Graphs>(vertex, "Graphs", "A batch of directed acyclic graphs; weft.Graphs is its face.")
      .def_property_readonly("num_graphs", &Graphs::num_graphs)
      .def_property_readonly("num_vertices", &Graphs::num_vertices)
      .def_property_readonly("num_edges", &Graphs::num_edges)
      .def_property_readonly("num_levels", &Graphs::num_levels)
      .def_property_readonly("num_slots", &Graphs::num_slots)
      // Each fills the int64 array at an address, where the caller has room for all of it.
      .def("write_ptr", write(&Graphs::write_ptr))
      .def("write_graph_index", write(&Graphs::write_graph_index))
      .def("write_edges", write(&Graphs::write_edges))
      .def("write_levels", write(&Graphs::write_levels))
      .def("write_roots", write(&Graphs::write_roots))
      .def("slice", &Graphs::slice)
      .def("graph_of",
           [](const Graphs& graphs, int64_t vertex) {
             const int64_t graph = graphs.graph_of(vertex);
             return py::make_tuple(graph, vertex - graphs.ptr()[graph]);
           })
      .def("with_types", &with_types)
      .def("type_names", &type_names)
      .def("renamed_types",
           [](const Graphs& graphs, const std::vector<int32_t>& names) { return graphs.renamed_types(names); })
      .def("to_bytes", [](const Graphs& graphs) {
        const auto block = graphs.block();
        return py::bytes(reinterpret_cast<const char*>(block.data()), block.size_bytes());
      });
  const auto number = [](Schedule::Header which) {
    return [which](const Schedule& schedule) { return schedule.number(which); };
  };
  py::class_<Schedule>(vertex, "Schedule", py::buffer_protocol(),
                       "See csrc/vertex/schedule.h; its buffer is the block.")
      .def_buffer([](const Schedule& schedule) {
        const auto block = schedule.block();
        return py::buffer_info(const_cast<int32_t*>(block.data()), static_cast<py::ssize_t>(block.size()));
      })
      .def("layout", &layout)
      .def_property_readonly("num_vertices", number(Schedule::kVertices))
      .def_property_readonly("num_tasks", number(Schedule::kTasks))
      .def_property_readonly("num_inner", &Schedule::num_inner)
      .def_property_readonly("num_edges", number(Schedule::kEdges))
      .def_property_readonly("num_uses", number(Schedule::kUses))
      .def_property_readonly("max_count", number(Schedule::kMaxCount))
      .def_property_readonly("max_edges", number(Schedule::kMaxEdges))
      .def_property_readonly("single_use", [](const Schedule& s) { return s.number(Schedule::kSingleUse) != 0; });
  vertex.def("schedule", &schedule, py::call_guard<py::gil_scoped_release>());
  vertex.def(
      "kernel_body",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, bool backward, size_t step,
         bool leaves, int each) {
        const Program program = Program::parse(code, constants);
        const Step& kernel = (backward ? program.backward : program.forward).at(step);
        return py::make_tuple(kernel_body(program, kernel, leaves, each), kernel.buffers);
      },
      "The source of a step and its buffers, for the tests.", py::arg("code"), py::arg("constants"),
      py::arg("backward"), py::arg("step"), py::arg("leaves"), py::arg("each") = 1);
  vertex.def(
      "tail_body",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, bool backward) {
        const Program program = Program::parse(code, constants);
        return tail_body(program, backward ? program.backward : program.forward);
      },
      "The source of the last frontiers, for the tests.", py::arg("code"), py::arg("constants"), py::arg("backward"));
  vertex.def(
      "multiply_adds",
      [](const std::vector<int64_t>& code, const std::vector<double>& constants, const std::vector<int32_t>& schedule,
         bool backward) { return multiply_adds(Program::parse(code, constants), Schedule::tasks(schedule), backward); },
      "Of the products of a pass.", py::arg("code"), py::arg("constants"), py::arg("schedule"), py::arg("backward"));
  vertex.def("first_beyond",
             [](const Graphs& graphs, const std::vector<int64_t>& limits) { return first_beyond(graphs, limits); });
  vertex.def("first_typed", [](const Graphs& graphs, const std::vector<bool>& wanted) -> int64_t {
    const auto types = graphs.types();
    const auto found = std::find_if(types.begin(), types.end(), [&](int32_t type) { return wanted[type]; });
    return found == types.end() ? -1 : found - types.begin();
  });
  vertex.def("from_children", &from_children);
  vertex.def("from_parents", &from_parents);
  vertex.def("from_edges", &from_edges);
  vertex.def("chain", &chain);
  vertex.def("batch", &batch);
  vertex.def("from_bytes", &from_bytes);
  bind_frontiers(vertex);
  bind_known(vertex);
}

}  // namespace weft::vertex
