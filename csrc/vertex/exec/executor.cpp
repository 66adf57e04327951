#include "vertex/exec/executor.h"

#include <algorithm>

namespace weft::vertex {

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
    } else {
      switch (e.step->kind) {
        case Step::Kind::kKernel:
          kernel(*e.step, e.first, e.count, e.leaves);
          break;
        case Step::Kind::kProduct:
          product(*e.step, e.first, e.count);
          break;
        case Step::Kind::kOuter:
          outer(*e.step, e.first, e.count, e.more);
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
