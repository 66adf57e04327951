// In which order a vertex function runs over a batch of graphs, and where each vertex finds its children and its
// parents: integers, free of torch and CUDA. Cavs (USENIX ATC 2018), section 3.2: breadth-first frontiers over all
// graphs.
//
// The vertices of level l are frontier l; its vertices that run the same function are one task. Tasks run in order,
// those of one frontier in any. Each vertex has a *row*, numbered in the order of computation, so that the rows of a
// frontier and of a task are contiguous: a buffer of states has one row per vertex, and a task reads and writes
// [first, first + count) of it. Inputs and outputs keep the caller's numbering; vertices[row] translates.
//
// Within a task, vertices stand in the order of (the frontier of the nearest parent, the slot, that parent's row), or
// where that parent only sums, (the frontier, the parent's row, the slot); those without parents last. So the children
// in slot k of a task's vertices, or all that it sums over, lie in few ascending runs, in a single one for chains and
// complete trees: such a gather is no copy but a view (`runs`, `edge_run`).
//
// Forward, tasks in order: gather slot slots[c] of a task reads row gather[c][row] of the states, for each row of the
// task; -1 is a row of zeros. The sum over children reads edge_children[first_edge[row] .. first_edge[row + 1] - 1].
// Backward, tasks in reverse order: before a task runs backwards, the gradient of the state of each of its rows is the
// sum over its uses, u in first_use[row] .. first_use[row + 1] - 1, users[u] = (parent's row, column), of that row of
// the gradient of gathered slot slots[column], plus the sum over its edges, e = sum_use_edges[first_sum_use[row] ..],
// of edge e's gradient, which is row edge_parents[e] of the gradient of the sum where there is no message. All of these
// belong to later tasks. Uses are sorted by parent's row, then column: the order of a sum is always the same, and no
// atomics are needed.
//
// Where several functions run, kind_vertices lists the vertices of each, ascending: those of kind k from kind_starts[k]
// on.
//
// Graphs may be dealt to groups, which run at the same time: then a task has the vertices of one group, groups of the
// same frontier and function follow each other, and no task reads what another group's wrote.
//
// Everything lies in one block of 32-bit integers, header first: one copy takes it to a device, and the block is the
// serialised form. Arrays begin at multiples of 4 integers.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "vertex/graph/graphs.h"

namespace weft::vertex {

// What one vertex function gathers: slots in ascending order, and whether it sums over all children.
struct Kind {
  std::vector<int32_t> slots;
  bool sum = false;
};

struct Task {
  int32_t kind;        // which function: an index into the kinds
  int32_t level;       // of all its vertices
  int32_t first;       // row
  int32_t count;       // of rows
  int32_t first_edge;  // of the edges that are summed over
  int32_t num_edges;
  int32_t edge_run;  // as `runs`, for edge_children
  int32_t group;
};

class Schedule {
 public:
  // The block begins with these, followed by where each array begins and, last, the length of the block.
  enum Header {
    kMagic,
    kVertices,   // V
    kTasks,      // T
    kFrontiers,  // F
    kColumns,    // C: different slots that are gathered
    kEdges,      // E: edges that are summed over
    kUses,       // U: children that are gathered by slot
    kMaxCount,   // the most rows of a task
    kMaxEdges,   // the most edges of a task
    kSingleUse,  // 1 where no state is read twice, as in trees: gradients can be written to the child's row directly
    kSums,       // 1 where a function sums
    kKinds,      // K: functions
    kHeader
  };
  enum Array {
    kTaskTable,     // (T, 8): Task
    kFrontierTask,  // (F + 1): the tasks of frontier l are frontiers[l] .. frontiers[l + 1] - 1
    kSlots,         // (C): ascending
    kVertexOf,      // (V): the vertex of each row
    kGather,        // (C, V): the child's row, -1 where there is none or the row's function does not gather this slot
    kRuns,          // (T, C): the first of gather[c]'s rows where they ascend one by one; -1 all are -1; -2 else
    kFirstEdge,     // (V + 1): edges whose parent is in this row and whose function sums; empty where none does
    kEdgeChild,     // (E): rows, sorted by parent's row, then slot
    kEdgeParent,    // (E)
    kFirstUse,      // (V + 1)
    kUsers,         // (U, 2)
    kFirstSumUse,   // (V + 1); empty where no function sums
    kSumUseEdge,    // (E)
    kKindStart,     // (K + 1); empty where K is 1
    kKindVertex,    // (V); empty where K is 1
    kNumArrays
  };

  // `kind_of_type` has for each type of the graphs the function it runs; empty: all vertices run kind 0. Children in
  // slots that their parent's function does not gather are passed over. Of as many groups as there are graphs, at most.
  Schedule(const Graphs& graphs, std::span<const Kind> kinds, std::span<const int32_t> kind_of_type,
           int32_t groups = 1);

  int32_t number(Header what) const { return block_[what]; }
  std::span<const int32_t> array(Array which) const {
    return {block_.get() + offset(which), static_cast<size_t>(size(which))};
  }
  int64_t size(Array which) const;
  std::span<const Task> tasks() const { return tasks(block()); }
  // Those of a block.
  static std::span<const Task> tasks(std::span<const int32_t> block) {
    return {reinterpret_cast<const Task*>(block.data() + block[size_t{kHeader} + kTaskTable]),
            static_cast<size_t>(block[kTasks])};
  }
  std::span<const int32_t> gather(int column) const {
    return array(kGather).subspan(static_cast<size_t>(column) * number(kVertices), number(kVertices));
  }
  static int32_t num_groups(std::span<const Task> tasks) {
    int32_t most = 0;
    for (const Task& task : tasks) most = task.group > most ? task.group : most;
    return most + 1;
  }
  // Vertices with children: the last rows.
  int32_t num_inner() const {
    int32_t count = 0;
    for (const Task& task : tasks()) count += task.level > 0 ? task.count : 0;
    return count;
  }
  int32_t run(int task, int column) const { return array(kRuns)[task * number(kColumns) + column]; }

  std::span<const int32_t> block() const { return {block_.get(), length_}; }
  int64_t offset(Array which) const { return block_[static_cast<int>(kHeader) + which]; }

 private:
  friend class TreePlanner;
  friend class DagPlanner;
  friend struct TaskTable;

  // Makes room for the block of this header, and writes its first part. The arrays are not written.
  void make_block(const int32_t (&header)[kHeader]);
  std::span<int32_t> at(Array which) { return {block_.get() + offset(which), static_cast<size_t>(size(which))}; }

  std::unique_ptr<int32_t[]> block_;
  size_t length_ = 0;
};

// The first vertex with a child in a slot that is not below `limits[type]` (limits[0] for all without types), and the
// slot; {-1, -1} where there is none.
std::pair<int64_t, int64_t> first_beyond(const Graphs& graphs, std::span<const int64_t> limits);

}  // namespace weft::vertex
