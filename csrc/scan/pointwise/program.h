// A step of a recurrence as instructions, from the text that python/weft/_scan/step_program.py writes and describes.
// Free of torch and CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/elementwise.h"

namespace weft::scan {

constexpr int kMaxStates = 8, kMaxStepTensors = 64;

struct StepProgram {
  enum class Kind : int8_t { kElementwise, kConstant, kStop };
  struct Instruction {
    Kind kind;
    Elementwise op;
    std::array<int32_t, 3> operands{};
    double constant = 0;
  };

  // Registers are the states, the inputs, the parameters, the gradients of the states after the step, and then one for
  // each instruction.
  int32_t states = 0, inputs = 0, parameters = 0;
  std::vector<Instruction> code;
  std::vector<int32_t> next;      // states
  std::vector<int32_t> jacobian;  // states x states: of each state after the step by each before it
  std::vector<int32_t> vjp;       // gradients of the states before the step, the inputs and the parameters

  int32_t wanted() const { return states + inputs + parameters; }
  int32_t first() const { return wanted() + states; }
  int32_t registers() const { return first() + static_cast<int32_t>(code.size()); }

  // The instructions that these registers depend on, in order, as indices of `code`.
  std::vector<int32_t> needed(const std::vector<int32_t>& roots) const;
};

// The program of a text, read once. std::invalid_argument says what is wrong with it. Lives as long as the process.
const StepProgram& step_program(const std::string& text);

}  // namespace weft::scan
