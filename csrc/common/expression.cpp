#include "common/expression.h"

#include <cctype>
#include <cmath>
#include <cstdio>

namespace weft {

std::string number(double value) {
  if (std::isnan(value)) return "T(not_a_number())";
  if (std::isinf(value)) return value > 0 ? "T(infinite())" : "T(-infinite())";
  char text[64];
  std::snprintf(text, sizeof text, "T(%.17g)", value);
  return text;
}

std::string filled(std::string_view text, const std::array<std::string, 3>& operands) {
  const auto in_name = [&](size_t k) {
    return k < text.size() && (std::isalnum(static_cast<unsigned char>(text[k])) || text[k] == '_');
  };
  std::string found;
  for (size_t k = 0; k < text.size(); ++k) {
    const bool operand = text[k] >= 'a' && text[k] <= 'c' && !(k > 0 && in_name(k - 1)) && !in_name(k + 1);
    found += operand ? operands[text[k] - 'a'] : std::string(1, text[k]);
  }
  return found;
}

}  // namespace weft
