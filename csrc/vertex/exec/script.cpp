#include "vertex/exec/script.h"

#include <algorithm>
#include <cstring>

namespace weft::vertex {
namespace {

constexpr int32_t kScriptMagic = 0x57530101;
constexpr size_t kHeader = 12, kGroups = 11, kEach = sizeof(ScriptInstruction) / sizeof(int32_t);

// What the blocks of a group have written and not signalled yet: by steps of a task in its rows, by tasks of this
// frontier in rows that none of them reads, and before.
class Unseen {
 public:
  explicit Unseen(size_t buffers) : own_(1, Marks(buffers, 0)), frontier_(buffers, 0), before_(buffers, 0) {}

  // What follows is of task number `task` of this frontier, or of the next.
  void enter(size_t task, bool next_frontier) {
    if (next_frontier && !clear_) {
      for (Marks& own : own_) move(own, before_);
      move(frontier_, before_);
    }
    task_ = task;
    while (own_.size() <= task) own_.emplace_back(before_.size(), 0);
  }
  bool concerns(const Share& share, bool published) const {
    return std::any_of(share.reads.begin(), share.reads.end(), [&](const CrossRead& r) {
      if (r.published && published) return false;
      return before_[r.buffer] || (r.own && own_[task_][r.buffer]);
    });
  }
  void write(const Share& share) {
    clear_ &= share.stores.empty() && share.scatters.empty();
    for (const int32_t b : share.stores) own_[task_][b] = 1;
    for (const int32_t b : share.scatters) frontier_[b] = 1;
  }
  void blank(const Share& share) {
    clear_ &= share.scatters.empty();
    for (const int32_t b : share.scatters) frontier_[b] = 1;
  }
  void clear() {
    if (clear_) return;
    for (Marks& own : own_) std::fill(own.begin(), own.end(), 0);
    std::fill(frontier_.begin(), frontier_.end(), 0);
    std::fill(before_.begin(), before_.end(), 0);
    clear_ = true;
  }

 private:
  using Marks = std::vector<uint8_t>;  // by buffer
  static void move(Marks& from, Marks& to) {
    for (size_t b = 0; b < from.size(); ++b) to[b] |= from[b], from[b] = 0;
  }
  std::vector<Marks> own_;  // by task of the frontier
  Marks frontier_, before_;
  size_t task_ = 0;
  bool clear_ = true;
};

struct Visit {
  int step;
  ScriptInstruction::Op op;
  int first, count;
};

// The order of a pass.
class Walk {
 public:
  Walk(const Partition& partition, std::span<const Task> tasks, int32_t functions, int32_t group, bool blanks)
      : partition_(partition),
        tasks_(tasks),
        functions_(functions),
        group_(group),
        blanks_(blanks),
        groups_(Schedule::num_groups(tasks)) {
    for (const Task& task : tasks) {
      leaves_ += task.level == 0 ? task.count : 0;
      vertices_ += task.count;
      edges_ += task.num_edges;
    }
  }

  int32_t groups() const { return groups_; }

  // Calls enter(task, next_frontier) before steps of a task, visit for each of them, meet where all blocks of all
  // groups meet, whatever is written, and other for what is no step. Tasks of one frontier take turns: each goes on up
  // to the step that waits for other blocks, so that one wait serves all of them.
  template <typename Enter, typename Waits, typename Meet, typename OnStep, typename Other>
  void pass(const Enter& enter, const Waits& waits, const Meet& meet, const OnStep& visit, const Other& other) const {
    switch (partition_.pass) {
      case Pass::kForward:
        blanks(visit);
        return frontiers(0, partition_.steps.size(), false, enter, waits, visit);
      case Pass::kBackward:
        return frontiers(0, partition_.steps.size(), true, enter, waits, visit);
      case Pass::kTraining:
        break;
    }
    const size_t forward = partition_.forward_steps, all = partition_.steps.size();
    if (once(0, forward, Step::When::kBefore, enter, meet, visit)) {
      other(ScriptInstruction::kTurn, 1);
      if (groups_ > 1) meet();
    }
    blanks(visit);
    frontiers(0, forward, false, enter, waits, visit);
    once(0, forward, Step::When::kAfter, enter, meet, visit);
    meet();
    other(ScriptInstruction::kLoss, 0);
    other(ScriptInstruction::kTurn, 2);
    meet();
    frontiers(forward, all, true, enter, waits, visit);
    once(forward, all, Step::When::kAfter, enter, meet, visit);
    meet();
    for (size_t i = forward; i < all; ++i) {
      if (step(i).kind == Step::Kind::kOuter || step(i).kind == Step::Kind::kTotal) whole(i, visit);
    }
    other(ScriptInstruction::kUpdateHead, 0);
  }

