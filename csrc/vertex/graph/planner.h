// How a schedule is made. Batches of trees in which every vertex gathers all of its children by slot, the most frequent
// ones, have a planner of their own, which takes a third of the other's time.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "vertex/graph/schedule.h"

namespace weft::vertex {

inline constexpr int kNone = -1, kScattered = -2;

// -1 where all rows are, the first row of an unbroken run, or -2.
int32_t run_of(std::span<const int32_t> rows);

// Graphs, and what the functions of their vertices gather.
struct Problem {
  const Graphs& graphs;
  std::span<const Kind> kinds;
  std::span<const int32_t> kind_of_type;  // empty: every vertex runs kind 0
  // The slots that any function gathers, ascending: slot slots[c] is column c.
  std::vector<int32_t> slots;
  bool dense;  // the slots are 0, 1, ...
  bool sums;   // a function sums over all children
  int32_t groups;
  std::vector<int32_t> group_of_graph;  // empty where there is one

  Problem(const Graphs& graphs, std::span<const Kind> kinds, std::span<const int32_t> kind_of_type, int32_t groups);
  bool one_kind() const { return kinds.size() == 1; }
  int64_t columns() const { return static_cast<int64_t>(slots.size()); }
  int32_t kind_of(int64_t vertex) const {
    return kind_of_type.empty() ? 0 : kind_of_type[static_cast<size_t>(graphs.types()[vertex])];
  }
  // The column of a slot that the function gathers, else -1.
  int64_t column_of(int64_t kind, int32_t slot) const {
    int64_t c = slot;
    if (dense && one_kind()) return c < columns() ? c : kNone;
    if (!dense) c = position(slot);
    return c < columns() && gathers_[kind * columns() + c] ? c : kNone;
  }

 private:
  int64_t position(int32_t slot) const;
  void deal();

  std::vector<char> gathers_;  // (kinds, columns)
};

// The non-empty triples of level, function and group, in order.
struct TaskTable {
  std::vector<Task> tasks;
  std::vector<int32_t> frontiers;    // (levels + 1): as Schedule::kFrontierTask
  std::span<const int32_t> task_of;  // (vertices)
  int32_t max_count = 0;

  explicit TaskTable(const Problem& problem);
  TaskTable(const TaskTable&) = delete;
  TaskTable& operator=(const TaskTable&) = delete;
  // The numbers in a block's header that follow from it and the problem.
  void write(const Problem& problem, int32_t (&header)[Schedule::kHeader]) const;
  // The vertices of each function, where there are several.
  static void list_kinds(const Problem& problem, Schedule& schedule);

 private:
  std::vector<int32_t> own_;
};

class TreePlanner {
 public:
  static bool can(const Problem& problem);
  TreePlanner(Schedule& schedule, const Problem& problem);
  void plan();

 private:
  // Where the next vertex of a task goes.
  struct Place {
    int32_t end;     // of the rows that have no vertex yet
    int32_t unread;  // rows of earlier tasks that nobody reads
  };
  void place_parentless();
  template <int kMostSlots>
  void place_children();

  Schedule& schedule_;
  const Problem& problem_;
  TaskTable table_;
  std::vector<Place> places_;  // (tasks)
};

class DagPlanner {
 public:
  DagPlanner(Schedule& schedule, const Problem& problem);
  void plan();

 private:
  void count_uses();
  void make_block();
  void place_all();
  void place_children(int64_t task);
  void place_few(int64_t task, int32_t most);
  void place_many(int32_t most, int32_t total);
  int32_t place(int32_t vertex);
  // Whether it is by this edge that the child gets its place.
  bool leads(int32_t edge) const { return !shared_ || place_by_[graphs_.child()[edge]] == edge; }
  void read_children();
  void read(int32_t row, int64_t kind, int32_t edge, int32_t from);
  void write_runs();
  void write_users();
  void write_sum_uses();

  Schedule& schedule_;
  const Problem& problem_;
  const Graphs& graphs_;
  TaskTable table_;
  bool shared_;                 // a vertex is several vertices' child
  std::vector<int32_t> inner_;  // vertices with children
  // Where shared: the edge by which each vertex gets its place, to the nearest parent, then the lowest slot; and that
  // parent's level.
  std::vector<int32_t> place_by_, place_level_;
  int64_t edges_ = 0, uses_ = 0;  // that are summed over; children that are gathered by slot
  bool single_use_ = true;
  std::vector<int32_t> row_of_, end_of_;  // (vertices); (tasks): of the rows that have no vertex yet
  std::vector<char> gathered_;            // (tasks): what its rows read by slots is known
  // Of each row of trees, who reads it: row and column.
  std::vector<std::pair<int32_t, int32_t>> reader_;
  // Of a task: edges in the order of places.
  std::vector<int32_t> by_place_, starts_;
  std::vector<std::pair<int32_t, int32_t>> begins_;  // each row's first edge, and how many
};

}  // namespace weft::vertex
