#include "vertex/graph/planner.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace weft::vertex {

int32_t run_of(std::span<const int32_t> rows) {
  if (rows.empty()) return kNone;
  const int32_t first = rows[0], step = first == kNone ? 0 : 1;
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] != first + step * static_cast<int32_t>(i)) return kScattered;
  }
  return first;
}

Problem::Problem(const Graphs& g, std::span<const Kind> k, std::span<const int32_t> of_type)
    : graphs(g), kinds(k), kind_of_type(of_type) {
  for (const Kind& kind : kinds) slots.insert(slots.end(), kind.slots.begin(), kind.slots.end());
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  dense = slots.empty() || slots.back() == columns() - 1;
  sums = std::any_of(kinds.begin(), kinds.end(), [](const Kind& kind) { return kind.sum; });
  gathers_.resize(kinds.size() * slots.size());
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (const int32_t slot : kinds[kind].slots) gathers_[kind * slots.size() + position(slot)] = 1;
  }
}

int64_t Problem::position(int32_t slot) const {
  const auto found = std::lower_bound(slots.begin(), slots.end(), slot);
  return found != slots.end() && *found == slot ? found - slots.begin() : columns();
}

TaskTable::TaskTable(const Problem& problem) {
  const Graphs& graphs = problem.graphs;
  const int64_t V = graphs.num_vertices(), F = graphs.num_levels(), K = static_cast<int64_t>(problem.kinds.size());
  if (F * K > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("weft.vertex: more than 2147483647 pairs of a level and a vertex function");
  }
  const auto levels = graphs.levels();
  // Counts of the pairs, then the numbers of their tasks.
  std::vector<int32_t> numbers;
  if (K == 1) {
    numbers.assign(graphs.level_sizes().begin(), graphs.level_sizes().end());
    task_of = levels;
  } else {
    numbers.resize(F * K);
    own_.resize(V);
    for (int64_t v = 0; v < V; ++v) {
      own_[v] = static_cast<int32_t>(levels[v] * K + problem.kind_of(v));
      ++numbers[own_[v]];
    }
    task_of = own_;
  }
  tasks.reserve(F);
  frontiers.resize(F + 1);
  int32_t row = 0;
  for (int64_t level = 0; level < F; ++level) {
    frontiers[level] = static_cast<int32_t>(tasks.size());
    for (int64_t kind = 0; kind < K; ++kind) {
      const int32_t count = numbers[level * K + kind];
      numbers[level * K + kind] = static_cast<int32_t>(tasks.size());
      if (count == 0) continue;
      tasks.push_back({static_cast<int32_t>(kind), static_cast<int32_t>(level), row, count, 0, 0, kNone, 0});
      row += count;
      max_count = std::max(max_count, count);
    }
  }
  frontiers[F] = static_cast<int32_t>(tasks.size());
  for (int32_t& pair : own_) pair = numbers[pair];
}

void TaskTable::write(const Problem& problem, int32_t (&header)[Schedule::kHeader]) const {
  header[Schedule::kVertices] = static_cast<int32_t>(problem.graphs.num_vertices());
  header[Schedule::kTasks] = static_cast<int32_t>(tasks.size());
  header[Schedule::kFrontiers] = static_cast<int32_t>(problem.graphs.num_levels());
  header[Schedule::kColumns] = static_cast<int32_t>(problem.columns());
  header[Schedule::kMaxCount] = max_count;
  header[Schedule::kSums] = problem.sums;
  header[Schedule::kKinds] = static_cast<int32_t>(problem.kinds.size());
}

void TaskTable::list_kinds(const Problem& problem, Schedule& schedule) {
  if (problem.one_kind()) return;
  const auto starts = schedule.at(Schedule::kKindStart), listed = schedule.at(Schedule::kKindVertex);
  const int64_t V = problem.graphs.num_vertices(), K = static_cast<int64_t>(problem.kinds.size());
  std::fill(starts.begin(), starts.end(), 0);
  for (int64_t v = 0; v < V; ++v) ++starts[problem.kind_of(v) + 1];
  for (int64_t k = 0; k < K; ++k) starts[k + 1] += starts[k];
  std::vector<int32_t> next(starts.begin(), starts.end() - 1);
  for (int64_t v = 0; v < V; ++v) listed[next[problem.kind_of(v)]++] = static_cast<int32_t>(v);
}

}  // namespace weft::vertex
