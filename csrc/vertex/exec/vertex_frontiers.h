// vertex_frontiers: the part of a vertex function that depends on gather, run frontier by frontier over a batch of
// graphs in one call; vertex_frontiers_backward: its gradients, frontiers in reverse, the gradients of matrices and
// vectors once for all vertices after the last. Source: Cavs (USENIX ATC 2018), sections 3.2 to 3.5.
//
//   inputs         (num_vertices, width) each, rows in the caller's order
//   matrices       (rows, columns) each: products are x @ matrix
//   vectors        one row for all vertices each, of any shape
//   schedule       int32, the block of csrc/vertex/graph/schedule.h, on the device of the inputs
//   host_schedule  the same on the CPU
//   program        csrc/vertex/program/program.h
//   num_vertices, num_inner (those with children), num_edges  of the schedule
// Operands of another floating dtype than the program's are cast to it. Returns the outputs (num_vertices, width), rows
// in the caller's order, then what the backward pass reads: buffers with a row per vertex, per vertex with children or
// per edge, in the schedule's order.
//
// Backward: grads of the outputs, each (num_vertices, width); saved as forward returned it. Returns the gradients that
// the program computes, of the inputs, matrices and vectors that `of_inputs`, `of_matrices` and `of_vectors` number in
// ascending order: each in the shape and dtype of what it is the gradient of. With `overlap` the gradients of matrices
// grow while frontiers run, as their rows are done (Cavs' streaming); the result is the same up to rounding.
//
// Products sum in float32 whatever their dtype (double in double), element-wise arithmetic is in float32, and only what
// is stored is rounded.
//
// Determinism: sums run over uses and edges in the schedule's order; no atomics. Nothing aliases. No autograd of their
// own: weft.vertex calls them from a torch.autograd.Function, whose second derivative is the reference's; a gradient
// through a call on tensors that require grad is refused. Nothing to map by vmap: a batch of graphs is one of Graphs.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <span>
#include <vector>

#include "common/op_handle.h"
#include "vertex/graph/schedule.h"
#include "vertex/program/object.h"
#include "vertex/program/program.h"

namespace weft::vertex {

// The arrays of a schedule, on the device; null where they are empty.
struct Arrays {
  const int32_t *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *users, *first_sum_use,
      *sum_use_edges, *tasks;
  int64_t num_vertices;
};

// A buffer of the program, in memory.
struct Place {
  void* data = nullptr;
  int64_t stride = 0;             // between rows, in elements; 0 for a vector
  const int32_t* rows = nullptr;  // the caller's row of each row, for his tensors
  bool edges = false;
};

// What kernels are run on.
struct Frontier {
  std::span<const Place> places;
  const Program& program;
  const Arrays& arrays;
  std::span<const at::Tensor> matrices;
};

// What a device does with the steps of one call.
class Executor {
 public:
  virtual ~Executor() = default;
  // Before the first step, when all buffers are there.
  virtual void begin(const Frontier& frontier) = 0;
  // A kernel on rows or edges [first, first + count), all of them vertices without children where `leaves`.
  virtual void kernel(const Step& kernel, int64_t first, int64_t count, bool leaves) = 0;
  // `count` rows of the target, from `to` on, = those of the source, from `from` on, @ matrix, or @ matrix.T. Target
  // and source are contiguous.
  virtual void product(bool transposed, const at::Tensor& source, int64_t from, const at::Tensor& matrix,
                       const at::Tensor& target, int64_t to, int64_t count) = 0;
  // All steps of a pass on the last tasks, from number `first` on, where the device does that faster than step by step.
  virtual bool tail(const std::vector<Step>& steps, std::span<const Task> tasks, size_t first, bool backward) {
    return false;
  }
  // Runs after all that was asked for so far, and beside what comes until join. `work` allocates nothing.
  virtual void aside(const std::function<void()>& work) = 0;
  virtual void join() = 0;
};

// The arguments that both passes have.
struct Operands {
  at::TensorList inputs, matrices, vectors;
  const at::Tensor &schedule, &host_schedule;
  const Program& program;
};

// `sizes`: vertices, those with children, edges.
std::vector<at::Tensor> run_forward(const Operands& operands, std::array<int64_t, 3> sizes, Executor& executor);
std::vector<at::Tensor> run_backward(at::TensorList grads, const Operands& operands, at::TensorList saved,
                                     at::IntArrayRef of_inputs, at::IntArrayRef of_matrices, at::IntArrayRef of_vectors,
                                     bool overlap, Executor& executor);

inline const OpHandle<std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList, const at::Tensor&,
                                              const at::Tensor&, const ProgramPointer&, c10::SymInt, c10::SymInt,
                                              c10::SymInt)>
    vertex_frontiers_op("weft::vertex_frontiers");
inline const OpHandle<std::vector<at::Tensor>(
    at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, const at::Tensor&,
    const at::Tensor&, const ProgramPointer&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool)>
    vertex_frontiers_backward_op("weft::vertex_frontiers_backward");

}  // namespace weft::vertex
