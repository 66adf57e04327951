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

Problem::Problem(const Graphs& g, std::span<const Kind> k, std::span<const int32_t> of_type, int32_t most_groups)
    : graphs(g),
      kinds(k),
      kind_of_type(of_type),
      groups(static_cast<int32_t>(std::clamp<int64_t>(g.num_graphs(), 1, std::max(1, most_groups)))) {
  for (const Kind& kind : kinds) slots.insert(slots.end(), kind.slots.begin(), kind.slots.end());
  std::sort(slots.begin(), slots.end());
  slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
  dense = slots.empty() || slots.back() == columns() - 1;
  sums = std::any_of(kinds.begin(), kinds.end(), [](const Kind& kind) { return kind.sum; });
  gathers_.resize(kinds.size() * slots.size());
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (const int32_t slot : kinds[kind].slots) gathers_[kind * slots.size() + position(slot)] = 1;
  }
  if (groups > 1) deal();
}

// The largest first, each to the group that has the fewest vertices.
void Problem::deal() {
  const auto ptr = graphs.ptr();
  std::vector<std::pair<int32_t, int32_t>> by_size(graphs.num_graphs());
  for (size_t i = 0; i < by_size.size(); ++i) by_size[i] = {ptr[i] - ptr[i + 1], static_cast<int32_t>(i)};
  std::sort(by_size.begin(), by_size.end());
  group_of_graph.resize(by_size.size());
  std::vector<int64_t> load(groups);
  for (const auto& [size, graph] : by_size) {
    const auto least = std::min_element(load.begin(), load.end());
    *least -= size;
    group_of_graph[graph] = static_cast<int32_t>(least - load.begin());
  }
}

int64_t Problem::position(int32_t slot) const {
  const auto found = std::lower_bound(slots.begin(), slots.end(), slot);
  return found != slots.end() && *found == slot ? found - slots.begin() : columns();
}

TaskTable::TaskTable(const Problem& problem) {
  const Graphs& graphs = problem.graphs;
  const int64_t V = graphs.num_vertices(), F = graphs.num_levels(), K = static_cast<int64_t>(problem.kinds.size());
  const int64_t G = problem.groups;
  if (F * K * G > std::numeric_limits<int32_t>::max()) {
    throw std::length_error("weft.vertex: more than 2147483647 pairs of a level and a vertex function");
  }
  const auto levels = graphs.levels();
  // Counts of the triples, then the numbers of their tasks.
  std::vector<int32_t> numbers;
  if (K == 1 && G == 1) {
    numbers.assign(graphs.level_sizes().begin(), graphs.level_sizes().end());
    task_of = levels;
  } else {
    numbers.resize(F * K * G);
    own_.resize(V);
    const auto ptr = graphs.ptr();
    for (int64_t g = 0; g < graphs.num_graphs(); ++g) {
      const int64_t group = G == 1 ? 0 : problem.group_of_graph[g];
      for (int64_t v = ptr[g]; v < ptr[g + 1]; ++v) {
        own_[v] = static_cast<int32_t>((levels[v] * K + problem.kind_of(v)) * G + group);
        ++numbers[own_[v]];
      }
    }
    task_of = own_;
  }
  tasks.reserve(F);
  frontiers.resize(F + 1);
  int32_t row = 0;
  for (int64_t level = 0; level < F; ++level) {
    frontiers[level] = static_cast<int32_t>(tasks.size());
    for (int64_t i = level * K * G; i < (level + 1) * K * G; ++i) {
      const int32_t count = numbers[i];
      numbers[i] = static_cast<int32_t>(tasks.size());
      if (count == 0) continue;
      const auto kind = static_cast<int32_t>(i / G % K), group = static_cast<int32_t>(i % G);
      tasks.push_back({kind, static_cast<int32_t>(level), row, count, 0, 0, kNone, group});
      row += count;
      max_count = std::max(max_count, count);
    }
  }
  frontiers[F] = static_cast<int32_t>(tasks.size());
  for (int32_t& triple : own_) triple = numbers[triple];
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
