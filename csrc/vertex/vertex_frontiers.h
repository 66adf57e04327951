// vertex_frontiers: the part of a vertex function that depends on gather, run frontier by frontier over a batch of
// graphs in one call; vertex_frontiers_backward: its gradients, frontiers in reverse, the gradients of matrices and
// vectors once for all vertices after the last. Source: Cavs (USENIX ATC 2018), sections 3.2 to 3.5.
//
//   inputs         (num_vertices, width) each, rows in the caller's order
//   matrices       (rows, columns) each: products are x @ matrix
//   vectors        one row for all vertices each, of any shape
//   schedule       int32, the block of csrc/vertex/schedule.h, on the device of the inputs
//   host_schedule  the same on the CPU
//   program        int64 on the CPU, csrc/vertex/code.h
//   constants      float64 on the CPU
//   dtype          of all values: float32 or float64
// Returns the outputs (num_vertices, width), rows in the caller's order, then what the backward pass reads: buffers
// with a row per vertex or edge in the schedule's order.
//
// Backward: grads of the outputs, each (num_vertices, width); saved as forward returned it. Returns the gradients that
// the program computes: of inputs, then of matrices, then of vectors (flat), each in the order of their numbers.
//
// Determinism: sums run over uses and edges in the schedule's order; no atomics. Nothing aliases. No autograd of their
// own: weft.vertex calls them from a torch.autograd.Function, whose second derivative is the reference's; called on
// tensors that require grad they are refused.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "vertex/code.h"
#include "vertex/schedule.h"

namespace weft::vertex {

// The arrays of a schedule, on the device.
struct Arrays {
  const int32_t *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *use_rows, *use_columns,
      *first_sum_use, *sum_use_edges;
  int64_t num_vertices;
};

// A buffer of the program, in memory.
struct Place {
  void* data = nullptr;
  int64_t stride = 0;             // between rows, in elements; 0 for a vector
  const int32_t* rows = nullptr;  // the caller's row of each row, for his tensors
  bool edges = false;
};

// What a kernel is run on.
struct Frontier {
  std::span<const Place> places;
  const Program& program;
  const Arrays& arrays;
  at::ScalarType dtype;
};

// What a device does with the steps of one call.
class Executor {
 public:
  virtual ~Executor() = default;
  // Before the first step, when all buffers are there.
  virtual void begin(const Frontier& frontier) = 0;
  // A kernel on rows or edges [first, first + count).
  virtual void kernel(const Step& kernel, int64_t first, int64_t count) = 0;
  // Rows [first, first + count) of the target = those of the source @ matrix, or @ matrix.T. Target and source are
  // contiguous.
  virtual void product(const Step& step, const at::Tensor& source, const at::Tensor& matrix, const at::Tensor& target,
                       int64_t first, int64_t count) = 0;
};

std::vector<at::Tensor> run_forward(at::TensorList inputs, at::TensorList matrices, at::TensorList vectors,
                                    const at::Tensor& schedule, const at::Tensor& host_schedule,
                                    const at::Tensor& program, const at::Tensor& constants, at::ScalarType dtype,
                                    Executor& executor);
std::vector<at::Tensor> run_backward(at::TensorList grads, at::TensorList inputs, at::TensorList matrices,
                                     at::TensorList vectors, at::TensorList saved, const at::Tensor& schedule,
                                     const at::Tensor& host_schedule, const at::Tensor& program,
                                     const at::Tensor& constants, at::ScalarType dtype, Executor& executor);

}  // namespace weft::vertex
