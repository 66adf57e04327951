#include "vertex/program/program.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace weft::vertex {
namespace {

class Reader {
 public:
  explicit Reader(std::span<const int64_t> code) : code_(code) {}

  int32_t next() {
    if (at_ >= code_.size()) fail();
    return static_cast<int32_t>(code_[at_++]);
  }
  // Below `end`, or the numbers are no program.
  int32_t below(int64_t end) {
    const int32_t value = next();
    if (value < 0 || value >= end) fail();
    return value;
  }
  bool flag() { return below(2) != 0; }
  int32_t count() { return below(int64_t{1} << 24); }
  bool done() const { return at_ == code_.size(); }
  [[noreturn]] static void fail() { throw std::invalid_argument("vertex_frontiers: the program is damaged"); }

 private:
  std::span<const int64_t> code_;
  size_t at_ = 0;
};

void check(const Program& p, const Step& step, const Instruction& i) {
  const auto require = [](bool condition) {
    if (!condition) Reader::fail();
  };
  const auto is_register = [&](int32_t r) { return r >= 0 && r < step.registers; };
  const auto buffer = [&](int32_t b, int32_t first) -> const Buffer& {
    require(b >= 0 && b < static_cast<int32_t>(p.buffers.size()) && first >= 0 && first < p.buffers[b].width);
    return p.buffers[b];
  };
  const bool stores = i.op == Op::kStore || i.op == Op::kStoreSum || i.op == Op::kStoreMax || i.op == Op::kScatter;
  if (!stores) require(is_register(i.result));
  switch (i.op) {
    case Op::kLoad:
      require(i.c >= 0 && i.c <= static_cast<int32_t>(Access::kChild));
      require(buffer(i.a, i.b).width >= i.b + (i.d & 1 ? 1 : step.width));
      break;
    case Op::kConstant:
      require(i.a >= 0 && i.a < static_cast<int32_t>(p.constants.size()));
      break;
    case Op::kUses:
      require(i.a >= 0 && i.a < static_cast<int32_t>(p.tables.size()) && !step.edges);
      for (const Use& use : p.tables[i.a]) require(buffer(use.buffer, use.first).width >= use.first + i.b + step.width);
      break;
    case Op::kStore:
      require(is_register(i.a) && buffer(i.b, i.c).width >= i.c + step.width && !step.reduces);
      break;
    case Op::kStoreSum:
    case Op::kStoreMax:
      require(is_register(i.a) && buffer(i.b, i.c).width > i.c && step.reduces);
      break;
    case Op::kScatter:
      require(is_register(i.a) && buffer(i.b, i.c).width >= i.c + step.width && !step.reduces && !step.edges);
      require(i.d >= -1 && p.buffers[i.b].scattered);
      require((p.buffers[i.b].space == Space::kEdges) == (i.d < 0));
      break;
    case Op::kBegin:
      require(!step.edges);
      break;
    case Op::kEnd:
      break;
    case Op::kSelect:
      require(is_register(i.c));
      [[fallthrough]];
    case Op::kAdd:
    case Op::kSub:
    case Op::kMul:
    case Op::kDiv:
    case Op::kMax:
    case Op::kMin:
    case Op::kGreater:
    case Op::kGreaterEqual:
    case Op::kEqual:
      require(is_register(i.b));
      [[fallthrough]];
    default:
      require(is_register(i.a) && !(p.doubles && (i.op == Op::kFloat16 || i.op == Op::kBFloat16)));
  }
}

std::vector<int32_t> buffers_of(const Program& p, const Step& step) {
  std::set<int32_t> found;
  for (const Instruction& i : step.code) {
    if (i.op == Op::kLoad) found.insert(i.a);
    if (i.op == Op::kStore || i.op == Op::kStoreSum || i.op == Op::kStoreMax || i.op == Op::kScatter) found.insert(i.b);
    if (i.op != Op::kUses) continue;
    for (const Use& use : p.tables[i.a]) found.insert(use.buffer);
  }
  return {found.begin(), found.end()};
}

std::vector<Step> steps(Reader& in, const Program& p) {
  std::vector<Step> found(in.count());
  const auto buffers = static_cast<int64_t>(p.buffers.size());
  for (Step& s : found) {
    s.function = in.below(p.functions);
    s.product = in.flag();
    s.edges = in.flag();
    s.late = in.flag();
    if (s.product) {
      s.source = in.below(buffers);
      s.matrix = in.count();
      s.transposed = in.flag();
      s.target = in.below(buffers);
      s.skips_leaves = in.flag();
      if (p.buffers[s.source].dtype != p.buffers[s.target].dtype) Reader::fail();
      continue;
    }
    s.width = in.count();
    s.registers = in.count();
    s.reduces = in.flag();
    s.code.resize(in.count());
    for (Instruction& i : s.code) {
      i.op = static_cast<Op>(in.below(static_cast<int64_t>(Op::kSelect) + 1));
      i = {i.op, in.next(), in.next(), in.next(), in.next(), in.next()};
      check(p, s, i);
    }
    s.buffers = buffers_of(p, s);
  }
  return found;
}

// Instructions that no store needs are left out. In a loop all is needed: it is empty where there are no children.
std::vector<Instruction> needed(const std::vector<Instruction>& code) {
  std::vector<Instruction> kept;
  std::set<int32_t> read;
  bool loop = false;
  for (size_t k = code.size(); k-- > 0;) {
    const Instruction& i = code[k];
    if (i.op == Op::kEnd) loop = true;
    const bool stores = i.op == Op::kStore || i.op == Op::kStoreSum || i.op == Op::kStoreMax || i.op == Op::kScatter;
    if (!stores && !loop && !read.contains(i.result)) continue;
    kept.push_back(i);
    if (i.op == Op::kBegin) loop = false;
    const bool operands = stores || i.op == Op::kAccumulate || (i.op >= Op::kNeg && i.op <= Op::kSelect);
    if (!stores && !loop && i.op != Op::kAccumulate && i.op != Op::kEnd) read.erase(i.result);
    if (i.op == Op::kEnd || i.op == Op::kAccumulate) read.insert(i.result);
    if (!operands) continue;
    read.insert(i.a);
    if (stores || i.op == Op::kAccumulate || i.op < Op::kAdd) continue;
    read.insert(i.b);
    if (i.op == Op::kSelect) read.insert(i.c);
  }
  return {kept.rbegin(), kept.rend()};
}

// What kernels do at vertices without children: what is gathered, and products of nothing else, are zero, and inner
// rows are not there.
void specialise_for_leaves(Program& p) {
  std::vector<char> zero(p.buffers.size()), read(p.buffers.size());
  for (const auto* list : {&p.forward, &p.backward}) {
    for (const Step& s : *list) {
      if (s.product && !s.skips_leaves) read[s.source] = 1;
    }
  }
  for (const MatrixGradient& g : p.matrix_gradients) {
    if (!g.skips_leaves) read[g.source] = 1;
  }
  for (Step& s : p.forward) {
    if (!s.product || !s.skips_leaves || s.edges) continue;
    zero[s.target] = 1;
    s.zeroes_leaves = p.buffers[s.target].space != Space::kInner && read[s.target];
  }
  for (auto* list : {&p.forward, &p.backward}) {
    for (Step& s : *list) {
      for (Instruction i : s.code) {
        if (i.op == Op::kStore && p.buffers[i.b].space == Space::kInner) continue;
        const auto access = static_cast<Access>(i.c);
        if (i.op == Op::kLoad && (access == Access::kGather || access == Access::kChild || zero[i.a])) {
          i = {Op::kZero, i.result, 0, 0, 0, 0};
        }
        s.leaf_code.push_back(i);
      }
      s.leaf_code = needed(s.leaf_code);
    }
  }
}

void find_written(Program& p) {
  std::vector<std::vector<char>> columns;
  for (const Buffer& b : p.buffers) columns.emplace_back(b.space == Space::kInputGrad ? b.width : 0);
  for (const Step& s : p.backward) {
    if (s.product || s.edges) continue;
    for (const Instruction& i : s.code) {
      if (i.op != Op::kStore || columns[i.b].empty()) continue;
      std::fill_n(columns[i.b].begin() + i.c, s.width, char{1});
    }
  }
  for (size_t b = 0; b < columns.size(); ++b) {
    const auto& c = columns[b];
    p.buffers[b].written = p.functions == 1 && !c.empty() && std::find(c.begin(), c.end(), 0) == c.end();
  }
}

}  // namespace

