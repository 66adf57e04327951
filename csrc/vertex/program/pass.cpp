#include "vertex/program/pass.h"

#include <algorithm>
#include <set>

namespace weft::vertex {
namespace {

using Action = Entry::Action;
using When = Step::When;

class Maker {
 public:
  Maker(const Program& program, const Extent& extent) : program_(program), extent_(extent) {}

  void whole(const Step& s, bool more = false) {
    const Buffer& b = program_.buffers[s.source];
    const int64_t count = b.space == Space::kEdges ? extent_.num_edges : extent_.num_vertices;
    const int64_t first = b.space == Space::kInner ? extent_.leaves : 0;
    // Earlier pieces of the same gradient may have been put aside: it follows them.
    const bool aside = more && s.kind == Step::Kind::kOuter;
    found.push_back({Action::kRun, false, more, aside, &s, first, count - first});
  }

  void task(const std::vector<Step>& steps, const Task& task) {
    for (const Step& s : steps) {
      const bool here = s.kind == Step::Kind::kKernel || s.kind == Step::Kind::kProduct;
      if (!here || s.when != When::kFrontiers || s.function != task.kind) continue;
      const int64_t first = s.edges ? task.first_edge : task.first, count = s.edges ? task.num_edges : task.count;
      if (count == 0) continue;
      const bool leaves = task.level == 0;
      if (s.kind == Step::Kind::kKernel || !s.skips_leaves || !leaves) {
        found.push_back({Action::kRun, leaves, false, false, &s, first, count});
      } else if (s.zeroes_leaves) {
        found.push_back({Action::kZero, leaves, false, false, &s, first, count});
      }
    }
  }

  // Begins the part that one kernel may run.
  void begin_tail(size_t first_task) {
    tail_ = found.size();
    found.push_back({Action::kTail, false, false, false, nullptr, static_cast<int64_t>(first_task), 0});
  }
  void end_tail() { found[tail_].count = static_cast<int64_t>(found.size() - tail_ - 1); }

  // A kernel that was put off until all tasks are done. The rows of one function are together, and those without
  // children first.
  void late(const Step& s) {
    const auto add = [&](int64_t first, int64_t count, bool leaves) {
      if (count > 0) found.push_back({Action::kRun, leaves, false, false, &s, first, count});
    };
    if (program_.functions > 1) {
      for (const Task& task : extent_.tasks) {
        if (s.function == task.kind) add(task.first, task.count, task.level == 0);
      }
      return;
    }
    add(0, extent_.leaves, true);
    add(extent_.leaves, extent_.num_vertices - extent_.leaves, false);
  }

  std::vector<Entry> found;

 private:
  const Program& program_;
  const Extent& extent_;
  size_t tail_ = 0;
};

// The gradients of matrices: sums over rows, from the last row to the first, as these are done.
class MatrixGradients {
 public:
  MatrixGradients(const Program& program, const Extent& extent, bool cut, const Wanted& wanted,
                  std::vector<Entry>& found)
      : extent_(extent), found_(found), rows_(extent.num_vertices), edges_(extent.num_edges), cut_(cut) {
    for (const Step& s : program.backward) {
      if (s.kind != Step::Kind::kOuter || s.when != When::kFrontiers) continue;
      if (!std::binary_search(wanted.matrices.begin(), wanted.matrices.end(), s.matrix)) continue;
      steps_.push_back(&s);
      const Dtype dtype = program.buffers[s.source].dtype;
      cut_ = cut_ && (dtype == Dtype::kFloat32 || dtype == Dtype::kFloat64);
    }
    cut_ = cut_ && program.functions == 1;
  }

