// The whole schedule of trees in one pass from the roots down: which rows are read by nobody is known in advance, so
// that where the uses of a row begin follows from its number.
#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <ranges>

#include "vertex/graph/planner.h"

namespace weft::vertex {

namespace {

constexpr int kMostTreeSlots = 4;

}  // namespace

// No vertex is anybody's child twice, all that are children are gathered, and nobody sums.
bool TreePlanner::can(const Problem& problem) {
  const Graphs& graphs = problem.graphs;
  if (graphs.num_vertices() == 0 || problem.sums || problem.columns() == 0 || !problem.dense || !graphs.forest() ||
      graphs.num_slots() > std::min<int64_t>(problem.columns(), kMostTreeSlots) ||
      graphs.num_levels() * static_cast<int64_t>(problem.kinds.size()) * problem.groups >=
          std::numeric_limits<int32_t>::max() / 4) {
    return false;
  }
  if (problem.one_kind()) return true;
  for (const Kind& kind : problem.kinds) {
    if (!kind.slots.empty() && kind.slots.back() != static_cast<int32_t>(kind.slots.size()) - 1) return false;
  }
  const auto first_edge = graphs.first_edge(), slot = graphs.slot();
  for (int64_t v = 0; v < graphs.num_vertices(); ++v) {
    if (first_edge[v] == first_edge[v + 1]) continue;
    if (slot[first_edge[v + 1] - 1] >= static_cast<int64_t>(problem.kinds[problem.kind_of(v)].slots.size())) {
      return false;
    }
  }
  return true;
}

TreePlanner::TreePlanner(Schedule& schedule, const Problem& problem)
    : schedule_(schedule), problem_(problem), table_(problem), places_(table_.tasks.size()) {}

void TreePlanner::plan() {
  int32_t header[Schedule::kHeader] = {};
  table_.write(problem_, header);
  header[Schedule::kUses] = static_cast<int32_t>(problem_.graphs.num_edges());
  header[Schedule::kSingleUse] = 1;
  schedule_.make_block(header);
  const auto slots = schedule_.at(Schedule::kSlots);
  std::iota(slots.begin(), slots.end(), 0);
  std::ranges::copy(table_.frontiers, schedule_.at(Schedule::kFrontierTask).begin());
  std::ranges::copy(table_.tasks, reinterpret_cast<Task*>(schedule_.at(Schedule::kTaskTable).data()));
  TaskTable::list_kinds(problem_, schedule_);
  place_parentless();
  problem_.graphs.num_slots() <= 2 ? place_children<2>() : place_children<kMostTreeSlots>();
}

// Those that nobody reads are the last of their task.
void TreePlanner::place_parentless() {
  const auto parentless = problem_.graphs.parentless();
  const auto first_use = schedule_.at(Schedule::kFirstUse), vertex_of = schedule_.at(Schedule::kVertexOf);
  for (const int32_t v : parentless) ++places_[table_.task_of[v]].unread;
  int32_t unread = 0;
  for (size_t t = 0; t < table_.tasks.size(); ++t) {
    const int32_t first = table_.tasks[t].first, last = first + table_.tasks[t].count;
    const int32_t read = last - places_[t].unread;
    std::iota(first_use.begin() + first, first_use.begin() + read, first - unread);
    std::fill(first_use.begin() + read, first_use.begin() + last, read - unread);
    places_[t] = {last, unread};
    unread += last - read;
  }
  first_use.back() = static_cast<int32_t>(problem_.graphs.num_edges());
  for (const int32_t v : parentless | std::views::reverse) vertex_of[--places_[table_.task_of[v]].end] = v;
}

// From the last task to the first, so that the parents of a task have their rows before it is reached. What the rows
// ask of an edge is put together while its vertices are near each other, and all that a task's rows ask before its
// children get theirs, without a branch: one that is not foreseen costs more than all else of a row.
template <int kMostSlots>
void TreePlanner::place_children() {
  const Graphs& graphs = problem_.graphs;
  const int64_t V = graphs.num_vertices(), E = graphs.num_edges(), columns = problem_.columns();
  const int32_t *const task_of = table_.task_of.data(), *const first_child = graphs.first_edge().data(),
                       *const child = graphs.child().data(), *const slot = graphs.slot().data();
  int32_t *const vertex_of = schedule_.at(Schedule::kVertexOf).data(),
                 *const gather = schedule_.at(Schedule::kGather).data(),
                 *const runs = schedule_.at(Schedule::kRuns).data();
  struct User {
    int32_t row, column;
  };
  User* const users = reinterpret_cast<User*>(schedule_.at(Schedule::kUsers).data());
  Place* const places = places_.data();

  const int64_t leaves = graphs.level_sizes()[0];
  const int64_t leaf_tasks = table_.frontiers[1], T = static_cast<int64_t>(table_.tasks.size());
  const bool full = E == columns * (V - leaves);
  for (int64_t c = 0; c < columns; ++c) std::fill_n(gather + c * V, full ? leaves : V, kNone);
  std::fill_n(runs, leaf_tasks * columns, kNone);

  struct Edge {
    int32_t child;
    uint32_t task_slot;  // 4 times the child's task + the slot
  };
  const auto edges = std::make_unique_for_overwrite<Edge[]>(E + kMostSlots);
  for (int64_t e = 0; e < E; ++e) {
    edges[e] = {child[e], 4 * static_cast<uint32_t>(task_of[child[e]]) + static_cast<uint32_t>(slot[e])};
  }
  std::fill_n(&edges[E], kMostSlots, Edge{});
  struct Parent {
    int32_t degree;
    Edge edges[kMostSlots];
  };
  int32_t most_rows = 0;
  for (int64_t t = leaf_tasks; t < T; ++t) most_rows = std::max(most_rows, table_.tasks[t].count);
  const auto parents = std::make_unique_for_overwrite<Parent[]>(most_rows);
  for (int64_t t = T - 1; t >= leaf_tasks; --t) {
    const int32_t first = table_.tasks[t].first, rows = table_.tasks[t].count;
    int32_t least = kMostSlots, most = 0;
    for (int32_t k = 0; k < rows; ++k) {
      const int32_t v = vertex_of[first + k], e = first_child[v], degree = first_child[v + 1] - e;
      parents[k].degree = degree;
      std::copy_n(&edges[e], kMostSlots, parents[k].edges);
      least = std::min(least, degree);
      most = std::max(most, degree);
    }
    for (int32_t i = most; i-- > 0;) {
      const bool all = i < least;
      for (int32_t k = rows; k-- > 0;) {
        if (!all && i >= parents[k].degree) continue;
        const Edge edge = parents[k].edges[i];
        Place& place = places[edge.task_slot / 4];
        const int32_t from = --place.end, column = edge.task_slot % 4;
        vertex_of[from] = edge.child;
        gather[column * V + first + k] = from;
        users[from - place.unread] = {first + k, column};
      }
    }
    for (int64_t c = 0; c < columns; ++c) {
      runs[t * columns + c] = run_of({gather + c * V + first, static_cast<size_t>(rows)});
    }
  }
}

}  // namespace weft::vertex