 private:
  const Step& step(size_t i) const { return *partition_.steps[i]; }

  // Kernels and products that run once, on all rows: each may read in any what those before it wrote. Whether there are
  // any.
  template <typename Enter, typename Meet, typename OnStep>
  bool once(size_t begin, size_t end, Step::When when, const Enter& enter, const Meet& meet,
            const OnStep& visit) const {
    bool any = false;
    for (size_t i = begin; i < end; ++i) {
      const bool product = step(i).kind == Step::Kind::kProduct;
      if (!partition_.shares[i].runs || step(i).when != when) continue;
      if (!product && step(i).kind != Step::Kind::kKernel) continue;
      if (groups_ > 1 && (any || when != Step::When::kBefore)) meet();  // others wrote other rows
      any = true;
      enter(0, true);
      product ? whole(i, visit, /*own=*/true) : late(i, visit);
    }
    return any;
  }

  template <typename Enter, typename Waits, typename OnStep>
  void frontiers(size_t begin, size_t end, bool backward, const Enter& enter, const Waits& waits,
                 const OnStep& visit) const {
    std::vector<const Task*> own;           // of a frontier
    std::vector<std::vector<Visit>> steps;  // of each of them
    std::vector<size_t> done;
    for (size_t next = 0; next < tasks_.size();) {
      own.clear();
      const auto task = [&] { return &tasks_[backward ? tasks_.size() - 1 - next : next]; };
      for (const int32_t level = task()->level; next < tasks_.size() && task()->level == level; ++next) {
        if (task()->group == group_) own.push_back(task());
      }
      if (own.empty()) continue;
      enter(0, true);
      if (own.size() == 1) {
        steps_of(*own.front(), begin, end, visit);
        continue;
      }
      const size_t count = own.size();
      if (steps.size() < count) steps.resize(count);
      done.assign(count, 0);
      for (size_t k = 0; k < count; ++k) {
        steps[k].clear();
        steps_of(*own[k], begin, end, [&](const Visit& v) { steps[k].push_back(v); });
      }
      bool must = false;  // all that are left wait
      for (bool left = true; left;) {
        bool moved = left = false;
        for (size_t k = 0; k < count; ++k) {
          enter(k, false);
          for (; done[k] < steps[k].size() && (must || !waits(steps[k][done[k]])); ++done[k]) {
            visit(steps[k][done[k]]);
            moved = true;
            must = false;
          }
          left |= done[k] < steps[k].size();
        }
        must = !moved;
      }
    }
  }

  // The steps of a task in the frontiers.
  template <typename OnStep>
  void steps_of(const Task& task, size_t begin, size_t end, const OnStep& visit) const {
    for (size_t i = begin; i < end; ++i) {
      const Step& s = step(i);
      const bool product = s.kind == Step::Kind::kProduct;
      if (!partition_.shares[i].runs || s.when != Step::When::kFrontiers) continue;
      if (!product && s.kind != Step::Kind::kKernel) continue;
      const int count = s.edges ? task.num_edges : task.count;
      if (s.function != task.kind || count == 0) continue;
      const bool leaves = task.level == 0, skipped = product && leaves && s.skips_leaves;
      if (skipped && !s.zeroes_leaves) continue;
      if (!product && leaves && s.leaf_code.empty()) continue;
      const auto op = skipped              ? ScriptInstruction::kZero
                      : leaves && !product ? ScriptInstruction::kRunLeaves
                                           : ScriptInstruction::kRun;
      visit(Visit{static_cast<int>(i), op, s.edges ? task.first_edge : task.first, count});
    }
  }

  // On all rows that the step has, or this group's part of them.
  template <typename OnStep>
  void whole(size_t i, const OnStep& visit, bool own = false) const {
    const Step& s = step(i);
    const bool inner = s.skips_leaves || partition_.inner_only[i];
    const int first = s.edges || !inner ? 0 : leaves_, end = s.edges || partition_.of_edges[i] ? edges_ : vertices_;
    const auto [from, count] = own ? part(first, end - first) : std::pair(first, end - first);
    visit(Visit{static_cast<int>(i), ScriptInstruction::kRun, from, std::max(0, count)});
  }

  // What no child gives in the rows of this group's vertices with children.
  template <typename OnStep>
  void blanks(const OnStep& visit) const {
    if (!blanks_) return;
    for (const int32_t i : partition_.blanks) {
      int first = 0, end = 0;
      const auto add = [&] {
        if (end > first) visit(Visit{i, ScriptInstruction::kBlank, first, end - first});
      };
      for (const Task& task : tasks_) {
        if (task.group != group_ || task.level == 0) continue;
        if (task.first != end) {
          add();
          first = task.first;
        }
        end = task.first + task.count;
      }
      add();
    }
  }

