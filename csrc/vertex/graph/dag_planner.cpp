// The schedule of any graphs. Vertices with children are listed, so that loops over those of a vertex are alike: half
// of the vertices of most graphs are leaves, in no order that a processor could predict.
#include <algorithm>
#include <numeric>
#include <ranges>
#include <tuple>

#include "vertex/graph/planner.h"

namespace weft::vertex {

namespace {

void starts_from_counts(std::span<int32_t> starts) {
  int32_t sum = 0;
  for (int32_t& start : starts) {
    const int32_t count = start;
    start = sum;
    sum += count;
  }
}

}  // namespace

DagPlanner::DagPlanner(Schedule& schedule, const Problem& problem)
    : schedule_(schedule),
      problem_(problem),
      graphs_(problem.graphs),
      table_(problem),
      shared_(!problem.graphs.forest()) {}

void DagPlanner::plan() {
  count_uses();
  make_block();
  place_all();
  read_children();
  write_runs();
  write_users();
  if (problem_.sums) write_sum_uses();
}

// What is read, and by which edge each vertex gets its place.
void DagPlanner::count_uses() {
  const int64_t V = graphs_.num_vertices();
  const auto levels = graphs_.levels(), first_child = graphs_.first_edge(), child = graphs_.child();
  const auto slot = graphs_.slot();
  inner_.resize(V + 1);
  int64_t num_inner = 0;
  for (int64_t v = 0; v < V; ++v) {
    inner_[num_inner] = static_cast<int32_t>(v);
    num_inner += levels[v] > 0;
  }
  inner_.resize(num_inner);
  std::vector<char> used;
  if (shared_) {
    place_by_.assign(V, kNone);
    place_level_.resize(V);
    used.resize(V);
  }
  for (const int32_t v : inner_) {
    const int64_t kind = problem_.kind_of(v);
    const bool sum = problem_.kinds[kind].sum;
    for (int64_t e = first_child[v]; e < first_child[v + 1]; ++e) {
      const bool gathered = problem_.column_of(kind, slot[e]) != kNone;
      const int times = gathered + sum;
      uses_ += gathered;
      edges_ += sum;
      single_use_ &= times <= 1;
      if (!shared_) continue;
      const int32_t c = child[e];
      single_use_ &= used[c] + times <= 1;
      used[c] |= times > 0;
      if (place_by_[c] == kNone || levels[v] < place_level_[c] ||
          (levels[v] == place_level_[c] && slot[e] < slot[place_by_[c]])) {
        place_by_[c] = static_cast<int32_t>(e);
        place_level_[c] = levels[v];
      }
    }
  }
}

void DagPlanner::make_block() {
  int32_t header[Schedule::kHeader] = {};
  table_.write(problem_, header);
  header[Schedule::kEdges] = static_cast<int32_t>(edges_);
  header[Schedule::kUses] = static_cast<int32_t>(uses_);
  header[Schedule::kSingleUse] = single_use_;
  schedule_.make_block(header);
  for (const Schedule::Array counted : {Schedule::kFirstUse, Schedule::kFirstSumUse}) {
    std::ranges::fill(schedule_.at(counted), 0);
  }
  std::ranges::fill(schedule_.at(Schedule::kGather), kNone);
  std::ranges::copy(problem_.slots, schedule_.at(Schedule::kSlots).begin());
  std::ranges::copy(table_.frontiers, schedule_.at(Schedule::kFrontierTask).begin());
  TaskTable::list_kinds(problem_, schedule_);
}

// Rows, from the last task to the first, and each task from its end: by the time a task is reached, all of its vertices
// have been given their rows by parents, which are in later tasks.
void DagPlanner::place_all() {
  const int64_t V = graphs_.num_vertices(), T = static_cast<int64_t>(table_.tasks.size());
  row_of_.resize(V);
  gathered_.resize(T);
  reader_.resize(shared_ ? 0 : V);
  for (const Task& task : table_.tasks) end_of_.push_back(task.first + task.count);
  for (const int32_t v : graphs_.parentless() | std::views::reverse) place(v);
  for (int64_t t = T - 1; t >= 0 && table_.tasks[t].level > 0; --t) place_children(t);
}

int32_t DagPlanner::place(int32_t vertex) {
  const int32_t row = --end_of_[table_.task_of[vertex]];
  schedule_.at(Schedule::kVertexOf)[row] = vertex;
  row_of_[vertex] = row;
  return row;
}

void DagPlanner::place_children(int64_t task) {
  const auto first_child = graphs_.first_edge(), child = graphs_.child();
  const auto rows = schedule_.at(Schedule::kVertexOf).subspan(table_.tasks[task].first, table_.tasks[task].count);
  if (problem_.kinds[table_.tasks[task].kind].slots.empty()) {
    for (const int32_t v : rows | std::views::reverse) {
      for (int32_t e = first_child[v + 1] - 1; e >= first_child[v]; --e) {
        if (leads(e)) place(child[e]);
      }
    }
    return;
  }
  int32_t most = 0, total = 0;
  begins_.clear();
  for (const int32_t v : rows) {
    const int32_t degree = first_child[v + 1] - first_child[v];
    begins_.emplace_back(first_child[v], degree);
    most = std::max(most, degree);
    total += degree;
  }
  most <= 4 ? place_few(task, most) : place_many(most, total);
}

void DagPlanner::place_few(int64_t task, int32_t most) {
  const auto child = graphs_.child();
  gathered_[task] = !shared_;
  for (int32_t i = most - 1; i >= 0; --i) {
    for (int32_t k = table_.tasks[task].count - 1; k >= 0; --k) {
      const int32_t e = begins_[k].first + i;
      if (i >= begins_[k].second || !leads(e)) continue;
      const int32_t from = place(child[e]);
      if (!shared_) read(table_.tasks[task].first + k, table_.tasks[task].kind, e, from);
    }
  }
}

// The same order where a vertex may have any number of children: edges sorted by which child they lead to.
void DagPlanner::place_many(int32_t most, int32_t total) {
  by_place_.resize(total);
  starts_.assign(most, 0);
  for (const auto& [first, degree] : begins_) {
    for (int32_t i = 0; i < degree; ++i) ++starts_[i];
  }
  starts_from_counts(starts_);
  for (const auto& [first, degree] : begins_) {
    for (int32_t i = 0; i < degree; ++i) by_place_[starts_[i]++] = first + i;
  }
  for (const int32_t e : by_place_ | std::views::reverse) {
    if (leads(e)) place(graphs_.child()[e]);
  }
}

// The row reads the child of an edge by a slot; how often each row is read is counted, and by whom if only once.
void DagPlanner::read(int32_t row, int64_t kind, int32_t edge, int32_t from) {
  const int64_t c = problem_.column_of(kind, graphs_.slot()[edge]);
  if (c == kNone) return;
  schedule_.at(Schedule::kGather)[c * graphs_.num_vertices() + row] = from;
  ++schedule_.at(Schedule::kFirstUse)[from];
  if (!shared_) reader_[from] = {row, static_cast<int32_t>(c)};
}

// What each row reads, as far as it is not known yet, and the edges that are summed over.
void DagPlanner::read_children() {
  const auto first_child = graphs_.first_edge(), child = graphs_.child();
  const auto vertex_of = schedule_.at(Schedule::kVertexOf), first_edge = schedule_.at(Schedule::kFirstEdge);
  const auto edge_child = schedule_.at(Schedule::kEdgeChild), edge_parent = schedule_.at(Schedule::kEdgeParent);
  const auto first_sum_use = schedule_.at(Schedule::kFirstSumUse);
  int32_t edge = 0, max_edges = 0;
  for (size_t t = 0; t < table_.tasks.size(); ++t) {
    Task& task = table_.tasks[t];
    const bool sum = problem_.kinds[task.kind].sum;
    task.first_edge = edge;
    if (task.level == 0 || (gathered_[t] && !sum)) {
      if (problem_.sums) std::fill_n(first_edge.begin() + task.first, task.count, edge);
      continue;
    }
    for (int32_t r = task.first; r < task.first + task.count; ++r) {
      const int32_t v = vertex_of[r];
      if (problem_.sums) first_edge[r] = edge;
      for (int32_t e = first_child[v]; e < first_child[v + 1]; ++e) {
        const int32_t from = row_of_[child[e]];
        if (!gathered_[t]) read(r, task.kind, e, from);
        if (sum) {
          edge_child[edge] = from;
          edge_parent[edge++] = r;
          ++first_sum_use[from];
        }
      }
    }
    task.num_edges = edge - task.first_edge;
    task.edge_run = run_of(edge_child.subspan(task.first_edge, task.num_edges));
    max_edges = std::max(max_edges, task.num_edges);
  }
  if (problem_.sums) first_edge.back() = edge;
  schedule_.block_[Schedule::kMaxEdges] = max_edges;
}

void DagPlanner::write_runs() {
  std::ranges::copy(table_.tasks, reinterpret_cast<Task*>(schedule_.at(Schedule::kTaskTable).data()));
  const auto runs = schedule_.at(Schedule::kRuns), gather = schedule_.at(Schedule::kGather);
  int64_t next = 0;
  for (const Task& task : table_.tasks) {
    for (int64_t c = 0; c < problem_.columns(); ++c) {
      runs[next++] = run_of(gather.subspan(c * graphs_.num_vertices() + task.first, task.count));
    }
  }
}

// By whom each row is read by slots: of first_use, first how often, then where that ends, and where it begins once all
// are filled in from the last to the first.
void DagPlanner::write_users() {
  const int64_t V = graphs_.num_vertices();
  const auto first_use = schedule_.at(Schedule::kFirstUse), users = schedule_.at(Schedule::kUsers);
  if (!shared_) {
    int32_t u = 0;
    for (int64_t r = 0; r < V; ++r) {
      const bool used = first_use[r] > 0;
      first_use[r] = u;
      if (used) std::tie(users[2 * u], users[2 * u + 1]) = reader_[r], ++u;
    }
    first_use[V] = u;
    return;
  }
  const auto gather = schedule_.at(Schedule::kGather);
  std::partial_sum(first_use.begin(), first_use.end(), first_use.begin());
  const int64_t leaves = graphs_.num_levels() > 1 ? table_.tasks[table_.frontiers[1]].first : V;
  for (int64_t r = V - 1; r >= leaves; --r) {
    for (int64_t c = problem_.columns() - 1; c >= 0; --c) {
      const int32_t from = gather[c * V + r];
      if (from == kNone) continue;
      const int32_t u = --first_use[from];
      users[2 * u] = static_cast<int32_t>(r);
      users[2 * u + 1] = static_cast<int32_t>(c);
    }
  }
}

void DagPlanner::write_sum_uses() {
  const auto first_sum_use = schedule_.at(Schedule::kFirstSumUse), edge_child = schedule_.at(Schedule::kEdgeChild);
  const auto sum_use_edge = schedule_.at(Schedule::kSumUseEdge);
  std::partial_sum(first_sum_use.begin(), first_sum_use.end(), first_sum_use.begin());
  for (int32_t e = static_cast<int32_t>(edges_) - 1; e >= 0; --e) sum_use_edge[--first_sum_use[edge_child[e]]] = e;
}

}  // namespace weft::vertex
