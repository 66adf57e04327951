// Expressions of element-wise instructions as CUDA source. Their numbers are of a type T; common/elementwise.jit.cuh
// has what they call.
#pragma once
#include <array>
#include <string>
#include <string_view>

namespace weft {

std::string number(double value);

// The text of an instruction (common/elementwise.h) with the operands in the place of a, b and c.
std::string filled(std::string_view text, const std::array<std::string, 3>& operands);

}  // namespace weft
