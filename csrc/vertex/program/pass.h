// One pass of a program over a batch as a list: which step runs on which rows, in order. It is made on the host from
// the program and the tasks of a schedule; executors read it. Free of torch and CUDA.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "vertex/graph/schedule.h"
#include "vertex/program/program.h"

namespace weft::vertex {

struct Entry {
  enum class Action : uint8_t {
    kRun,   // the step on rows (or edges) [first, first + count)
    kZero,  // what the step would write there is zero
    kTail,  // tasks from number `first` on by one kernel, which stands for the next `count` entries
  };
  Action action;
  bool leaves;  // all of the rows are vertices without children
  bool more;    // of a sum: adds to what an earlier entry wrote
  bool aside;   // may run beside what follows, up to the end of the pass
  const Step* step;
  int64_t first, count;
};

// What a schedule says of the whole batch.
struct Extent {
  std::span<const Task> tasks;
  int64_t num_vertices, num_edges;
  int64_t leaves;  // vertices without children: the first rows
};

// Numbers of the inputs, matrices and vectors whose gradients are asked for, ascending.
struct Wanted {
  std::span<const int64_t> inputs, matrices, vectors;
};

// Whether the rows of each function lie in few ranges, as where all above the leaves are of one type. Steps on all rows
// of a function then leave out those of the others; else they read zeros there.
bool functions_together(const Program& program, const Extent& extent);

// Layers, then the tasks in order, then kernels that wait for all of them. The tasks from number `tail` on are one
// kernel's.
std::vector<Entry> forward_pass(const Program& program, const Extent& extent, size_t tail);

// The tasks in reverse, then what is done once for all rows. With `overlap` the gradients of matrices grow while
// frontiers run, a piece when its rows are done (Cavs' streaming). In float16 and bfloat16 they are not cut, so that
// they are rounded once.
std::vector<Entry> backward_pass(const Program& program, const Extent& extent, size_t tail, bool overlap,
                                 const Wanted& wanted);

// Of the products among them.
int64_t multiply_adds(const Program& program, const std::vector<Entry>& pass);

}  // namespace weft::vertex
