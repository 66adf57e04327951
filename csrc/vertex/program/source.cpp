#include "vertex/program/source.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "common/expression.h"

namespace weft::vertex {
namespace {

constexpr const char* kTypes[] = {"Float16", "BFloat16", "float", "double"};

class Writer {
 public:
  Writer(const Program& program, const Step& kernel, bool leaves, int each, const Placed& placed = {})
      : program_(program),
        kernel_(kernel),
        code_(leaves ? kernel.leaf_code : kernel.code),
        each_(each),
        placed_(placed) {
    if (each_ > 1) {
      loop_ = " for (int c = 0; c < " + std::to_string(each_) + "; ++c)";
      element_ = " + j + c * lanes]";
    }
  }

  Parts parts() {
    const bool loops = std::any_of(code_.begin(), code_.end(), [](const Instruction& i) { return i.op == Op::kBegin; });
    // Beside the products of blocks of many columns there are not registers for all that could be worked out.
    constexpr int kManyColumns = 4, kManyOperands = 12;
    const auto operands = std::count_if(code_.begin(), code_.end(), [&](const Instruction& i) {
      return i.op == Op::kUses || (i.op == Op::kLoad && i.buffer != placed_.awaited);
    });
    const bool room = placed_.columns <= kManyColumns || operands <= kManyOperands;
    if (kernel_.reduces) {
      reductions();
    } else if (placed_.awaited >= 0 && !loops && room) {
      beside_product();
    } else {
      instructions();
    }
    indices();
    return {declared_, indices_, use_, early_, users_, meanwhile_, text_, declared_ahead_, ahead_, taken_};
  }

 private:
  void instructions() {
    const std::string many = each_ > 1 ? "[" + std::to_string(each_) + "]" : "";
    std::string& declared = kernel_.reduces ? text_ : declared_;
    for (int r = 0; r < kernel_.registers; ++r) declared += " T r" + std::to_string(r) + many + ";";
    std::set<int32_t> touched, stored;  // registers and buffers, by what is not early
    bool loop = false;                  // over children, of which what is in it may be
    for (const Instruction& i : code_) {
      if (i.op == Op::kBegin) loop = true;
      if (i.op == Op::kEnd) loop = false;
      if (!kernel_.reduces && !loop && are_early_uses(i, stored)) {
        first_use(i);
        touched.insert(i.result);
        continue;
      }
      // Where its register is in use before, what a product is made beside has one of its own.
      const bool early = !kernel_.reduces && !loop && is_early_load(i, stored), known = touched.contains(i.result);
      if (early && (!known || placed_.awaited >= 0)) {
        std::swap(text_, early_);
        if (known) {
          result_ = "e" + std::to_string(&i - code_.data());
          declared_ += " T " + result_ + ";";
        }
        instruction(i);
        std::swap(text_, early_);
        if (known) text_ += " r" + std::to_string(i.result) + " = " + result_ + ";";
        result_.clear();
        continue;
      }
      instruction(i);
      touched.insert(i.operands.begin(), i.operands.begin() + info(i.op).operands);
      if (info(i.op).stores) stored.insert(i.buffer);
      if (!info(i.op).stores) touched.insert(i.result);
    }
  }

