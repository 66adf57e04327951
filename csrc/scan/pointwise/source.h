// A step as CUDA source.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "scan/pointwise/program.h"

namespace weft::scan {

// Statements that set the elements of arrays by name to registers, from the arrays h, x, p and d: states, inputs,
// parameters and gradients of the states after the step, of type T.
std::string step_body(const StepProgram& step,
                      const std::vector<std::pair<std::string, std::vector<int32_t>>>& results);

}  // namespace weft::scan
