#include "vertex/exec/script.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "vertex/program/pass.h"

namespace weft::vertex {
namespace {

constexpr int32_t kScriptMagic = 0x57530101;
constexpr size_t kHeader = 8;

// What the blocks of a group have written and not signalled yet: by steps of this task in its rows, by tasks of this
// frontier, which none of them reads, and before.
class Unseen {
 public:
  void next_task(bool next_frontier) {
    frontier_.insert(own_.begin(), own_.end());
    own_.clear();
    if (!next_frontier) return;
    before_.insert(frontier_.begin(), frontier_.end());
    frontier_.clear();
  }
  bool concerns(const Share& share, bool published) const {
    return std::any_of(share.reads.begin(), share.reads.end(), [&](const CrossRead& r) {
      if (r.published && published) return false;
      return (r.own && own_.contains(r.buffer)) || (r.other && before_.contains(r.buffer));
    });
  }
  void write(const Share& share) {
    own_.insert(share.stores.begin(), share.stores.end());
    frontier_.insert(share.scatters.begin(), share.scatters.end());
  }
  void clear() {
    own_.clear();
    frontier_.clear();
    before_.clear();
  }

 private:
  std::set<int32_t> own_, frontier_, before_;
};

const std::vector<Step>& steps_of(const Program& program, bool backward) {
  return backward ? program.backward : program.forward;
}

struct Visit {
  int step;
  ScriptInstruction::Op op;
  int first, count;
};

// Calls next_task(next_frontier) for every task and visit for each of its steps, in the order of the pass.
template <typename NextTask, typename OnStep>
void walk(const Program& program, bool backward, std::span<const Task> tasks, const NextTask& next_task,
          const OnStep& visit) {
  const auto& steps = steps_of(program, backward);
  int32_t level = -1;
  for (size_t k = 0; k < tasks.size(); ++k) {
    const Task& task = tasks[backward ? tasks.size() - 1 - k : k];
    next_task(task.level != level);
    level = task.level;
    for (size_t i = 0; i < steps.size(); ++i) {
      const Step& s = steps[i];
      const bool product = s.kind == Step::Kind::kProduct;
      if (s.when != Step::When::kFrontiers || (!product && s.kind != Step::Kind::kKernel)) continue;
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
}

}  // namespace

std::vector<ScriptInstruction> script_of(const Program& program, bool backward, const Partition& partition,
                                         std::span<const Task> tasks, bool published) {
  std::vector<ScriptInstruction> script;
  Unseen unseen;
  int signals = 0;
  walk(
      program, backward, tasks, [&](bool next_frontier) { unseen.next_task(next_frontier); },
      [&](const Visit& v) {
        const Share& share = partition.shares[v.step];
        if (unseen.concerns(share, published)) {
          ++signals;
          script.push_back({ScriptInstruction::kSignal, 0, signals, 0});
          script.push_back({ScriptInstruction::kWait, 0, signals, 0});
          unseen.clear();
        }
        unseen.write(share);
        ScriptInstruction* const last = script.empty() ? nullptr : &script.back();
        if (last != nullptr && last->op == ScriptInstruction::kRun && v.op == ScriptInstruction::kRun &&
            last->count <= kMostPairRows && v.count * share.columns <= kMostPairElements &&
            pairs(program, backward, last->step, v.step)) {
          last->op = ScriptInstruction::kPair;
          last->next = v.step;
          last->next_first = v.first;
          last->next_count = v.count;
        } else {
          script.push_back({v.op, v.step, v.first, v.count});
        }
      });
  script.push_back({ScriptInstruction::kEnd, 0, 0, 0});
  return script;
}

bool waits_for_values(const Partition& partition, std::span<const int32_t> block) {
  if (!partition.published_by_slots) return true;
  int64_t inner = 0;
  for (const Task& task : Schedule::tasks(block)) inner += task.level > 0 ? task.count : 0;
  return int64_t{block[Schedule::kUses]} == block[Schedule::kColumns] * inner;
}

bool pairs(const Program& program, bool backward, int32_t product, int32_t kernel) {
  const auto& steps = steps_of(program, backward);
  const Step &p = steps[product], &k = steps[kernel];
  // The next of the function's steps, or the first after the last.
  const auto here = [&](size_t i) {
    const bool runs = steps[i].kind == Step::Kind::kProduct || steps[i].kind == Step::Kind::kKernel;
    return runs && steps[i].when == Step::When::kFrontiers && steps[i].function == p.function;
  };
  for (auto i = static_cast<size_t>(product + 1) % steps.size(); i != static_cast<size_t>(kernel);
       i = (i + 1) % steps.size()) {
    if (here(i)) return false;
  }
  return p.kind == Step::Kind::kProduct && k.kind == Step::Kind::kKernel && p.function == k.function && !k.reduces &&
         !p.edges && !k.edges;
}

std::string script_fault(const Program& program, bool backward, const Partition& partition, std::span<const Task> tasks,
                         std::span<const ScriptInstruction> script, bool published) {
  size_t at = 0;
  bool second = false;  // of the pair at `at`
  int signals = 0, waited = 0;
  Unseen unseen;
  std::string fault;
  const auto blame = [&](const std::string& what) {
    if (fault.empty()) fault = "instruction " + std::to_string(at) + ": " + what;
  };
  // Signals and waits up to the next other instruction.
  const auto meet = [&] {
    for (; at < script.size() && fault.empty(); ++at) {
      const ScriptInstruction& i = script[at];
      if (i.op == ScriptInstruction::kSignal) {
        if (i.first != ++signals) blame("signals are not counted one by one");
      } else if (i.op == ScriptInstruction::kWait) {
        if (i.first <= waited || i.first > signals) blame("a wait without a signal before it");
        waited = i.first;
        if (waited == signals) unseen.clear();
      } else {
        return;
      }
    }
  };
  walk(
      program, backward, tasks, [&](bool next_frontier) { unseen.next_task(next_frontier); },
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
        if (second && !pairs(program, backward, i.step, i.next)) return blame("no pair");
        if (unseen.concerns(partition.shares[v.step], published)) blame("reads what nobody waited for");
        unseen.write(partition.shares[v.step]);
        second = pair && !second;
        at += !second;
      });
  meet();
  if (fault.empty() && (at + 1 != script.size() || script[at].op != ScriptInstruction::kEnd)) blame("no end");
  return fault;
}

std::vector<int32_t> scripts_block(const Program& program, std::span<const int32_t> schedule, int32_t most_blocks) {
  constexpr int kEach = sizeof(ScriptInstruction) / sizeof(int32_t);
  std::vector<int32_t> block = {kScriptMagic, most_blocks, 0, 0, 0, 0, 0, 0};
  for (const bool backward : {false, true}) {
    const Partition& part = partition_of(program, backward, most_blocks);
    const bool published = waits_for_values(part, schedule);
    const auto script = script_of(program, backward, part, Schedule::tasks(schedule), published);
    block[backward ? 5 : 4] = published;
    block[backward ? 3 : 2] = static_cast<int32_t>(script.size());
    const size_t first = block.size();
    block.resize(first + script.size() * kEach);
    std::memcpy(block.data() + first, script.data(), script.size() * sizeof(ScriptInstruction));
  }
  block.resize(block.size() + size_t{kScriptWindow} * kEach);  // kernels read whole windows
  return block;
}

Scripts scripts_in(std::span<const int32_t> block) {
  constexpr size_t kEach = sizeof(ScriptInstruction) / sizeof(int32_t);
  const auto begin = static_cast<size_t>((block[size_t{Schedule::kHeader} + Schedule::kNumArrays] + 3) / 4 * 4);
  if (block.size() < begin + kHeader || block[begin] != kScriptMagic) return {};
  const auto* first = reinterpret_cast<const ScriptInstruction*>(block.data() + begin + kHeader);
  const auto forward = static_cast<size_t>(block[begin + 2]), backward = static_cast<size_t>(block[begin + 3]);
  if (block.size() < begin + kHeader + kEach * (forward + backward + kScriptWindow)) return {};
  return {
      block[begin + 1], {block[begin + 4] != 0, block[begin + 5] != 0}, {first, forward}, {first + forward, backward}};
}

std::string script_text(const Program& program, bool backward, std::span<const ScriptInstruction> script) {
  std::string text;
  for (const ScriptInstruction& i : script) {
    switch (i.op) {
      case ScriptInstruction::kEnd:
        text += "end\n";
        continue;
      case ScriptInstruction::kSignal:
        text += "signal " + std::to_string(i.first) + "\n";
        continue;
      case ScriptInstruction::kWait:
        text += "wait " + std::to_string(i.first) + "\n";
        continue;
      default:
        break;
    }
    const auto rows = [&](int32_t step, int first, int count) {
      return std::string(steps_of(program, backward)[step].edges ? ", edges " : ", rows ") + std::to_string(first) +
             " to " + std::to_string(first + count - 1);
    };
    const Step& s = steps_of(program, backward)[i.step];
    if (i.op == ScriptInstruction::kZero) {
      text += "zero #" + std::to_string(s.target);
    } else if (s.kind == Step::Kind::kProduct) {
      text += "product #" + std::to_string(s.target) + " = #" + std::to_string(s.source) + " @ matrix " +
              std::to_string(s.matrix) + (s.transposed ? ".T" : "");
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