  // Every result has a variable of its own, so that what does not need the product is worked out while the product
  // waits for its rows. What other blocks wait for is stored as soon as it is there, before all other stores.
  void beside_product() {
    std::map<const Instruction*, std::vector<const Instruction*>> published;  // by what they store
    std::set<const Instruction*> placed;                                      // all of these
    std::map<int32_t, const Instruction*> last;                               // results, by register
    for (const Instruction& i : code_) {
      if (!info(i.op).stores) {
        last[i.result] = &i;
      } else if (is_published(i.buffer)) {
        const auto result = last.find(i.a());
        if (result == last.end() || std::any_of(result->second, &i, [&](const auto& x) { return reads(x, i.buffer); }))
          continue;
        published[result->second].push_back(&i);
        placed.insert(&i);
      }
    }
    std::set<std::string> known;  // before the product
    std::set<int32_t> stored;
    std::string others;  // stores
    const auto publish = [&](const Instruction& i) {
      for (const Instruction* store : published[&i]) instruction(*store);
    };
    for (const Instruction& i : code_) {
      const auto operands = std::span(i.operands).first(static_cast<size_t>(info(i.op).operands));
      if (info(i.op).stores) {
        stored.insert(i.buffer);
        if (placed.contains(&i)) continue;
        std::swap(text_, others);
        instruction(i);
        std::swap(text_, others);
        continue;
      }
      const bool uses = are_early_uses(i, stored), load = is_early_load(i, stored);
      const bool is_known = uses || load || i.op == Op::kZero || i.op == Op::kConstant ||
                            (info(i.op).elementwise && std::all_of(operands.begin(), operands.end(), [&](int32_t r) {
                               return known.contains(name_of(r));
                             }));
      const bool reads_stored = std::any_of(stored.begin(), stored.end(), [&](int32_t b) { return reads(i, b); });
      if (!is_known && reads_stored) text_ += std::exchange(others, {});
      std::string& to = load ? early_ : is_known ? meanwhile_ : text_;
      result_ = "v" + std::to_string(&i - code_.data());
      declared_ += " T " + result_ + ";";
      std::swap(text_, to);
      uses ? first_use(i) : instruction(i);
      std::swap(text_, to);
      names_[i.result] = std::exchange(result_, {});
      if (is_known) known.insert(names_[i.result]);
      publish(i);
    }
    text_ += others;
  }

  bool is_early_load(const Instruction& i, const std::set<int32_t>& stored) const {
    return i.op == Op::kLoad && i.access != Access::kChild && i.buffer != placed_.awaited && !stored.contains(i.buffer);
  }
  // Those of a row, beside a product that does not make them.
  bool are_early_uses(const Instruction& i, const std::set<int32_t>& stored) const {
    if (i.op != Op::kUses || placed_.awaited < 0 || program_.tables[i.table].empty()) return false;
    const auto& table = program_.tables[i.table];
    // What all children are summed to has no column: first_use looks up columns alone.
    return std::none_of(table.begin(), table.end(), [&](const Use& use) {
      return use.column < 0 || use.buffer == placed_.awaited || stored.contains(use.buffer);
    });
  }

  // What says where the operands of a row are, ahead of all that waits for operands: these are loads one after the
  // other, and in a small frontier nothing else hides them. Most rows have one use at most, which is looked up here.
  void indices() {
    const auto index = [&](const std::string& name, const std::string& array, const std::string& end) {
      declared_ += " int " + name + ";";
      declared_ahead_ += " int " + name + "_ahead;";
      indices_ += " " + name + " = " + array + "row" + end + ";";
      ahead_ += " " + name + "_ahead = " + array + "row_ahead" + end + ";";
      taken_ += " " + name + " = " + name + "_ahead;";
    };
    if (kernel_.edges) {
      declared_ += " const int edge = index, row = edge_parents[edge];";
    } else {
      declared_ += " int row;";
      declared_ahead_ += " int row_ahead;";
      indices_ += " row = index;";
      taken_ += " row = row_ahead;";
    }
    if (reads_vertex_) index("vertex", "vertices[", "]");
    for (const int32_t c : gathered_) {
      const std::string n = std::to_string(c);
      index("child" + n, "gather[" + n + " * num_vertices + ", "]");
    }
    if (reads_uses_) {
      index("uses", "first_use[", "]");
      index("uses_end", "first_use[", " + 1]");
      declared_ += " int first_user = 0, first_column = -1;";
      // Behind the other loads, which need not wait for it.
      use_ =
          " first_user = 0, first_column = -1; if (uses < uses_end) { first_user = users[2 * uses]; first_column = "
          "users[2 * uses + 1]; }";
    }
  }

  // A loop over the row's uses begins: q is the row that uses it.
  std::string each_use(const std::string& from = "uses") {
    reads_uses_ = true;
    return " for (int u = " + from +
           "; u < uses_end; ++u) { const long long q = u == uses ? first_user : users[2 * u];"
           " const int column = u == uses ? first_column : users[2 * u + 1];";
  }

