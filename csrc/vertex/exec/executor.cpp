#include "vertex/exec/executor.h"

#include <algorithm>

namespace weft::vertex {
namespace {

// Products of few rows each, one after the other, are those of the frontiers.
bool is_large(const Entry& e) {
  if (e.action != Entry::Action::kRun) return false;
  return e.step->kind == Step::Kind::kOuter ||
         (e.step->kind == Step::Kind::kProduct && e.step->when != Step::When::kFrontiers);
}

// Whether neither needs the other to be done, each being large.
bool are_independent(const Entry& a, const Entry& b) {
  const auto writes_for = [](const Step& x, const Step& y) {
    return x.kind == Step::Kind::kProduct && (x.target == y.source || x.target == y.target || x.target == y.bias);
  };
  if (writes_for(*a.step, *b.step) || writes_for(*b.step, *a.step)) return false;
  return a.step->kind != Step::Kind::kOuter || b.step->kind != Step::Kind::kOuter || a.step->matrix != b.step->matrix;
}

// How many of the entries, from the first on, are large and independent of each other.
size_t together(std::span<const Entry> entries) {
  size_t count = 1;
  for (; count < entries.size(); ++count) {
    const Entry& next = entries[count];
    if (!is_large(next) || next.aside != entries[0].aside) break;
    const auto first = entries.first(count);
    if (!std::all_of(first.begin(), first.end(), [&](const Entry& e) { return are_independent(e, next); })) break;
  }
  return count;
}

}  // namespace

void Executor::products(std::span<const Entry> entries) {
  for (const Entry& e : entries) run_product(e);
}

void Executor::run_product(const Entry& e) {
  if (e.step->kind == Step::Kind::kProduct) {
    product(*e.step, e.first, e.count);
  } else {
    outer(*e.step, e.first, e.count, e.more);
  }
}

void Executor::run(const std::vector<Entry>& pass, std::span<const Task> tasks, bool backward) {
  bool aside = false;
  for (size_t i = 0; i < pass.size(); ++i) {
    const Entry& e = pass[i];
    if (e.aside != aside) {
      aside = e.aside;
      aside ? begin_aside() : end_aside();
    }
    if (e.action == Entry::Action::kTail) {
      if (tail(tasks, static_cast<size_t>(e.first), backward)) i += static_cast<size_t>(e.count);
    } else if (e.action == Entry::Action::kZero) {
      zero(*e.step, e.first, e.count);
    } else if (is_large(e)) {
      const size_t count = together(std::span(pass).subspan(i));
      products(std::span(pass).subspan(i, count));
      i += count - 1;
    } else {
      switch (e.step->kind) {
        case Step::Kind::kKernel:
          kernel(*e.step, e.first, e.count, e.leaves);
          break;
        case Step::Kind::kProduct:
        case Step::Kind::kOuter:
          run_product(e);
          break;
        case Step::Kind::kTotal: {
          const auto other = [](const Entry& x) { return x.step == nullptr || x.step->kind != Step::Kind::kTotal; };
          const auto end = std::find_if(pass.begin() + static_cast<std::ptrdiff_t>(i), pass.end(), other);
          const auto count = static_cast<size_t>(end - pass.begin()) - i;
          totals(std::span(pass).subspan(i, count));
          i += count - 1;
          break;
        }
      }
    }
  }
  if (aside) end_aside();
  join();
}

}  // namespace weft::vertex
