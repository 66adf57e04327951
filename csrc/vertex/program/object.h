// A program as torch's dispatcher passes it: a custom class, made once by the compiler and not changed any more.
#pragma once
#include <torch/custom_class.h>

#include <string>
#include <tuple>
#include <vector>

#include "vertex/program/program.h"

namespace weft::vertex {

struct ProgramObject final : torch::CustomClassHolder {
  explicit ProgramObject(Program made) : program(std::move(made)) {}
  const Program program;
};

using ProgramPointer = c10::intrusive_ptr<ProgramObject>;

// Makes torch know the class, as torch.classes.weft.VertexProgram.
bool register_program();

// Before the registrations of all who include this, which name the class: files are initialised in any order.
[[maybe_unused]] static const bool kProgramRegistered = register_program();

}  // namespace weft::vertex