  std::pair<int, int> part(int first, int count) const {
    const auto begin = [&](int64_t group) { return first + static_cast<int>(count * group / groups_); };
    return {begin(group_), begin(group_ + 1) - begin(group_)};
  }

  // A kernel that runs once, on the rows of its function; those without children run other code.
  template <typename OnStep>
  void late(size_t i, const OnStep& visit) const {
    const auto add = [&](int first, int count, bool leaves) {
      if (count == 0 || (leaves && step(i).leaf_code.empty())) return;
      visit(Visit{static_cast<int>(i), leaves ? ScriptInstruction::kRunLeaves : ScriptInstruction::kRun, first, count});
    };
    if (functions_ > 1) {
      for (const Task& task : tasks_) {
        if (step(i).function == task.kind && task.group == group_) add(task.first, task.count, task.level == 0);
      }
      return;
    }
    for (const bool leaves : {true, false}) {
      const auto [first, count] = leaves ? part(0, leaves_) : part(leaves_, vertices_ - leaves_);
      add(first, count, leaves);
    }
  }

  const Partition& partition_;
  std::span<const Task> tasks_;
  int32_t functions_, group_;
  bool blanks_;
  int32_t groups_;
  int leaves_ = 0, vertices_ = 0, edges_ = 0;
};

}  // namespace

std::vector<ScriptInstruction> script_of(const Program& program, const Partition& partition,
                                         std::span<const Task> tasks, int32_t group, bool published, bool gaps) {
  std::vector<ScriptInstruction> script;
  Unseen unseen(program.buffers.size());
  std::array<int, 2> signals{};  // in the group, between all
  const auto meet = [&](bool all) {
    const int number = ++signals[all];
    script.push_back({ScriptInstruction::kSignal, 0, number, all});
    script.push_back({ScriptInstruction::kWait, 0, number, all});
    unseen.clear();
  };
  const Walk walk(partition, tasks, program.functions, group, published && gaps);
  walk.pass([&](size_t task, bool next_frontier) { unseen.enter(task, next_frontier); },
            [&](const Visit& v) { return unseen.concerns(partition.shares[v.step], published); },
            [&] { meet(walk.groups() > 1); },
            [&](const Visit& v) {
              const Share& share = partition.shares[v.step];
              if (v.op == ScriptInstruction::kBlank) {
                unseen.blank(share);
              } else {
                if (unseen.concerns(share, published)) meet(false);
                unseen.write(share);
              }
              ScriptInstruction* const last = script.empty() ? nullptr : &script.back();
              if (last != nullptr && last->op == ScriptInstruction::kRun && v.op == ScriptInstruction::kRun &&
                  last->count <= kMostPairRows && v.count * share.columns <= kMostPairElements &&
                  pairs(partition, last->step, v.step)) {
                last->op = ScriptInstruction::kPair;
                last->next = v.step;
                last->next_first = v.first;
                last->next_count = v.count;
              } else {
                script.push_back({v.op, v.step, v.first, v.count});
              }
            },
            [&](ScriptInstruction::Op op, int number) {
              script.push_back({op, 0, number, 0});
            });
  script.push_back({ScriptInstruction::kEnd, 0, 0, 0});
  return script;
}

bool has_gaps(std::span<const int32_t> block) {
  int64_t inner = 0;
  for (const Task& task : Schedule::tasks(block)) inner += task.level > 0 ? task.count : 0;
  return int64_t{block[Schedule::kUses]} != block[Schedule::kColumns] * inner;
}

bool waits_for_values(const Partition& partition, std::span<const int32_t> block) {
  return !partition.published_by_slots || !partition.blanks.empty() || !has_gaps(block);
}

bool pairs(const Partition& partition, int32_t product, int32_t kernel) {
  const auto& steps = partition.steps;
  const Step &p = *steps[product], &k = *steps[kernel];
  if (p.kind != Step::Kind::kProduct || k.kind != Step::Kind::kKernel || k.reduces || p.edges || k.edges) return false;
  if (p.when != Step::When::kFrontiers || k.when != Step::When::kFrontiers || p.function != k.function) return false;
  // The next of the function's steps in the frontiers of the pass, or the first after the last.
  const bool backward = static_cast<size_t>(product) >= partition.forward_steps;
  const size_t begin = backward ? partition.forward_steps : 0, end = backward ? steps.size() : partition.forward_steps;
  const auto next = [&](size_t i) { return i + 1 == end ? begin : i + 1; };
  for (size_t i = next(static_cast<size_t>(product)); i != static_cast<size_t>(kernel); i = next(i)) {
    const bool here = steps[i]->kind == Step::Kind::kProduct || steps[i]->kind == Step::Kind::kKernel;
    if (i == static_cast<size_t>(product)) return false;
    if (here && steps[i]->when == Step::When::kFrontiers && steps[i]->function == p.function) return false;
  }
  return true;
}

std::string script_fault(const Program& program, const Partition& partition, std::span<const Task> tasks, int32_t group,
                         Script script, bool published, bool gaps) {
  size_t at = 0;
  bool second = false;                     // of the pair at `at`
  std::array<int, 2> signals{}, waited{};  // in the group, between all
  Unseen unseen(program.buffers.size());
  std::string fault;
  const auto blame = [&](const std::string& what) {
    if (fault.empty()) fault = "instruction " + std::to_string(at) + ": " + what;
  };
  // Signals and waits up to the next other instruction, or up to the first meeting of this kind.
  const auto meet = [&](int until = -1) {
    for (; at < script.size() && fault.empty(); ++at) {
      const ScriptInstruction& i = script[at];
      if (i.op == ScriptInstruction::kSignal) {
        if (i.count != 0 && i.count != 1) return blame("nobody is signalled");
        if (i.first != ++signals[i.count]) blame("signals are not counted one by one");
      } else if (i.op == ScriptInstruction::kWait) {
        if (i.count != 0 && i.count != 1) return blame("nobody is waited for");
        if (i.first <= waited[i.count] || i.first > signals[i.count]) blame("a wait without a signal before it");
        waited[i.count] = i.first;
        if (waited[i.count] == signals[i.count]) unseen.clear();
        if (i.count == until) {
          ++at;
          return;
        }
      } else {
        return;
      }
    }
  };
  const Walk walk(partition, tasks, program.functions, group, published && gaps);
  const auto must_meet = [&] {
    const bool all = walk.groups() > 1;
    const int before = waited[all];
    meet(all);
    if (waited[all] == before || waited[all] != signals[all]) blame("blocks do not meet");
  };
  walk.pass([&](size_t task, bool next_frontier) { unseen.enter(task, next_frontier); },
            [&](const Visit& v) { return unseen.concerns(partition.shares[v.step], published); }, must_meet,
            [&](const Visit& v) {
              if (!second) meet();
              if (!fault.empty()) return;
              if (at == script.size()) return blame("the script ends too early");
              const ScriptInstruction& i = script[at];
              const bool pair = i.op == ScriptInstruction::kPair;
              const ScriptInstruction mine =
                  second ? ScriptInstruction{ScriptInstruction::kRun, i.next, i.next_first, i.next_count} : i;
              if ((pair ? ScriptInstruction::kRun : i.op) != v.op || mine.step != v.step || mine.first != v.first ||
                  mine.count != v.count) {
                return blame("another step");
              }
              if (second && !pairs(partition, i.step, i.next)) return blame("no pair");
              if (v.op == ScriptInstruction::kBlank) {
                unseen.blank(partition.shares[v.step]);
              } else {
                if (unseen.concerns(partition.shares[v.step], published)) blame("reads what nobody waited for");
                unseen.write(partition.shares[v.step]);
              }
              second = pair && !second;
              at += !second;
            },
            [&](ScriptInstruction::Op op, int number) {
              meet();
              if (fault.empty() && (at == script.size() || script[at].op != op || script[at].first != number)) {
                blame("another instruction");
              }
              ++at;
            });
  meet();
  if (fault.empty() && (at + 1 != script.size() || script[at].op != ScriptInstruction::kEnd)) blame("no end");
  return fault;
}

std::vector<int32_t> scripts_block(const Program& program, std::span<const int32_t> schedule, int32_t most_blocks,
                                   std::span<const Pass> passes) {
  std::vector<int32_t> block = {kScriptMagic, most_blocks};
  block.resize(kHeader);
  block[kGroups] = Schedule::num_groups(Schedule::tasks(schedule));
  for (const Pass pass : passes) {
    const Partition& part = partition_of(program, pass, most_blocks);
    const bool published = waits_for_values(part, schedule), gaps = has_gaps(schedule);
    std::vector<std::vector<ScriptInstruction>> scripts;
    size_t longest = 0;
    for (int32_t group = 0; group < block[kGroups]; ++group) {
      scripts.push_back(script_of(program, part, Schedule::tasks(schedule), group, published, gaps));
      longest = std::max(longest, scripts.back().size());
    }
    const size_t first = block.size();
    int32_t* const entry = block.data() + 2 + 3 * static_cast<int>(pass);
    entry[0] = static_cast<int32_t>(first);
    entry[1] = static_cast<int32_t>(longest * scripts.size());
    entry[2] = published;
    // Kernels read whole windows.
    block.resize(first + (longest * scripts.size() + kScriptWindow) * kEach);
    for (size_t group = 0; group < scripts.size(); ++group) {
      const std::vector<ScriptInstruction>& script = scripts[group];
      std::memcpy(block.data() + first + longest * group * kEach, script.data(),
                  script.size() * sizeof(ScriptInstruction));
    }
  }
  return block;
}

Script Scripts::of_group(size_t pass, int32_t group) const {
  const Script all = of[pass].subspan(static_cast<size_t>(apart(pass)) * group, apart(pass));
  size_t length = 0;
  while (length < all.size() && all[length++].op != ScriptInstruction::kEnd) {
  }
  return all.first(length);
}

size_t scripts_begin(std::span<const int32_t> schedule) {
  return static_cast<size_t>((schedule[size_t{Schedule::kHeader} + Schedule::kNumArrays] + 3) / 4 * 4);
}

Scripts scripts_in(std::span<const int32_t> block) {
  const size_t begin = scripts_begin(block);
  if (block.size() < begin + kHeader || block[begin] != kScriptMagic) return {};
  Scripts found;
  found.most_blocks = block[begin + 1];
  found.groups = block[begin + kGroups];
  for (size_t pass = 0; pass < kPasses; ++pass) {
    const int32_t* const entry = block.data() + begin + 2 + 3 * pass;
    const size_t first = begin + static_cast<size_t>(entry[0]), count = static_cast<size_t>(entry[1]);
    if (entry[1] == 0 || block.size() < first + (count + kScriptWindow) * kEach) continue;
    found.of[pass] = {reinterpret_cast<const ScriptInstruction*>(block.data() + first), count};
    found.published[pass] = entry[2] != 0;
  }
  return found;
}

std::string script_text(const Partition& partition, Script script) {
  std::string text;
  for (const ScriptInstruction& i : script) {
    switch (i.op) {
      case ScriptInstruction::kEnd:
        text += "end\n";
        continue;
      case ScriptInstruction::kSignal:
        text += "signal " + std::string(i.count ? "all " : "") + std::to_string(i.first) + "\n";
        continue;
      case ScriptInstruction::kWait:
        text += "wait " + std::string(i.count ? "for all " : "") + std::to_string(i.first) + "\n";
        continue;
      case ScriptInstruction::kLoss:
        text += "loss\n";
        continue;
      case ScriptInstruction::kTurn:
        text += std::string("weights of the frontiers ") + (i.first == 1 ? "forward\n" : "backward\n");
        continue;
      case ScriptInstruction::kUpdateHead:
        text += "update of the head\n";
        continue;
      default:
        break;
    }
    const auto rows = [&](int32_t step, int first, int count) {
      return std::string(partition.steps[step]->edges ? ", edges " : ", rows ") + std::to_string(first) + " to " +
             std::to_string(first + count - 1);
    };
    const Step& s = *partition.steps[i.step];
    if (i.op == ScriptInstruction::kBlank) {
      text += "blank of kernel " + std::to_string(i.step);
    } else if (i.op == ScriptInstruction::kZero) {
      text += "zero #" + std::to_string(s.target);
    } else if (s.kind == Step::Kind::kProduct) {
      text += "product #" + std::to_string(s.target) + " = #" + std::to_string(s.source) + " @ matrix " +
              std::to_string(s.matrix) + (s.transposed ? ".T" : "");
    } else if (s.kind == Step::Kind::kOuter) {
      text += "update of matrix " + std::to_string(s.matrix) + " by #" + std::to_string(s.source) + ".T @ #" +
              std::to_string(s.target);
    } else if (s.kind == Step::Kind::kTotal) {
      text += "update of vector " + std::to_string(s.vector) + " by the sum of #" + std::to_string(s.source);
    } else {
      text += (s.reduces ? "reduction " : "kernel ") + std::to_string(i.step) +
              (i.op == ScriptInstruction::kRunLeaves ? " of leaves" : "");
    }
    text += rows(i.step, i.first, i.count);
    if (i.op == ScriptInstruction::kPair) {
      text += "; kernel " + std::to_string(i.next) + rows(i.next, i.next_first, i.next_count);
    }
    text += "\n";
  }
  return text;
}

}  // namespace weft::vertex
