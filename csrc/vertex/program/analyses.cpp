#include "vertex/program/analyses.h"

#include <algorithm>
#include <set>

namespace weft::vertex {
namespace {

// Instructions that no store needs are left out. In a loop all is needed: it is empty where there are no children.
std::vector<Instruction> needed(const std::vector<Instruction>& code) {
  std::vector<Instruction> kept;
  std::set<int32_t> read;
  bool loop = false;
  for (size_t k = code.size(); k-- > 0;) {
    const Instruction& i = code[k];
    if (i.op == Op::kEnd) loop = true;
    if (!info(i.op).stores && !loop && !read.contains(i.result)) continue;
    kept.push_back(i);
    if (i.op == Op::kBegin) loop = false;
    if (i.op == Op::kEnd || i.op == Op::kAccumulate) {
      read.insert(i.result);
    } else if (!loop) {
      read.erase(i.result);
    }
    read.insert(i.operands.begin(), i.operands.begin() + info(i.op).operands);
  }
  return {kept.rbegin(), kept.rend()};
}

}  // namespace

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
        if (i.op == Op::kStore && p.buffers[i.buffer].space == Space::kInner) continue;
        const bool of_child = i.access == Access::kGather || i.access == Access::kChild;
        if (i.op == Op::kLoad && (of_child || zero[i.buffer])) i = {Op::kZero, i.result};
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
      if (i.op != Op::kStore || columns[i.buffer].empty()) continue;
      std::fill_n(columns[i.buffer].begin() + i.column, s.width, char{1});
    }
  }
  for (size_t b = 0; b < columns.size(); ++b) {
    const auto& c = columns[b];
    p.buffers[b].written = p.functions == 1 && !c.empty() && std::find(c.begin(), c.end(), 0) == c.end();
  }
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
