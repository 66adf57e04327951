#include "vertex/program/analyses.h"

#include <algorithm>
#include <map>
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
      const bool products = s.kind == Step::Kind::kProduct || s.kind == Step::Kind::kOuter;
      if (products && !s.skips_leaves) read[s.source] = 1;
      if (s.kind == Step::Kind::kOuter && !s.skips_leaves) read[s.target] = 1;
    }
  }
  for (Step& s : p.forward) {
    if (s.kind != Step::Kind::kProduct || !s.skips_leaves || s.edges) continue;
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
  for (size_t b = 0; b < p.buffers.size(); ++b) {
    Buffer& buffer = p.buffers[b];
    if (buffer.space != Space::kInputGrad && buffer.space != Space::kLayerGrad) continue;
    std::vector<std::vector<char>> columns(p.functions, std::vector<char>(buffer.width));  // of each function's rows
    for (const Step& s : p.backward) {
      std::vector<char>& mine = columns[s.function];
      if (s.kind == Step::Kind::kProduct && s.when == Step::When::kAfter && s.target == static_cast<int32_t>(b)) {
        std::fill(mine.begin(), mine.end(), char{1});
      }
      if (s.kind != Step::Kind::kKernel || s.edges) continue;
      for (const Instruction& i : s.code) {
        if (i.op == Op::kStore && i.buffer == static_cast<int32_t>(b)) {
          std::fill_n(mine.begin() + i.column, s.width, char{1});
        }
      }
    }
    const auto all = [](const std::vector<char>& c) { return std::find(c.begin(), c.end(), 0) == c.end(); };
    buffer.written = buffer.width > 0 && std::all_of(columns.begin(), columns.end(), all);
  }
}

void find_gradients(Program& p) {
  std::set<int32_t> inputs, matrices, vectors, read_matrices, read_inputs, read_vectors;
  std::map<int32_t, int> terms;  // of the gradient of each vector
  for (const Buffer& b : p.buffers) {
    if (b.space == Space::kInputGrad) inputs.insert(b.index);
  }
  for (Step& s : p.backward) {
    for (const int32_t b : s.buffers) p.buffers[b].read_backward = true;
    if (s.kind == Step::Kind::kOuter) matrices.insert(s.matrix);
    if (s.kind == Step::Kind::kProduct) read_matrices.insert(s.matrix);
    if (s.kind != Step::Kind::kTotal) continue;
    vectors.insert(s.vector);
    ++terms[s.vector];
  }
  std::map<int32_t, int32_t> widths;
  for (const Buffer& b : p.buffers) {
    if (b.space == Space::kVector) widths[b.index] = b.width;
    if (b.read_backward && b.space == Space::kInput) read_inputs.insert(b.index);
    if (b.read_backward && b.space == Space::kVector) read_vectors.insert(b.index);
  }
  for (Step& s : p.backward) {
    if (s.kind != Step::Kind::kTotal) continue;
    s.whole = terms[s.vector] == 1 && s.first == 0 && widths.contains(s.vector) && widths[s.vector] == s.width;
  }
  const auto list = [](const std::set<int32_t>& x) { return std::vector<int32_t>(x.begin(), x.end()); };
  p.gradients = {list(inputs), list(matrices), list(vectors)};
  p.reads = {list(read_inputs), list(read_matrices), list(read_vectors)};
}

}  // namespace weft::vertex