  // Rows from this task on are done.
  void advance(const Task& task) {
    if (cut_ && std::max(rows_ - task.first, edges_ - task.first_edge) >= kRows) {
      take(std::max<int64_t>(task.first, extent_.leaves), task.first_edge);
    }
  }
  void finish() {
    take(0, 0);
    for (const Step* s : steps_) {
      if (begin(s->matrix)) found_.push_back({Action::kZero, false, false, false, s, 0, 0});
    }
  }
  // Whether nothing has been written to this matrix' gradient yet; from now on there is.
  bool begin(int32_t matrix) { return started_.insert(matrix).second; }

 private:
  static constexpr int64_t kRows = 1024;  // worth a product of their own

  // All there is, where that is too little to wait for another stream, is added up in its turn.
  void take(int64_t row, int64_t edge) {
    aside_ = aside_ || std::max(rows_ - row, edges_ - edge) >= kRows;
    for (const Step* s : steps_) {
      const int64_t first = s->edges ? edge : s->skips_leaves ? std::max(row, extent_.leaves) : row;
      const int64_t end = s->edges ? edges_ : rows_;
      if (first >= end) continue;
      const bool more = !begin(s->matrix);
      found_.push_back({Action::kRun, false, more, aside_, s, first, end - first});
    }
    rows_ = row;
    edges_ = edge;
  }

  const Extent& extent_;
  std::vector<Entry>& found_;
  std::vector<const Step*> steps_;
  int64_t rows_, edges_;  // from here on all are in the sums
  bool cut_, aside_ = false;
  std::set<int32_t> started_;
};

}  // namespace

std::vector<Entry> forward_pass(const Program& program, const Extent& extent, size_t tail) {
  Maker make(program, extent);
  for (const Step& s : program.forward) {
    if (s.when == When::kBefore) make.whole(s);
  }
  for (const Task& task : extent.tasks.first(tail)) make.task(program.forward, task);
  if (tail < extent.tasks.size()) {
    make.begin_tail(tail);
    for (const Task& task : extent.tasks.subspan(tail)) make.task(program.forward, task);
    make.end_tail();
  }
  for (const Step& s : program.forward) {
    if (s.when == When::kAfter) make.late(s);
  }
  return std::move(make.found);
}

std::vector<Entry> backward_pass(const Program& program, const Extent& extent, size_t tail, bool overlap,
                                 const Wanted& wanted) {
  Maker make(program, extent);
  MatrixGradients matrices(program, extent, overlap, wanted, make.found);
  size_t end = extent.tasks.size();
  if (tail < end) {
    make.begin_tail(tail);
    for (; end > tail; --end) make.task(program.backward, extent.tasks[end - 1]);
    make.end_tail();
  }
  for (; end > 0; --end) {
    make.task(program.backward, extent.tasks[end - 1]);
    if (end > 1) matrices.advance(extent.tasks[end - 1]);
  }
  matrices.finish();
  const auto among = [](std::span<const int64_t> numbers, int32_t x) {
    return std::binary_search(numbers.begin(), numbers.end(), x);
  };
  std::set<int32_t> begun;  // vectors that have a term
  for (const Step& s : program.backward) {
    if (s.when != When::kAfter) continue;
    if (s.kind == Step::Kind::kKernel) make.late(s);
    if (s.kind == Step::Kind::kTotal && among(wanted.vectors, s.vector)) make.whole(s, !begun.insert(s.vector).second);
    if (s.kind == Step::Kind::kOuter && among(wanted.matrices, s.matrix)) make.whole(s, !matrices.begin(s.matrix));
    if (s.kind == Step::Kind::kProduct && among(wanted.inputs, program.buffers[s.target].index)) make.whole(s);
  }
  return std::move(make.found);
}

int64_t multiply_adds(const Program& program, const std::vector<Entry>& pass) {
  int64_t total = 0;
  for (const Entry& e : pass) {
    if (e.action != Action::kRun || (e.step->kind != Step::Kind::kProduct && e.step->kind != Step::Kind::kOuter))
      continue;
    total += e.count * program.buffers[e.step->source].width * program.buffers[e.step->target].width;
  }
  return total;
}

}  // namespace weft::vertex
