#include "vertex/program/program.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "vertex/program/analyses.h"
#include "vertex/program/partition.h"

namespace weft::vertex {
namespace {

// Far beyond what a kernel has: a damaged number shall not become an allocation.
constexpr size_t kMaxRegisters = size_t{1} << 16;

// One step's; `where` names it in errors.
class Checks {
 public:
  Checks(const Program& p, const Step& step, std::string where) : p_(p), step_(step), where_(std::move(where)) {}

  void step() {
    require(in(step_.function, p_.functions), "function");
    const bool once = step_.when != Step::When::kFrontiers;
    const bool layer = once && step_.kind == Step::Kind::kProduct;
    require(!layer || p_.functions == 1 || (by_row(step_.source) && by_row(step_.target)), "layer of all rows");
    if (step_.kind == Step::Kind::kTotal) {
      const bool fits = step_.column >= 0 && step_.column + step_.width <= buffer(step_.source).width;
      require(step_.width >= 0 && fits && step_.vector >= 0 && step_.first >= 0, "columns");
      return;
    }
    if (step_.kind != Step::Kind::kKernel) {
      const Buffer &source = buffer(step_.source), &target = buffer(step_.target);
      require(source.dtype == target.dtype, "dtypes of source and target");
      require(step_.matrix >= 0, "matrix");
      const bool added = step_.kind == Step::Kind::kProduct && step_.bias >= 0;
      if (added)
        require(buffer(step_.bias).space == Space::kVector && p_.buffers[step_.bias].width == target.width &&
                    p_.buffers[step_.bias].dtype == target.dtype && step_.when == Step::When::kBefore,
                "bias");
      return;
    }
    require(step_.width >= 0 && in(step_.registers, kMaxRegisters), "width or registers");
    written_.assign(step_.registers, false);
    const std::string kernel = where_;
    for (size_t i = 0; i < step_.code.size(); ++i) {
      where_ = kernel + ", instruction " + std::to_string(i) + " (" + info(step_.code[i].op).name + ")";
      instruction(step_.code[i]);
      if (!info(step_.code[i].op).stores) written_[step_.code[i].result] = true;
    }
    where_ = kernel;
    require(!loop_, "loop without an end");
  }

  const Buffer& buffer(int32_t b) const {
    require(in(b, p_.buffers.size()), "buffer");
    return p_.buffers[b];
  }
  void require(bool condition, const char* what) const {
    if (!condition) throw std::invalid_argument("vertex_frontiers: " + where_ + ": impossible " + what);
  }

 private:
  bool by_row(int32_t b) const { return buffer(b).space == Space::kRows || p_.buffers[b].space == Space::kInner; }
  static bool in(int64_t x, size_t end) { return x >= 0 && x < static_cast<int64_t>(end); }
  // `width` columns from `first` on.
  void columns(int32_t b, int64_t first, int64_t width) const {
    require(first >= 0 && first < buffer(b).width && first + width <= p_.buffers[b].width, "columns");
  }

  void instruction(const Instruction& i) {
    const OpInfo& op = info(i.op);
    require(op.stores || in(i.result, step_.registers), "result");
    for (int r = 0; r < op.operands; ++r) {
      require(in(i.operands[r], step_.registers) && written_[i.operands[r]], "operand");
    }
    switch (i.op) {
      case Op::kLoad:
        columns(i.buffer, i.column, i.broadcast ? 1 : step_.width);
        require((i.access == Access::kGather) == (i.gather >= 0), "gather");
        require(i.access != Access::kChild || step_.edges || loop_, "load of a child outside a loop");
        break;
      case Op::kConstant:
        require(in(i.constant, p_.constants.size()), "constant");
        break;
      case Op::kUses:
        require(in(i.table, p_.tables.size()) && !step_.edges, "table");
        for (const Use& use : p_.tables[i.table]) columns(use.buffer, int64_t{use.first} + i.column, step_.width);
        break;
      case Op::kStore:
        columns(i.buffer, i.column, step_.width);
        require(!step_.reduces, "store of a kernel that reduces");
        break;
      case Op::kStoreSum:
      case Op::kStoreMax:
        columns(i.buffer, i.column, 1);
        require(step_.reduces, "store of a kernel that does not reduce");
        break;
      case Op::kScatter:
        columns(i.buffer, i.column, step_.width);
        require(!step_.reduces && !step_.edges && p_.buffers[i.buffer].scattered, "scatter");
        require(i.gather >= -1 && (p_.buffers[i.buffer].space == Space::kEdges) == (i.gather < 0), "gather");
        break;
      case Op::kBegin:
        require(!step_.edges && !loop_, "loop in a loop");
        loop_ = true;
        break;
      case Op::kAccumulate:
      case Op::kEnd:
        require(loop_ && written_[i.result], "end of no loop");
        loop_ = i.op != Op::kEnd;
        break;
      case Op::kFloat16:
      case Op::kBFloat16:
        require(!p_.doubles, "rounding of doubles");
        break;
      default:
        require(i.op != Op::kZero, "instruction");
    }
  }

  const Program& p_;
  const Step& step_;
  std::string where_;
  std::vector<bool> written_;  // registers, by the instructions so far
  bool loop_ = false;
};

std::vector<int32_t> buffers_of(const Program& p, const Step& step) {
  if (step.kind == Step::Kind::kTotal) return {step.source};
  std::set<int32_t> found;
  if (step.kind != Step::Kind::kKernel) found = {step.source, step.target};
  if (step.kind == Step::Kind::kProduct && step.bias >= 0) found.insert(step.bias);
  for (const Instruction& i : step.code) {
    if (i.op == Op::kLoad || info(i.op).stores) found.insert(i.buffer);
    if (i.op != Op::kUses) continue;
    for (const Use& use : p.tables[i.table]) found.insert(use.buffer);
  }
  return {found.begin(), found.end()};
}

}  // namespace

void Program::finish() {
  partitions = std::make_shared<Partitions>();
  const auto is_double = [](const Buffer& b) { return b.dtype == DType::f64; };
  doubles = std::any_of(buffers.begin(), buffers.end(), is_double);
  const Step none{};
  const Checks checks(*this, none, "the program");
  checks.require(functions > 0, "number of functions");
  checks.require(!doubles || std::all_of(buffers.begin(), buffers.end(), is_double), "mixture of dtypes");
  for (const Buffer& b : buffers) checks.require(b.width >= 0 && b.index >= 0, "buffer");
  if (state != -1) checks.buffer(state);
  for (const auto& table : tables) {
    for (const Use& use : table) {
      checks.buffer(use.buffer);
      checks.require(use.column >= -1 && use.first >= 0, "use");
    }
  }
  for (auto* list : {&forward, &backward}) {
    const std::string pass = list == &forward ? "forward" : "backward";
    for (size_t s = 0; s < list->size(); ++s) {
      Step& step = (*list)[s];
      Checks(*this, step, pass + " step " + std::to_string(s)).step();
      step.buffers = buffers_of(*this, step);
      for (const Instruction& i : step.code) {
        if (i.op == Op::kLoad && i.access == Access::kGather) gathered = std::max(gathered, i.gather + 1);
      }
    }
  }
  specialise_for_leaves(*this);
  find_written(*this);
  find_gradients(*this);
}

std::vector<int32_t> Program::results() const {
  std::vector<int32_t> found;
  for (const bool saved : {false, true}) {
    for (size_t b = 0; b < buffers.size(); ++b) {
      if (saved ? buffers[b].saved : buffers[b].space == Space::kOutput) found.push_back(static_cast<int32_t>(b));
    }
  }
  return found;
}

}  // namespace weft::vertex
