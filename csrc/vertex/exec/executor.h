// What runs a pass of a program on a device. Memory comes as places: torch's tensors stay outside.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "vertex/exec/script.jit.cuh"
#include "vertex/program/partition.h"
#include "vertex/program/pass.h"

namespace weft::vertex {

// The arrays of a schedule, on the device; null where they are empty.
struct Arrays {
  const int32_t *vertices, *gather, *first_edge, *edge_children, *edge_parents, *first_use, *users, *first_sum_use,
      *sum_use_edges, *tasks;
  int64_t num_vertices;
};

// A buffer of the program.
struct Place {
  void* data = nullptr;           // where the first vertex' (or edge's) row is, or would be
  int64_t stride = 0;             // between rows, in elements; 0 for a vector
  const int32_t* rows = nullptr;  // the caller's row of each row, for his tensors
  bool edges = false;
};

// A matrix, or the gradient of one or of a vector. One of the strides is 1.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 0;  // in elements
  DType dtype = DType::f32;
};

// What the steps of a pass read and write.
struct Memory {
  const Program& program;
  const Arrays& arrays;
  std::span<const Place> buffers;
  std::span<const Matrix> matrices;
  std::span<const Matrix> matrix_gradients,
      vector_gradients;  // by the number of the matrix or vector; of those asked for
  // For groups of at most so many blocks the instructions of each Pass, on the device, those of a group `apart` from
  // the next one's; null where there are none.
  int32_t most_blocks = 0, groups = 1;
  std::array<int32_t, kPasses> apart{};
  std::array<const ScriptInstruction*, kPasses> scripts{};
  std::function<void()> unpublish;  // to be called where no script runs after all, before anything is written
};

class Executor {
 public:
  virtual ~Executor() = default;

  // Sets `count` bytes of the device's memory, in the order of what is run. May be called before `begin`.
  virtual void fill(void* first, int byte, size_t count) = 0;
  // Before the first step, when all memory is there.
  virtual void begin(const Memory& memory) = 0;
  // Whether the device has one kernel for the last tasks of a pass.
  virtual bool has_tail(bool backward) { return false; }
  // Whether the device runs all tasks of a pass by their script.
  virtual bool has_script(bool backward) { return false; }
  // Runs the pass; what was put aside is done for all that comes later on the device.
  void run(const std::vector<Entry>& pass, std::span<const Task> tasks, bool backward);

 protected:
  // A kernel on rows or edges [first, first + count), all of them vertices without children where `leaves`.
  virtual void kernel(const Step& step, int64_t first, int64_t count, bool leaves) = 0;
  // Those rows of the target = the same of the source @ matrix, or @ matrix.T, + the vector.
  virtual void product(const Step& step, int64_t first, int64_t count) = 0;
  // The gradient of a matrix = rows of the source, transposed, @ rows of the target; added to it where `more`.
  virtual void outer(const Step& step, int64_t first, int64_t count, bool more) = 0;
  // Products and gradients of matrices of which none reads or writes what another writes.
  virtual void products(std::span<const Entry> entries);
  void run_product(const Entry& e);  // one of them
  // The gradient of each vector = the sum of its totals: each adds rows of columns of its source to columns of it.
  virtual void totals(std::span<const Entry> entries) = 0;
  // Those rows of a product, or the gradient of a matrix, = 0.
  virtual void zero(const Step& step, int64_t first, int64_t count) = 0;
  // All steps on the last tasks, from number `first` on; false where it does not run after all.
  virtual bool tail(std::span<const Task> tasks, size_t first, bool backward) { return false; }
  // What comes next runs after all that was asked for so far, and beside what comes after `end_aside`, until `join`.
  virtual void begin_aside() {}
  virtual void end_aside() {}
  virtual void join() {}
};

}  // namespace weft::vertex
