// A program as torch's dispatcher passes it: a custom class, made once by the compiler and not changed any more.
#pragma once
#include <torch/custom_class.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "vertex/program/program.h"

namespace weft::vertex {

// What the compiler's dataclasses (compiler/ir.py and its neighbours) hold, field by field, in the order of the class's
// constructor.
using Numbers = std::vector<int64_t>;
using BufferFields = std::tuple<std::string, int64_t, std::string, int64_t, bool, bool, bool, bool>;
using UseFields = std::tuple<int64_t, int64_t, int64_t, bool>;
using InstructionFields =
    std::tuple<std::string, int64_t, Numbers, int64_t, int64_t, std::string, int64_t, bool, int64_t, int64_t>;
using KernelFields = std::tuple<std::string, int64_t, bool, int64_t, int64_t, bool, std::vector<InstructionFields>>;
using ProductFields = std::tuple<std::string, int64_t, bool, int64_t, int64_t, bool, int64_t, bool, int64_t>;
using OuterFields = std::tuple<std::string, int64_t, bool, int64_t, int64_t, int64_t, bool>;
using TotalFields = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
using StepFields = std::tuple<std::optional<KernelFields>, std::optional<ProductFields>, std::optional<OuterFields>,
                              std::optional<TotalFields>>;
using ProgramFields = std::tuple<int64_t, bool, int64_t, std::vector<BufferFields>, std::vector<std::vector<UseFields>>,
                                 std::vector<double>, std::vector<StepFields>, std::vector<StepFields>>;

struct ProgramObject final : torch::CustomClassHolder {
  ProgramObject(Program made, ProgramFields from) : program(std::move(made)), fields(std::move(from)) {}
  const Program program;
  const ProgramFields fields;  // for copies and files
};

using ProgramPointer = c10::intrusive_ptr<ProgramObject>;

// Makes torch know the class, as torch.classes.weft.VertexProgram.
bool register_program();

// Before the registrations of all who include this, which name the class: files are initialised in any order.
[[maybe_unused]] static const bool kProgramRegistered = register_program();

}  // namespace weft::vertex
