#include "vertex/program/object.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/tensor.h"
#include "vertex/program/pass.h"
#include "vertex/program/source.h"

namespace weft::vertex {
namespace {

constexpr std::array<std::string_view, 10> kSpaces = {"rows",   "inner",       "edges",      "input",      "layer",
                                                      "output", "output_grad", "input_grad", "layer_grad", "vector"};
constexpr std::array<std::string_view, 3> kTimes = {"before", "frontiers", "after"};
constexpr std::array<std::string_view, 4> kDTypes = {"float16", "bfloat16", "float32", "float64"};
constexpr std::array<std::string_view, 4> kAccesses = {"row", "parent", "gather", "child"};

template <typename Enum, size_t N>
Enum enum_named(const std::array<std::string_view, N>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(found != names.end(), "VertexProgram: unknown name ", name);
  return static_cast<Enum>(found - names.begin());
}

Op op_named(const std::string& name) {
  const auto found = std::find_if(std::begin(kOps), std::end(kOps), [&](const OpInfo& op) { return name == op.name; });
  TORCH_CHECK_VALUE(found != std::end(kOps), "VertexProgram: unknown instruction ", name);
  return static_cast<Op>(found - std::begin(kOps));
}

int32_t as_int32(int64_t x) {
  TORCH_CHECK_VALUE(x == static_cast<int32_t>(x), "VertexProgram: ", x, " does not fit in 32 bits");
  return static_cast<int32_t>(x);
}

Buffer buffer_of(const BufferFields& fields) {
  const auto& [space, width, dtype, index, backward, saved, scattered, zeros] = fields;
  return {enum_named<Space>(kSpaces, space),
          as_int32(width),
          enum_named<DType>(kDTypes, dtype),
          scattered,
          as_int32(index),
          backward,
          saved,
          zeros};
}

Instruction instruction_of(const InstructionFields& fields) {
  const auto& [op, result, operands, buffer, column, access, gather, broadcast, constant, table] = fields;
  Instruction i{op_named(op), as_int32(result)};
  TORCH_CHECK_VALUE(static_cast<int>(operands.size()) == info(i.op).operands, "VertexProgram: ", op, " of ",
                    operands.size(), " operands");
  std::transform(operands.begin(), operands.end(), i.operands.begin(), as_int32);
  i.buffer = as_int32(buffer);
  i.column = as_int32(column);
  i.access = enum_named<Access>(kAccesses, access);
  i.gather = as_int32(gather);
  i.broadcast = broadcast;
  i.constant = as_int32(constant);
  i.table = as_int32(table);
  return i;
}

Step step_of(const StepFields& fields) {
  const auto& [kernel, product, outer, total] = fields;
  const int kinds = kernel.has_value() + product.has_value() + outer.has_value() + total.has_value();
  TORCH_CHECK_VALUE(kinds == 1, "VertexProgram: a step is one of a kernel, a product, an outer product, a total");
  Step s{};
  s.source = s.target = s.matrix = s.bias = s.vector = -1;
  const auto common = [&](Step::Kind kind, const std::string& when, int64_t function, bool edges) {
    s.kind = kind;
    s.when = enum_named<Step::When>(kTimes, when);
    s.function = as_int32(function);
    s.edges = edges;
  };
  const auto products = [&](int64_t source, int64_t matrix, bool transposed, int64_t target, bool skips_leaves) {
    s.source = as_int32(source);
    s.matrix = as_int32(matrix);
    s.transposed = transposed;
    s.target = as_int32(target);
    s.skips_leaves = skips_leaves;
  };
  if (product) {
    const auto& [when, function, edges, source, matrix, transposed, target, skips_leaves, bias] = *product;
    common(Step::Kind::kProduct, when, function, edges);
    products(source, matrix, transposed, target, skips_leaves);
    s.bias = as_int32(bias);
  } else if (outer) {
    const auto& [when, function, edges, source, matrix, target, skips_leaves] = *outer;
    common(Step::Kind::kOuter, when, function, edges);
    products(source, matrix, /*transposed=*/false, target, skips_leaves);
  } else if (total) {
    const auto& [function, vector, first, buffer, column, width] = *total;
    common(Step::Kind::kTotal, "after", function, false);
    s.vector = as_int32(vector);
    s.first = as_int32(first);
    s.source = as_int32(buffer);
    s.column = as_int32(column);
    s.width = as_int32(width);
  } else {
    const auto& [when, function, edges, width, registers, reduces, code] = *kernel;
    common(Step::Kind::kKernel, when, function, edges);
    s.width = as_int32(width);
    s.registers = as_int32(registers);
    s.reduces = reduces;
    for (const InstructionFields& i : code) s.code.push_back(instruction_of(i));
  }
  return s;
}

ProgramPointer make_program(int64_t functions, bool fused, int64_t state, const std::vector<BufferFields>& buffers,
                            const std::vector<std::vector<UseFields>>& tables, const std::vector<double>& constants,
                            const std::vector<StepFields>& forward, const std::vector<StepFields>& backward) {
  Program p{};
  p.functions = as_int32(functions);
  p.fused = fused;
  p.state = as_int32(state);
  for (const BufferFields& b : buffers) p.buffers.push_back(buffer_of(b));
  for (const auto& table : tables) {
    auto& uses = p.tables.emplace_back();
    for (const auto& [column, buffer, first, by_parent] : table) {
      uses.push_back({as_int32(column), as_int32(buffer), as_int32(first), by_parent});
    }
  }
  p.constants = constants;
  for (const StepFields& s : forward) p.forward.push_back(step_of(s));
  for (const StepFields& s : backward) p.backward.push_back(step_of(s));
  try {
    p.finish();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return c10::make_intrusive<ProgramObject>(
      std::move(p), ProgramFields(functions, fused, state, buffers, tables, constants, forward, backward));
}

const std::vector<Step>& steps_of(const Program& p, bool backward) {
  return backward ? p.backward : p.forward;
}

// Of the forward pass: space, width, dtype.
std::vector<std::tuple<std::string, int64_t, std::string>> results_of(const ProgramPointer& self) {
  std::vector<std::tuple<std::string, int64_t, std::string>> found;
  for (const int32_t i : self->program.results()) {
    const Buffer& b = self->program.buffers[i];
    found.emplace_back(kSpaces[static_cast<size_t>(b.space)], b.width, kDTypes[static_cast<size_t>(b.dtype)]);
  }
  return found;
}

int64_t multiply_adds_of(const ProgramPointer& self, const at::Tensor& schedule,
                         const std::optional<std::vector<Numbers>>& wanted) {
  const std::span<const int32_t> numbers(pointer<int32_t>(schedule), schedule.numel());
  Extent extent{Schedule::tasks(numbers), numbers[Schedule::kVertices], numbers[Schedule::kEdges], 0};
  for (const Task& task : extent.tasks) extent.leaves += task.level == 0 ? task.count : 0;
  const Program& p = self->program;
  if (!wanted) return multiply_adds(p, forward_pass(p, extent, extent.tasks.size()));
  const Wanted numbers_wanted = {wanted->at(0), wanted->at(1), wanted->at(2)};
  return multiply_adds(p, backward_pass(p, extent, extent.tasks.size(), /*overlap=*/false, numbers_wanted));
}

// Numbers of the inputs, matrices and vectors that the backward pass gives gradients of.
std::vector<Numbers> gradients_of(const ProgramPointer& self) {
  const auto wide = [](const std::vector<int32_t>& x) { return Numbers(x.begin(), x.end()); };
  const auto& g = self->program.gradients;
  return {wide(g.inputs), wide(g.matrices), wide(g.vectors)};
}

// For the tests: the source of a kernel, and its buffers.
std::tuple<std::string, Numbers> kernel_source(const ProgramPointer& self, bool backward, int64_t step, bool leaves,
                                               int64_t each) {
  const Step& kernel = steps_of(self->program, backward).at(step);
  return {kernel_body(self->program, kernel, leaves, static_cast<int>(each)),
          Numbers(kernel.buffers.begin(), kernel.buffers.end())};
}

std::string tail_source(const ProgramPointer& self, bool backward) {
  return tail_body(self->program, steps_of(self->program, backward));
}

}  // namespace

bool register_program() {
  static const auto once =
      torch::class_<ProgramObject>("weft", "VertexProgram")
          .def(torch::init(&make_program))
          .def_pickle([](const ProgramPointer& self) { return self->fields; },
                      [](ProgramFields fields) { return std::apply(make_program, std::move(fields)); })
          // torch asks everything that it is given; by itself it would raise NotImplementedError,
          // which it does not catch.
          .def("__len__",
               [](const ProgramPointer&) -> int64_t {
                 TORCH_CHECK_TYPE(false, "a VertexProgram has no length");
                 return 0;
               })
          // To torch's tracers, what it is among fake tensors.
          .def("tracing_mode", [](const ProgramPointer&) { return std::string("real"); })
          .def("results", &results_of)
          .def("gradients", &gradients_of)
          .def("multiply_adds", &multiply_adds_of)
          .def("kernel_body", &kernel_source)
          .def("tail_body", &tail_source);
  return true;
}

}  // namespace weft::vertex