Program Program::parse(std::span<const int64_t> code, std::span<const double> constants) {
  Reader in(code);
  Program p;
  p.constants.assign(constants.begin(), constants.end());
  p.functions = in.count();
  p.fused = in.flag();
  p.state = in.next();
  p.buffers.resize(in.count());
  for (Buffer& b : p.buffers) {
    b.space = static_cast<Space>(in.below(static_cast<int64_t>(Space::kVector) + 1));
    b.width = in.count();
    b.dtype = static_cast<Dtype>(in.below(static_cast<int64_t>(Dtype::kFloat64) + 1));
    b.scattered = in.flag();
    b.index = in.count();
    b.backward = in.flag();
    b.saved = in.flag();
  }
  const auto buffers = static_cast<int64_t>(p.buffers.size());
  if (p.state >= buffers) Reader::fail();
  const auto is_double = [](const Buffer& b) { return b.dtype == Dtype::kFloat64; };
  p.doubles = std::any_of(p.buffers.begin(), p.buffers.end(), is_double);
  if (p.doubles && !std::all_of(p.buffers.begin(), p.buffers.end(), is_double)) Reader::fail();
  p.tables.resize(in.count());
  for (auto& table : p.tables) {
    table.resize(in.count());
    for (Use& use : table) {
      use.column = in.next();
      use.buffer = in.below(buffers);
      use.first = in.count();
      use.by_parent = in.flag();
    }
  }
  p.forward = steps(in, p);
  p.backward = steps(in, p);
  p.matrix_gradients.resize(in.count());
  for (MatrixGradient& g : p.matrix_gradients) {
    g.matrix = in.count();
    g.source = in.below(buffers);
    g.gradient = in.below(buffers);
    g.edges = in.flag();
    g.skips_leaves = in.flag();
    if (p.buffers[g.source].dtype != p.buffers[g.gradient].dtype) Reader::fail();
  }
  p.vector_gradients.resize(in.count());
  for (VectorGradient& g : p.vector_gradients) {
    g.vector = in.count();
    g.first = in.count();
    g.buffer = in.below(buffers);
    g.column = in.count();
    g.width = in.count();
  }
  if (!in.done()) Reader::fail();
  specialise_for_leaves(p);
  find_written(p);
  return p;
}

int64_t multiply_adds(const Program& program, std::span<const Task> tasks, bool backward) {
  int64_t total = 0;
  const auto add = [&](int32_t source, int32_t target, bool edges, bool skips_leaves, int32_t function) {
    int64_t rows = 0;
    for (const Task& task : tasks) {
      if (function >= 0 && task.kind != function) continue;
      if (edges) {
        rows += task.num_edges;
      } else if (!skips_leaves || task.level > 0) {
        rows += task.count;
      }
    }
    total += rows * program.buffers[source].width * program.buffers[target].width;
  };
  for (const Step& s : backward ? program.backward : program.forward) {
    if (s.product) add(s.source, s.target, s.edges, s.skips_leaves, s.function);
  }
  if (!backward) return total;
  for (const MatrixGradient& g : program.matrix_gradients) {
    add(g.source, g.gradient, g.edges, g.skips_leaves, /*function=*/-1);
  }
  return total;
}

}  // namespace weft::vertex
