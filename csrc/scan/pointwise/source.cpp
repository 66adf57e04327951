#include "scan/pointwise/source.h"

#include "common/expression.h"

namespace weft::scan {

std::string step_body(const StepProgram& step,
                      const std::vector<std::pair<std::string, std::vector<int32_t>>>& results) {
  const int32_t inputs = step.states, parameters = inputs + step.inputs, gradients = parameters + step.parameters;
  const auto name = [&](int32_t r) {
    const auto element = [](const char* array, int32_t i) { return array + ("[" + std::to_string(i) + "]"); };
    if (r < inputs) return element("h", r);
    if (r < parameters) return element("x", r - inputs);
    if (r < gradients) return element("p", r - parameters);
    if (r < step.first()) return element("d", r - gradients);
    return "r" + std::to_string(r);
  };
  std::vector<int32_t> roots;
  for (const auto& [array, registers] : results) roots.insert(roots.end(), registers.begin(), registers.end());
  std::string text;
  for (const int32_t k : step.needed(roots)) {
    const StepProgram::Instruction& i = step.code[k];
    std::string value;
    switch (i.kind) {
      case StepProgram::Kind::kConstant:
        value = number(i.constant);
        break;
      case StepProgram::Kind::kStop:
        value = name(i.operands[0]);
        break;
      case StepProgram::Kind::kElementwise:
        value = filled(info(i.op).cuda, {name(i.operands[0]), name(i.operands[1]), name(i.operands[2])});
        break;
    }
    text += " const T " + name(step.first() + k) + " = " + value + ";";
  }
  for (const auto& [array, registers] : results) {
    for (size_t i = 0; i < registers.size(); ++i) {
      text += " " + array + "[" + std::to_string(i) + "] = " + name(registers[i]) + ";";
    }
  }
  return text;
}

}  // namespace weft::scan
