#include "vertex/program/pass.h"

#include <algorithm>
#include <set>

namespace weft::vertex {
namespace {

using Action = Entry::Action;
using When = Step::When;

// Rows (or edges) [first, first + count).
struct Range {
  int64_t first, count;
};

// Where the rows of each function are, and its edges. They are together where no level above the leaves has several
// functions and levels do not take turns; else steps over all rows of a function are steps over all rows, with zeros in
// those of the others.
class Rows {
 public:
  Rows(const Program& program, const Extent& extent)
      : extent_(extent),
        alone_(program.functions == 1),
        together_(functions_together(program, extent)),
        rows_(program.functions),
        edges_(program.functions) {
    if (alone_) return;
    for (const Task& task : extent.tasks) {
      add(rows_[task.kind], {task.first, task.count});
      add(edges_[task.kind], {task.first_edge, task.num_edges});
    }
  }

  bool together() const { return together_; }
  // What a step on all rows, or edges, of its function reads.
  std::vector<Range> of(const Program& program, const Step& s) const {
    const Space space = program.buffers[s.source].space;
    const bool edges = space == Space::kEdges;
    const int64_t first = !edges && (space == Space::kInner || s.skips_leaves) ? extent_.leaves : 0;
    // The caller's order is another than that of rows.
    if (alone_ || !together_ || (space >= Space::kInput && space != Space::kVector)) {
      return {{first, (edges ? extent_.num_edges : extent_.num_vertices) - first}};
    }
    std::vector<Range> found;
    for (const Range& range : (edges ? edges_ : rows_)[s.function]) {
      const int64_t from = std::max(range.first, first), end = range.first + range.count;
      if (from < end) found.push_back({from, end - from});
    }
    return found;
  }

 private:
  static void add(std::vector<Range>& ranges, const Range& next) {
    if (next.count == 0) return;
    if (!ranges.empty() && ranges.back().first + ranges.back().count == next.first) {
      ranges.back().count += next.count;
    } else {
      ranges.push_back(next);
    }
  }

  const Extent& extent_;
  bool alone_, together_;
  std::vector<std::vector<Range>> rows_, edges_;
};

class Maker {
 public:
  // `beside`: gradients of matrices may run while other steps do.
  Maker(const Program& program, const Extent& extent, bool beside = true)
      : rows(program, extent), program_(program), extent_(extent), beside_(beside) {}

  // A step on all rows of its function at once; `more`: something has been written to its target.
  void whole(const Step& s, bool more = false) {
    const std::vector<Range> ranges = rows.of(program_, s);
    const bool sum = s.kind != Step::Kind::kProduct;
    if (ranges.empty() && sum && !more) found.push_back({Action::kRun, false, false, false, &s, 0, 0});  // of nothing
    for (const Range& range : ranges) {
      // Earlier pieces of the same gradient may have been put aside: it follows them.
      const bool aside = beside_ && more && s.kind == Step::Kind::kOuter;
      found.push_back({Action::kRun, false, more, aside, &s, range.first, range.count});
      more = more || sum;
    }
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

  // A kernel that runs once, before all tasks or after them, on the rows of its function. Those without children run
  // other code.
  void once(const Step& s) {
    const auto add = [&](int64_t first, int64_t count, bool leaves) {
      if (count > 0) found.push_back({Action::kRun, leaves, false, false, &s, first, count});
    };
    if (program_.functions == 1) {
      add(0, extent_.leaves, true);
      add(extent_.leaves, extent_.num_vertices - extent_.leaves, false);
      return;
    }
    Range range = {0, 0};
    bool leaves = true;
    for (const Task& task : extent_.tasks) {
      if (s.function != task.kind) continue;
      if (task.first != range.first + range.count || (task.level == 0) != leaves) {
        add(range.first, range.count, leaves);
        range = {task.first, 0};
        leaves = task.level == 0;
      }
      range.count += task.count;
    }
    add(range.first, range.count, leaves);
  }

  const Rows rows;
  std::vector<Entry> found;

 private:
  const Program& program_;
  const Extent& extent_;
  bool beside_;
  size_t tail_ = 0;
};

// The gradients of matrices: sums over rows, from the last row to the first, as these are done.
class MatrixGradients {
 public:
  // `beside`: while other steps run.
  MatrixGradients(const Program& program, const Extent& extent, const Rows& rows, bool beside, bool cut,
                  const Wanted& wanted, std::vector<Entry>& found)
      : program_(program),
        extent_(extent),
        rows_(rows),
        found_(found),
        done_(program.functions),
        beside_(beside),
        cut_(cut) {
    for (const Step& s : program.backward) {
      if (s.kind != Step::Kind::kOuter || s.when != When::kFrontiers) continue;
      if (!std::binary_search(wanted.matrices.begin(), wanted.matrices.end(), s.matrix)) continue;
      pieces_.push_back({&s, {0, 0}});
      const DType dtype = program.buffers[s.source].dtype;
      cut_ = cut_ && (dtype == DType::f32 || dtype == DType::f64);
    }
    cut_ = cut_ && rows.together();
  }

  // The rows of this task are done, after those of all later ones.
  void note(const Task& task) {
    if (!rows_.together()) return;
    for (Piece& piece : pieces_) {
      if (piece.step->function == task.kind) extend(piece, task);
    }
    Range& done = done_[task.kind];  // rows and edges
    done = {done.first + task.count, done.count + task.num_edges};
  }
  // What has been noted of this task's function may be added up now.
  void advance(const Task& task) {
    const Range& done = done_[task.kind];
    if (cut_ && task.level > 0 && std::max(done.first, done.count) >= kRows) take(task.kind);
  }
  void finish() {
    if (!rows_.together()) {
      for (Piece& piece : pieces_) {
        const std::vector<Range> all = rows_.of(program_, *piece.step);
        if (!all.empty()) piece.range = all.front();
      }
    }
    for (int32_t function = 0; function < program_.functions; ++function) take(function);
    for (const Piece& piece : pieces_) {
      if (begin(piece.step->matrix)) found_.push_back({Action::kZero, false, false, false, piece.step, 0, 0});
    }
  }
  // Whether nothing has been written to this matrix' gradient yet; from now on there is.
  bool begin(int32_t matrix) { return started_.insert(matrix).second; }

