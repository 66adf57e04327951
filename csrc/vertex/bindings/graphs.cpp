// weft.Graphs and its schedules, as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "vertex/bindings/readers.h"
#include "vertex/graph/graphs.h"
#include "vertex/graph/schedule.h"

namespace weft::vertex {

namespace {

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

// `op` begins the messages: other readers end here, too.
Graphs from_edges(const py::object& edges, const py::object& num_vertices, const std::string& op) {
  GraphsBuilder builder(op);
  const auto graphs = entries(edges, op, "edges");
  const int64_t n = static_cast<int64_t>(graphs.size());
  const auto sizes = entries(num_vertices, builder, op, "num_vertices", n);
  std::vector<int64_t> values;
  bool warned = false;
  for (int64_t g = 0; g < n; ++g) {
    values.clear();
    const int64_t size = read_index(sizes[g].ptr(), {builder, g});
    int64_t columns = 0;
    const auto refuse = [&](const std::string& got) {
      throw py::value_error(builder.where(g) + "edges must have shape (edges, 2) or (edges, 3), got " + got +
                            "; Graphs.from_edge_index takes shape (2, edges)");
    };
    if (const auto shape = read_array(graphs[g].ptr(), Where{builder, g}, values)) {
      const bool empty = shape->size() == 1 && (*shape)[0] == 0;
      if (!empty && (shape->size() != 2 || ((*shape)[1] != 2 && (*shape)[1] != 3))) refuse(text(*shape));
      columns = empty ? 2 : (*shape)[1];
      if (!empty && (*shape)[0] == 2 && !std::exchange(warned, true) &&
          PyErr_WarnEx(
              PyExc_UserWarning,
              (builder.where(g) + "edges of shape " + text(*shape) + " are read as 2 rows (child, parent" +
               (columns == 3 ? ", slot" : "") + "); for an edge_index of shape (2, edges) call Graphs.from_edge_index")
                  .c_str(),
              2) != 0) {
        throw py::error_already_set();
      }
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

Graphs from_edge_index(const py::object& edge_index, const py::object& num_vertices, const std::string& op) {
  GraphsBuilder builder(op);
  const auto graphs = entries(edge_index, op, "edge_index");
  const int64_t n = static_cast<int64_t>(graphs.size());
  const auto sizes = entries(num_vertices, builder, op, "num_vertices", n);
  std::vector<int64_t> values, rows;
  for (int64_t g = 0; g < n; ++g) {
    values.clear();
    const int64_t size = read_index(sizes[g].ptr(), {builder, g});
    const auto refuse = [&](const std::string& got) {
      throw py::value_error(builder.where(g) + "edge_index must have shape (2, edges), row 0 the children and row 1 " +
                            "the parents, got " + got + "; Graphs.from_edges takes shape (edges, 2)");
    };
    if (const auto shape = read_array(graphs[g].ptr(), Where{builder, g}, values)) {
      if (shape->size() != 2 || (*shape)[0] != 2) refuse(text(*shape));
    } else {
      std::vector<int64_t> lengths;
      for_each(graphs[g].ptr(), builder.where(g) + "edge_index must be a tensor, an array or two rows, got ",
               [&](PyObject* row, int64_t) {
                 const size_t before = values.size();
                 read_row(row, {builder, g}, "a row of edge_index", values);
                 lengths.push_back(static_cast<int64_t>(values.size() - before));
               });
      if (lengths.size() != 2 || lengths[0] != lengths[1]) {
        refuse(std::to_string(lengths.size()) + " rows" + (lengths.size() == 2 ? " of different lengths" : ""));
      }
    }
    const size_t edges = values.size() / 2;
    rows.resize(values.size());
    for (size_t e = 0; e < edges; ++e) {
      rows[2 * e] = values[e];
      rows[2 * e + 1] = values[edges + e];
    }
    builder.add_edges(rows, 2, size);
  }
  return builder.finish();
}

Graphs pyramid(const py::object& lengths) {
  const std::string op = "Graphs.pyramid";
  GraphsBuilder builder(op);
  const auto rows = entries(lengths, op, "lengths");
  for (size_t g = 0; g < rows.size(); ++g) {
    builder.add_pyramid(read_index(rows[g].ptr(), {builder, static_cast<int64_t>(g)}));
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
                  const std::vector<int32_t>& kind_of_type, int32_t groups) {
  std::vector<Kind> converted;
  for (const auto& [slots, sum] : kinds) converted.push_back({slots, sum});
  return Schedule(graphs, converted, kind_of_type, groups);
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
                                                                        {"sum_use_edges", Schedule::kSumUseEdge},
                                                                        {"kind_starts", Schedule::kKindStart},
                                                                        {"kind_vertices", Schedule::kKindVertex}};
  static_assert(std::size(kArrays) == Schedule::kNumArrays);
  py::dict result;
  for (const auto& [name, which] : kArrays) {
    result[name] = py::make_tuple(schedule.offset(which), schedule.size(which));
  }
  return result;
}

}  // namespace

void bind_graphs(py::module_& vertex) {
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
      .def("equals", [](const Graphs& graphs, const Graphs& other) { return graphs == other; })
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
                       "See csrc/vertex/graph/schedule.h; its buffer is the block.")
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
  vertex.def("schedule", &schedule, py::arg("graphs"), py::arg("kinds"), py::arg("kind_of_type"), py::arg("groups") = 1,
             py::call_guard<py::gil_scoped_release>());
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
  vertex.def("from_edge_index", &from_edge_index);
  vertex.def("chain", &chain);
  vertex.def("pyramid", &pyramid);
  vertex.def("batch", &batch);
  vertex.def("from_bytes", &from_bytes);
}

}  // namespace weft::vertex
