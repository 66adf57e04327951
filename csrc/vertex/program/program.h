// The compiled part of a vertex function, as numbers: what runs in each frontier, forward and backward. Free of torch
// and CUDA. python/weft/_vertex/compiler/kernels.py writes it, and says which expressions the steps come from.
//
// A step is a kernel, instructions on registers that are as wide as the kernel for each row of the task, or for each of
// its edges; or a product, the task's rows of one buffer times a matrix into another buffer. Rows and edges are those
// of csrc/vertex/graph/schedule.h. Steps run in order, tasks in order forward and in reverse backward.
//
// The encoded form is what Program::parse reads: functions; fused; state buffer; buffers; tables; forward steps;
// backward steps; matrix gradients; vector gradients; each list with its length first.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "vertex/graph/schedule.h"

namespace weft::vertex {

// kInner: rows of vertices with children, which are the last of all.
enum class Space : int32_t { kRows, kInner, kEdges, kInput, kOutput, kOutputGrad, kInputGrad, kVector };

// Of a buffer's elements. Registers are float, double where there are doubles, which mix with nothing else.
enum class Dtype : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct Buffer {
  Space space;
  int32_t width;
  Dtype dtype;
  bool scattered;        // kScatter writes it; rows that nobody writes, of slots without a child, are zero
  int32_t index;         // which of the caller's tensors
  bool backward;         // made by the backward pass
  bool saved;            // made by the forward pass, read by the backward pass
  bool written = false;  // in all columns of all rows, by kernels of the backward pass
};

enum class Op : int32_t {
  kLoad,      // result = buffer a, first column b; c an Access; d = 2 * column of the gather + (1: one number for all)
  kConstant,  // result = constants[a]
  kUses,      // result = sum over the row's uses, by table a, of first column b
  kStore,     // buffer b, first column c = a
  kStoreSum,  // buffer b, column c = the sum of the columns of a; a kernel with reductions has no other stores
  kStoreMax,  // the same of the greatest, NaN where there is one
  kScatter,  // buffer b, first column c = a, in the rows that gather this row by schedule column d, or for d -1, in the
             // edges that sum over it
  kBegin,    // result = 0, and a loop over the row's edges begins
  kAccumulate,
  kEnd,
  kNeg,
  kSigmoid,
  kTanh,
  kRelu,
  kExp,
  kLog,
  kSqrt,
  kAbs,
  kLog1p,
  kSign,
  kErf,
  kSin,
  kCos,
  kFloat16,  // rounded to this type
  kBFloat16,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMax,
  kMin,
  kGreater,
  kGreaterEqual,
  kEqual,
  kSelect,
  kZero,  // result = 0; in no encoded program
};

enum class Access : int32_t { kRow, kParent, kGather, kChild };

struct Instruction {
  Op op;
  int32_t result, a, b, c, d;
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

struct Step {
  int32_t function;  // the kind of the tasks that it is a step of
  bool product;
  bool edges;
  bool late;  // runs once for all rows, after the last task
  // A kernel's.
  int32_t width, registers;
  bool reduces;                              // stores sums over its columns, or their greatest, and nothing else
  std::vector<Instruction> code, leaf_code;  // the second for vertices without children, where what is gathered is zero
  std::vector<int32_t> buffers;              // that it reads or writes, ascending
  // A product's.
  int32_t source, matrix, target;
  bool transposed;
  bool skips_leaves;   // zero, or nobody's, where there are no children
  bool zeroes_leaves;  // those zeros are read

  std::shared_ptr<Handles> compiled = std::make_shared<Handles>();
};

struct MatrixGradient {
  int32_t matrix, source, gradient;
  bool edges, skips_leaves;
};

struct VectorGradient {
  int32_t vector, first, buffer, column, width;
};

struct Program {
  int32_t functions;
  bool fused;     // steps may share a kernel
  bool doubles;   // registers are double
  int32_t state;  // buffer, -1 without
  std::vector<Buffer> buffers;
  std::vector<std::vector<Use>> tables;
  std::vector<Step> forward, backward;
  std::vector<MatrixGradient> matrix_gradients;
  std::vector<VectorGradient> vector_gradients;
  std::vector<double> constants;
  std::shared_ptr<Handles> tails = std::make_shared<Handles>();  // the second of the backward pass

  // std::invalid_argument where the numbers are no program.
  static Program parse(std::span<const int64_t> code, std::span<const double> constants);
};

// Multiply-adds of the products of a pass over these tasks.
int64_t multiply_adds(const Program& program, std::span<const Task> tasks, bool backward);

}  // namespace weft::vertex