  // The lanes of a warp share the columns of a row; each reduces its own, then they each other's.
  void reductions() {
    std::string declared, stored;
    for (const Instruction& i : code_) {
      if (!reduces(i)) continue;
      const std::string total = total_of(i);
      declared += " T " + total + (i.op == Op::kStoreSum ? " = T(0);" : " = T(-infinite());");
      stored += " for (int apart = lanes / 2; apart > 0; apart /= 2) { const T other = from_lane(" + total +
                ", apart); " + total + " = " + combined(i, total, "other") + "; } if (lane == 0) " +
                stored_as(i.buffer, element(i.buffer, "row", "edge", i.column, true), total);
    }
    text_ += declared + " for (int j = lane; j < columns; j += lanes) {";
    instructions();
    text_ += " }" + stored;
  }

  static bool reduces(const Instruction& i) { return i.op == Op::kStoreSum || i.op == Op::kStoreMax; }
  std::string total_of(const Instruction& i) const { return "t" + std::to_string(&i - code_.data()); }

  static std::string combined(const Instruction& i, const std::string& a, const std::string& b) {
    if (i.op == Op::kStoreSum) return a + " + " + b;
    return a + " != " + a + " ? " + a + " : " + a + " > " + b + " ? " + a + " : " + b;
  }

  // What is in a register.
  std::string name_of(int32_t r) const {
    const auto found = names_.find(r);
    return found != names_.end() ? found->second : "r" + std::to_string(r) + (each_ > 1 ? "[c]" : "");
  }

  // Whether an instruction reads a buffer.
  bool reads(const Instruction& i, int32_t b) const {
    if (i.op == Op::kLoad) return i.buffer == b;
    if (i.op != Op::kUses) return false;
    const auto& table = program_.tables[i.table];
    return std::any_of(table.begin(), table.end(), [&](const Use& use) { return use.buffer == b; });
  }

  bool is_published(int32_t b) const { return placed_.published != nullptr && (*placed_.published)[b]; }

  // A store there.
  std::string stored_as(int32_t b, const std::string& element, const std::string& value) const {
    return is_published(b) ? "publish(" + element + ", " + value + ");" : element + " = " + value + ";";
  }

  // Element j of buffer b, as T, in the row of a vertex or, where the buffer has a row per edge, of an edge.
  std::string read(int32_t b, const std::string& row, const std::string& edge, int32_t first, bool broadcast) {
    return "T(" + element(b, row, edge, first, broadcast) + ")";
  }

  // The same as it lies in memory.
  std::string element(int32_t b, const std::string& row, const std::string& edge, int32_t first, bool broadcast) {
    const Buffer& buffer = program_.buffers[b];
    std::string index = buffer.space == Space::kEdges ? edge : row;
    if (buffer.space == Space::kVector) {
      index = "0";
    } else if (buffer.space >= Space::kInput) {
      index = row == "row" ? "vertex" : "vertices[" + row + "]";
      reads_vertex_ |= row == "row";
    }
    const auto& used = kernel_.buffers;
    const std::string n = std::to_string(std::lower_bound(used.begin(), used.end(), b) - used.begin());
    const std::string type = kTypes[static_cast<int>(buffer.dtype)];
    return "data(" + type + ", " + n + ")[" + index + " * stride(" + n + ") + " + std::to_string(first) +
           (broadcast ? "]" : element_);
  }

  const std::string* awaited_sum(const Instruction& i) const {
    if (i.buffer != placed_.awaited || i.broadcast || i.access != Access::kRow) return nullptr;
    for (const auto& [column, sum] : placed_.sums) {
      if (column == i.column) return &sum;
    }
    return nullptr;
  }

  // What a use of the row by row q adds to its gradient.
  std::string used(const Use& use, int32_t column) {
    const std::string there = read(use.buffer, "q", "0", use.first + column, false);
    if (use.buffer != placed_.awaited) return there;
    for (const auto& [first, sum] : placed_.used_sums) {
      if (first == use.first + column) return "(" + placed_.is_there + " ? T(" + sum + ") : " + there + ")";
    }
    return there;
  }

