// The compiled part of a vertex function: what runs in each frontier, forward and backward. Free of torch and CUDA.
// python/weft/_vertex/compiler writes it, and says which expressions the steps come from.
//
// A step is a kernel, instructions on registers that are as wide as the kernel for each row of the task, or for each of
// its edges; or a product, the task's rows of one buffer times a matrix into another buffer; or a sum over rows, which
// is the gradient of a matrix or of a vector. Rows and edges are those of csrc/vertex/graph/schedule.h. Steps run in
// order, tasks in order forward and in reverse backward; linear layers of inputs run once before all tasks, their
// gradients once after them. program/pass.h makes of it what runs over a batch.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/dtype.h"
#include "vertex/program/ops.h"

namespace weft::vertex {

// kInner: rows of vertices with children, which are the last of all. kLayer: what a linear layer makes of an input
// before the frontiers. All from kInput to kLayerGrad have their rows in the caller's order.
enum class Space : int32_t {
  kRows,
  kInner,
  kEdges,
  kInput,
  kLayer,
  kOutput,
  kOutputGrad,
  kInputGrad,
  kLayerGrad,
  kVector
};

struct Buffer {
  Space space;
  int32_t width;
  DType dtype;           // registers are float, double where there are doubles, which mix with nothing else
  bool scattered;        // kScatter writes it; rows that nobody writes, of slots without a child, are zero
  int32_t index;         // which of the caller's tensors
  bool backward;         // made by the backward pass
  bool saved;            // made by the forward pass, read by the backward pass
  bool zeros;            // rows of functions that do not write it are read
  bool written = false;  // of a gradient: in all columns of all rows
  bool read_backward = false;
};

enum class Access : int32_t { kRow, kParent, kGather, kChild };

// What an instruction does not need it leaves as it is here.
struct Instruction {
  Op op;
  int32_t result = -1;                // register
  std::array<int32_t, 3> operands{};  // registers: a, b, c
  int32_t buffer = -1, column = 0;    // the first of the columns in memory, or in the span of a table of uses
  Access access = Access::kRow;       // of a load
  int32_t gather = -1;                // schedule column of a load or scatter; of a scatter -1: sums over children
  bool broadcast = false;             // a load of one number for all columns
  int32_t constant = -1, table = -1;

  int32_t a() const { return operands[0]; }
  int32_t b() const { return operands[1]; }
  int32_t c() const { return operands[2]; }
};

// One term of a gradient of a state: what a use of it by the gather of `column`, or for -1 by a sum over children,
// adds.
struct Use {
  int32_t column, buffer, first;
  bool by_parent;  // of a sum: the row of the edge's parent, else of the edge
};

// What a device made of a kernel, by device: handles that live as long as the process.
struct Handles {
  std::atomic<void*> of[64][2] = {};  // of a step the second is for vertices without children
};

struct Partitions;  // program/partition.h

struct Step {
  enum class Kind : int32_t {
    kKernel,   // instructions
    kProduct,  // target = source @ matrix, or @ matrix.T, + bias
    kOuter,    // the gradient of a matrix: source.T @ target, over all rows of the function
    kTotal,    // the gradient of a vector: the sum over all rows of the function of columns of the source
  };
  enum class When : int32_t { kBefore, kFrontiers, kAfter };  // once for all rows, or task by task

  Kind kind;
  When when;
  int32_t function;  // the kind of the tasks that it is a step of
  bool edges;
  // Of a kernel; the width of a total, too.
  int32_t width, registers;
  bool reduces;                              // stores sums over its columns, or their greatest, and nothing else
  std::vector<Instruction> code, leaf_code;  // the second for vertices without children, where what is gathered is zero
  std::vector<int32_t> buffers;              // that it reads or writes, ascending
  // Of products.
  int32_t source, target, matrix;
  int32_t bias;        // buffer, -1 without
  bool transposed;     // the matrix is
  bool skips_leaves;   // zero, or nobody's, where there are no children
  bool zeroes_leaves;  // those zeros are read
  // Of a total: columns [column, column + width) of the source are those from `first` on of the vector.
  int32_t vector, first, column;
  bool whole;  // these are all of its columns, and nothing else adds to them

  std::shared_ptr<Handles> compiled = std::make_shared<Handles>();
};

struct Program {
  int32_t functions;
  bool fused;     // steps may share a kernel
  bool doubles;   // registers are double
  int32_t state;  // buffer, -1 without
  std::vector<Buffer> buffers;
  std::vector<std::vector<Use>> tables;
  std::vector<Step> forward, backward;
  std::vector<double> constants;
  int32_t gathered = 0;                                          // columns of the schedule that loads gather by
  std::shared_ptr<Handles> tails = std::make_shared<Handles>();  // the second of the backward pass

  std::shared_ptr<Partitions> partitions;

  // Checks what was put together, and finds what the rest says. std::invalid_argument names what is wrong.
  void finish();

  // Numbers of the inputs, matrices and vectors that the backward pass gives gradients of, and that it reads;
  // ascending.
  struct Numbers {
    std::vector<int32_t> inputs, matrices, vectors;
  };
  Numbers gradients, reads;

  // Buffers that the forward pass gives away: outputs, then what the backward pass reads.
  std::vector<int32_t> results() const;
};

}  // namespace weft::vertex
