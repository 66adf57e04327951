#include "vertex/program/object.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/tensor.h"
#include "vertex/program/analyses.h"
#include "vertex/program/source.h"

namespace weft::vertex {
namespace {

constexpr std::array<std::string_view, 8> kSpaces = {"rows",   "inner",       "edges",      "input",
                                                     "output", "output_grad", "input_grad", "vector"};
constexpr std::array<std::string_view, 4> kDtypes = {"float16", "bfloat16", "float32", "float64"};
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
  const auto& [space, width, dtype, index, backward, saved, scattered] = fields;
  return {enum_named<Space>(kSpaces, space),
          as_int32(width),
          enum_named<Dtype>(kDtypes, dtype),
          scattered,
          as_int32(index),
          backward,
          saved};
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
  const auto& [kernel, product] = fields;
  TORCH_CHECK_VALUE(kernel.has_value() != product.has_value(), "VertexProgram: a step is a kernel or a product");
  Step s{};
  s.product = product.has_value();
  if (s.product) {
    const auto& [function, edges, source, matrix, transposed, target, skips_leaves] = *product;
    s.function = as_int32(function);
    s.edges = edges;
    s.source = as_int32(source);
    s.matrix = as_int32(matrix);
    s.transposed = transposed;
    s.target = as_int32(target);
    s.skips_leaves = skips_leaves;
    return s;
  }
  const auto& [function, edges, late, width, registers, reduces, code] = *kernel;
  s.function = as_int32(function);
  s.edges = edges;
  s.late = late;
  s.width = as_int32(width);
  s.registers = as_int32(registers);
  s.reduces = reduces;
  for (const InstructionFields& i : code) s.code.push_back(instruction_of(i));
  return s;
}

ProgramPointer make_program(int64_t functions, bool fused, int64_t state, const std::vector<BufferFields>& buffers,
                            const std::vector<std::vector<UseFields>>& tables, const std::vector<double>& constants,
                            const std::vector<StepFields>& forward, const std::vector<StepFields>& backward,
                            const std::vector<MatrixFields>& matrix_gradients,
                            const std::vector<VectorFields>& vector_gradients) {
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
  for (const auto& [matrix, source, gradient, edges, skips_leaves] : matrix_gradients) {
    p.matrix_gradients.push_back({as_int32(matrix), as_int32(source), as_int32(gradient), edges, skips_leaves});
  }
  for (const auto& [vector, first, buffer, column, width] : vector_gradients) {
    p.vector_gradients.push_back(
        {as_int32(vector), as_int32(first), as_int32(buffer), as_int32(column), as_int32(width)});
  }
  try {
    p.finish();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return c10::make_intrusive<ProgramObject>(
      std::move(p), ProgramFields(functions, fused, state, buffers, tables, constants, forward, backward,
                                  matrix_gradients, vector_gradients));
}

const std::vector<Step>& steps_of(const Program& p, bool backward) {
  return backward ? p.backward : p.forward;
}

// Of the forward pass: space, width, dtype.
std::vector<std::tuple<std::string, int64_t, std::string>> results_of(const ProgramPointer& self) {
  std::vector<std::tuple<std::string, int64_t, std::string>> found;
  for (const int32_t i : self->program.results()) {
    const Buffer& b = self->program.buffers[i];
    found.emplace_back(kSpaces[static_cast<size_t>(b.space)], b.width, kDtypes[static_cast<size_t>(b.dtype)]);
  }
  return found;
}

int64_t multiply_adds_of(const ProgramPointer& self, const at::Tensor& schedule, bool backward) {
  const std::span<const int32_t> numbers(pointer<int32_t>(schedule), schedule.numel());
  return multiply_adds(self->program, Schedule::tasks(numbers), backward);
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
          .def("multiply_adds", &multiply_adds_of)
          .def("kernel_body", &kernel_source)
          .def("tail_body", &tail_source);
  return true;
}

}  // namespace weft::vertex