  // The terms of a use by row q of what `column` says, a statement for each column that is gathered.
  std::string each_column(const Instruction& i, const std::string& column, const std::string& r) {
    const auto& table = program_.tables[i.table];
    std::set<int32_t> columns;
    for (const Use& use : table) columns.insert(use.column);
    std::string text = " switch (" + column + ") {";
    for (const int32_t c : columns) {
      if (c < 0) continue;
      text += " case " + std::to_string(c) + ":";
      for (const Use& use : table) {
        if (use.column == c) text += loop_ + " " + r + " += " + used(use, i.column) + ";";
      }
      text += " break;";
    }
    return text + " }";
  }

  // Beside a product: that of the first use is asked for before it.
  void first_use(const Instruction& i) {
    const std::string e = "e" + std::to_string(&i - code_.data()),
                      r = result_.empty() ? "r" + std::to_string(i.result) : result_;
    declared_ += " T " + e + ";";
    users_ += " " + e + " = T(0); { const long long q = first_user;" + each_column(i, "first_column", e) + " }";
    text_ += " " + r + " = " + e + ";" + each_use("uses + 1") + each_column(i, "column", r) + " }";
  }

  void uses(const Instruction& i, const std::string& r) {
    const auto& table = program_.tables[i.table];
    std::set<int32_t> columns;
    for (const Use& use : table) columns.insert(use.column);
    text_ += loop_ + " " + r + " = T(0);";
    if (!columns.empty() && *columns.rbegin() >= 0) text_ += each_use() + each_column(i, "column", r) + " }";
    if (columns.contains(-1)) {
      text_ +=
          " for (int u = first_sum_use[row]; u < first_sum_use[row + 1]; ++u) { const long long used = "
          "sum_use_edges[u];";
      for (const Use& use : table) {
        if (use.column >= 0) continue;
        const std::string parent = use.by_parent ? "(long long)edge_parents[used]" : "0";
        text_ += loop_ + " " + r + " += " + read(use.buffer, parent, "used", use.first + i.column, false) + ";";
      }
      text_ += " }";
    }
  }

  void instruction(const Instruction& i) {
    const std::string r = result_.empty() ? name_of(i.result) : result_, a = name_of(i.a()), b = name_of(i.b()),
                      c = name_of(i.c());
    const auto set = [&](const std::string& value) { text_ += loop_ + " " + r + " = " + value + ";"; };
    switch (i.op) {
      case Op::kLoad:
        switch (i.access) {
          case Access::kRow:
          case Access::kParent:
            if (const std::string* sum = awaited_sum(i)) {
              set("T(" + *sum + ")");
              break;
            }
            set(read(i.buffer, "row", "edge", i.column, i.broadcast));
            break;
          case Access::kGather: {
            const std::string child = "child" + std::to_string(i.gather);
            gathered_.insert(i.gather);
            set(child + " < 0 ? T(0) : " + read(i.buffer, child, "0", i.column, i.broadcast));
            break;
          }
          case Access::kChild:
            text_ += " { const long long child = edge_children[edge];" + loop_ + " " + r + " = " +
                     read(i.buffer, "child", "0", i.column, i.broadcast) + "; }";
            break;
        }
        break;
      case Op::kConstant:
        set(number(program_.constants[i.constant]));
        break;
      case Op::kUses:
        uses(i, r);
        break;
      case Op::kStore:
        text_ += loop_ + " " + stored_as(i.buffer, element(i.buffer, "row", "edge", i.column, false), a);
        break;
      case Op::kStoreSum:
      case Op::kStoreMax:
        text_ += " " + total_of(i) + " = " + combined(i, total_of(i), a) + ";";
        break;
      case Op::kScatter:
        if (i.gather >= 0) {
          const std::string store = stored_as(i.buffer, element(i.buffer, "q", "0", i.column, false), a);
          const auto stored = [&](const std::string& column) {
            return " if (" + column + " == " + std::to_string(i.gather) + ")" + loop_ + " " + store;
          };
          const bool first = placed_.awaited >= 0;  // which is looked up before the product, without a loop
          if (first) text_ += " { const long long q = first_user;" + stored("first_column") + " }";
          text_ += each_use(first ? "uses + 1" : "uses") + stored("column") + " }";
        } else {
          text_ +=
              " for (int u = first_sum_use[row]; u < first_sum_use[row + 1]; ++u) { const long long used = "
              "sum_use_edges[u];" +
              loop_ + " " + stored_as(i.buffer, element(i.buffer, "0", "used", i.column, false), a) + " }";
        }
        break;
      case Op::kZero:
        set("T(0)");
        break;
      case Op::kBegin:
        text_ +=
            loop_ + " " + r + " = T(0); for (long long edge = first_edge[row]; edge < first_edge[row + 1]; ++edge) {";
        break;
      case Op::kAccumulate:
        text_ += loop_ + " " + r + " += " + a + ";";
        break;
      case Op::kEnd:
        text_ += " }";
        break;
      default:
        set(filled(info(i.op).cuda, {a, b, c}));
    }
  }

