#include "scan/pointwise/program.h"

#include <iterator>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

namespace weft::scan {
namespace {

[[noreturn]] void refuse(const std::string& line) {
  throw std::invalid_argument("pointwise_scan: program has an impossible part '" + line.substr(0, 80) + "'");
}

std::vector<int32_t> registers_in(std::istream& words, const StepProgram& p, const std::string& line) {
  std::vector<int32_t> found;
  for (int64_t r; words >> r;) {
    if (r < 0 || r >= p.registers()) refuse(line);
    found.push_back(static_cast<int32_t>(r));
  }
  if (!words.eof()) refuse(line);
  return found;
}

StepProgram::Instruction instruction(const std::string& name, std::istream& words, const StepProgram& p,
                                     const std::string& line) {
  StepProgram::Instruction made{StepProgram::Kind::kElementwise, Elementwise::kNeg};
  if (name == "constant") {
    std::string number;
    if (!(words >> number)) refuse(line);
    made.kind = StepProgram::Kind::kConstant;
    try {
      made.constant = std::stod(number);
    } catch (const std::out_of_range&) {  // denormal
      made.constant = 0;
    }
    return made;
  }
  const std::vector<int32_t> operands = registers_in(words, p, line);
  size_t wanted = 1;
  if (name == "stop") {
    made.kind = StepProgram::Kind::kStop;
  } else {
    size_t op = 0;
    while (op < std::size(kElementwise) && name != kElementwise[op].name) ++op;
    if (op == std::size(kElementwise)) refuse(line);
    made.op = static_cast<Elementwise>(op);
    wanted = static_cast<size_t>(kElementwise[op].operands);
  }
  if (operands.size() != wanted) refuse(line);
  for (size_t i = 0; i < wanted; ++i) made.operands[i] = operands[i];
  return made;
}

StepProgram parsed(const std::string& text) {
  StepProgram p;
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line, ';');
  std::istringstream sizes(line);
  const auto few = [](int32_t n, int32_t least) { return n >= least && n <= kMaxStepTensors; };
  if (!(sizes >> p.states >> p.inputs >> p.parameters) || p.states < 1 || p.states > kMaxStates || !few(p.inputs, 1) ||
      !few(p.parameters, 0)) {
    refuse(line);
  }
  while (std::getline(lines, line, ';')) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "next") {
      p.next = registers_in(words, p, line);
    } else if (name == "jacobian") {
      p.jacobian = registers_in(words, p, line);
    } else if (name == "vjp") {
      p.vjp = registers_in(words, p, line);
    } else {
      p.code.push_back(instruction(name, words, p, line));
    }
  }
  const auto sized = [](const std::vector<int32_t>& list, int32_t n) { return list.size() == static_cast<size_t>(n); };
  if (!sized(p.next, p.states) || !sized(p.jacobian, p.states * p.states) || !sized(p.vjp, p.wanted())) {
    refuse("the end");
  }
  return p;
}

}  // namespace

std::vector<int32_t> StepProgram::needed(const std::vector<int32_t>& roots) const {
  std::vector<char> wanted(static_cast<size_t>(registers()));
  for (const int32_t r : roots) wanted[r] = 1;
  for (int32_t r = registers() - 1; r >= first(); --r) {
    const Instruction& i = code[r - first()];
    if (!wanted[r] || i.kind == Kind::kConstant) continue;
    const int operands = i.kind == Kind::kStop ? 1 : info(i.op).operands;
    for (int o = 0; o < operands; ++o) wanted[i.operands[o]] = 1;
  }
  std::vector<int32_t> found;
  for (int32_t r = first(); r < registers(); ++r) {
    if (wanted[r]) found.push_back(r - first());
  }
  return found;
}

const StepProgram& step_program(const std::string& text) {
  static std::mutex& mutex = *new std::mutex;
  static auto& known = *new std::unordered_map<std::string, std::unique_ptr<const StepProgram>>;
  const std::lock_guard lock(mutex);
  auto& found = known[text];
  if (found == nullptr) {
    try {
      found = std::make_unique<const StepProgram>(parsed(text));
    } catch (...) {
      known.erase(text);
      throw;
    }
  }
  return *found;
}

}  // namespace weft::scan