 private:
  static constexpr int64_t kRows = 1024;  // worth a product of their own
  struct Piece {
    const Step* step;
    Range range;  // not yet in the sum
  };

  void extend(Piece& piece, const Task& task) {
    const Step& s = *piece.step;
    if (s.skips_leaves && task.level == 0) return;
    const Range next = s.edges ? Range{task.first_edge, task.num_edges} : Range{task.first, task.count};
    if (next.count == 0) return;
    if (piece.range.count > 0 && next.first + next.count != piece.range.first) add(piece);
    piece.range = {next.first, next.count + piece.range.count};
  }

  void add(Piece& piece) {
    if (piece.range.count == 0) return;
    const bool more = !begin(piece.step->matrix);
    found_.push_back({Action::kRun, false, more, aside_, piece.step, piece.range.first, piece.range.count});
    piece.range = {0, 0};
  }

  // All there is, where that is too little to wait for another stream, is added up in its turn.
  void take(int32_t function) {
    Range& done = done_[function];
    aside_ = aside_ || (beside_ && std::max(done.first, done.count) >= kRows);
    for (Piece& piece : pieces_) {
      if (piece.step->function == function) add(piece);
    }
    done = {0, 0};
  }

  const Program& program_;
  const Extent& extent_;
  const Rows& rows_;
  std::vector<Entry>& found_;
  std::vector<Piece> pieces_;
  std::vector<Range> done_;  // of each function, rows and edges that are not yet in the sums
  bool beside_, cut_, aside_ = false;
  std::set<int32_t> started_;
};

}  // namespace

bool functions_together(const Program& program, const Extent& extent) {
  if (program.functions == 1) return true;
  constexpr int kMostRanges = 4;  // of one function: each is a product of its own
  std::vector<int> ranges(program.functions);
  int32_t last = -1;
  for (const Task& task : extent.tasks) {
    if (task.kind != last && ++ranges[task.kind] > kMostRanges) return false;
    last = task.kind;
  }
  return true;
}

std::vector<Entry> forward_pass(const Program& program, const Extent& extent, size_t tail) {
  Maker make(program, extent);
  for (const Step& s : program.forward) {
    if (s.when == When::kBefore) s.kind == Step::Kind::kKernel ? make.once(s) : make.whole(s);
  }
  for (const Task& task : extent.tasks.first(tail)) make.task(program.forward, task);
  if (tail < extent.tasks.size()) {
    make.begin_tail(tail);
    for (const Task& task : extent.tasks.subspan(tail)) make.task(program.forward, task);
    make.end_tail();
  }
  for (const Step& s : program.forward) {
    if (s.when == When::kAfter) make.once(s);
  }
  return std::move(make.found);
}

std::vector<Entry> backward_pass(const Program& program, const Extent& extent, size_t tail, bool overlap,
                                 const Wanted& wanted) {
  size_t end = extent.tasks.size();
  // Where one kernel has all tasks, what is large comes last, and together.
  const bool at_once = tail == 0 && end > 0;
  Maker make(program, extent, !at_once);
  MatrixGradients matrices(program, extent, make.rows, !at_once, overlap, wanted, make.found);
  if (tail < end) {
    make.begin_tail(tail);
    for (; end > tail; --end) make.task(program.backward, extent.tasks[end - 1]);
    make.end_tail();
    for (size_t t = extent.tasks.size(); t > tail; --t) matrices.note(extent.tasks[t - 1]);
  }
  for (; end > 0; --end) {
    make.task(program.backward, extent.tasks[end - 1]);
    matrices.note(extent.tasks[end - 1]);
    matrices.advance(extent.tasks[end - 1]);
  }
  if (!at_once) matrices.finish();
  const auto among = [](std::span<const int64_t> numbers, int32_t x) {
    return std::binary_search(numbers.begin(), numbers.end(), x);
  };
  std::vector<const Step*> products, gradients;  // that come later
  const auto all_products = [&] {
    for (const Step* s : products) make.whole(*s);
    products.clear();
  };
  const auto is_read = [&](const Step& s) {
    return std::any_of(products.begin(), products.end(), [&](const Step* p) { return p->target == s.source; });
  };
  std::set<int32_t> begun;  // vectors that have a term
  for (const Step& s : program.backward) {
    if (s.when != When::kAfter) continue;
    switch (s.kind) {
      case Step::Kind::kKernel:
        all_products();  // it may read what they write
        make.once(s);
        break;
      case Step::Kind::kTotal:
        if (is_read(s)) all_products();
        if (among(wanted.vectors, s.vector)) make.whole(s, !begun.insert(s.vector).second);
        break;
      case Step::Kind::kOuter:
        if (!among(wanted.matrices, s.matrix)) break;
        at_once ? gradients.push_back(&s) : make.whole(s, !matrices.begin(s.matrix));
        break;
      case Step::Kind::kProduct:
        if (!among(wanted.inputs, program.buffers[s.target].index)) break;
        at_once ? products.push_back(&s) : make.whole(s);
        break;
    }
  }
  all_products();
  for (const Step* s : gradients) make.whole(*s, !matrices.begin(s->matrix));
  if (at_once) matrices.finish();
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