  const Program& program_;
  const Step& kernel_;
  const std::vector<Instruction>& code_;
  int each_;
  std::string loop_, element_ = " + j]";  // over a thread's columns; which column an element is of
  const Placed placed_;
  std::string declared_, indices_, use_, early_, users_, meanwhile_, text_, declared_ahead_, ahead_, taken_;
  std::set<int32_t> gathered_;  // columns
  bool reads_vertex_ = false, reads_uses_ = false;
  std::string result_;                    // instead of an instruction's register
  std::map<int32_t, std::string> names_;  // of what is in registers, where it is not their own
};

}  // namespace

std::string kernel_body(const Program& program, const Step& kernel, bool leaves, int each) {
  return Writer(program, kernel, leaves, each).parts().all();
}

Parts kernel_parts(const Program& program, const Step& kernel, bool leaves, const Placed& placed, int each) {
  return Writer(program, kernel, leaves, each, placed).parts();
}

int columns_each(const Step& kernel) {
  constexpr int kMost = 4;
  return !kernel.reduces && kernel.width % (kMost * 32) == 0 ? kMost : 1;
}

std::string tail_body(const Program& program, const std::vector<Step>& steps) {
  std::vector<int32_t> all(program.buffers.size());
  std::iota(all.begin(), all.end(), 0);
  std::string text;
  for (const Step& s : steps) {
    const bool here = s.kind == Step::Kind::kKernel || s.kind == Step::Kind::kProduct;
    if (!here || s.when != Step::When::kFrontiers) continue;
    text += " if (kind == " + std::to_string(s.function) + (s.edges ? " && task[5] > 0" : "") +
            ") { const int first = " + (s.edges ? "task[4], count = task[5];" : "task[2], count = task[3];");
    if (s.kind == Step::Kind::kProduct) {
      const Buffer &source = program.buffers[s.source], &target = program.buffers[s.target];
      const bool fours = source.width % 4 == 0 && target.width % 4 == 0;
      text += std::string(" product<") + kTypes[static_cast<int>(source.dtype)] + (fours ? ", true" : ", false") +
              ">(buffers.of[" + std::to_string(s.source) + "], matrices.of[" + std::to_string(s.matrix) +
              (s.transposed ? "], true, " : "], false, ") + "buffers.of[" + std::to_string(s.target) + "], " +
              std::to_string(source.width) + ", " + std::to_string(target.width) + ", first, count, shared);";
    } else {
      Step kernel = s;
      kernel.buffers = all;
      text +=
          " constexpr int columns = " + std::to_string(s.width) +
          ", lanes = " + (s.reduces ? std::string("32") : std::string("columns")) +
          "; for (long long thread = start; thread < (long long)count * lanes; thread += threads) { const int lane = "
          "int(thread % lanes), j = lane; const long long index = first + thread / lanes; " +
          kernel_body(program, kernel) + " }";
    }
    text += " meet(a.arrived, expected); }";
  }
  return text;
}

}  // namespace weft::vertex
