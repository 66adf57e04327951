// vertex_frontiers: the compiled part of a vertex function, run over a batch of graphs in one call: linear layers of
// inputs, then what depends on gather, frontier by frontier; vertex_frontiers_backward: its gradients, frontiers in
// reverse, those of layers, matrices and vectors once for all vertices after the last. Source: Cavs (USENIX ATC 2018),
// sections 3.2 to 3.5.
//
//   inputs         (num_vertices, width) each, rows in the caller's order
//   matrices       (rows, columns) each: products are x @ matrix
//   vectors        one row for all vertices each, of any shape
//   schedule       int32, the block of csrc/vertex/schedule.h, on the device of the inputs
//   host_schedule  the same on the CPU
//   program        csrc/vertex/program/program.h
//   num_vertices, num_inner (those with children), num_edges  of the schedule
// Operands of another floating dtype than the program's are cast to it. Returns the outputs (num_vertices, width), rows
// in the caller's order, then what the backward pass reads: buffers with a row per vertex, per vertex with children or
// per edge, in the schedule's order.
//
// Backward: grads of the outputs, each (num_vertices, width); saved as forward returned it. Returns the gradients of
// the inputs, matrices and vectors that `of_inputs`, `of_matrices` and `of_vectors` number in ascending order, which
// are some of those that the program computes: each in the shape and dtype of what it is the gradient of. With
// `overlap` the gradients of matrices grow while frontiers run, as their rows are done (Cavs' streaming); the result is
// the same up to rounding.
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

#include "common/op_handle.h"
#include "vertex/exec/executor.h"
#include "vertex/program/object.h"

namespace weft::vertex {

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

// A whole training step of a program that is float32 alone: `launch` gets the memory of both passes, and `others`
// floats for itself; all lives until it returns. Before it `fill` sets bytes of that memory. The rows of outputs that
// the loss is not of have gradients of zero where `zeroes_grads`. The schedule has the script of one.
void run_training(const Operands& operands, bool zeroes_grads, int64_t others,
                  const std::function<void(void* first, int byte, size_t count)>& fill,
                  const std::function<void(const Memory& memory, float* others)>& launch);

inline const OpHandle<std::vector<at::Tensor>(at::TensorList, at::TensorList, at::TensorList, const at::Tensor&,
                                              const at::Tensor&, const ProgramPointer&, c10::SymInt, c10::SymInt,
                                              c10::SymInt)>
    vertex_frontiers_op("weft::vertex_frontiers");
inline const OpHandle<std::vector<at::Tensor>(
    at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList, const at::Tensor&,
    const at::Tensor&, const ProgramPointer&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool)>
    vertex_frontiers_backward_op("weft::vertex_frontiers_backward");

}  // namespace weft::vertex
