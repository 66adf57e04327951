// A kernel of a vertex function as C++: the body of vertex/exec/cuda/frontier.jit.cu for one row (or edge) and one
// column. Free of torch and CUDA.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "vertex/program/program.h"

namespace weft::vertex {

// Statements without a line break. They read `index`, the row or edge, and `j`, the column, and what the kernel's
// source declares: the arrays of the schedule, data(E, b) and stride(b) of the b-th of kernel.buffers, whose elements E
// are Float16, BFloat16, float or double, and T, float or double, what registers are; every E converts to T and back.
// For vertices without children where `leaves`. With `each` above 1 a row has `lanes` threads, each of which has as
// many columns, `lanes` apart.
std::string kernel_body(const Program& program, const Step& kernel, bool leaves = false, int each = 1);

// How a kernel is written into a persistent one (csrc/vertex/exec/cuda/persistent.jit.cu).
struct Placed {
  // By buffer: other blocks wait for what is stored there by its bits, which publish(element, value) stores.
  const std::vector<char>* published = nullptr;
  // The target of a product that the same instruction makes before it, -1 without; where a column of it, the first of
  // the kernel's, is found elsewhere, as an expression.
  int32_t awaited = -1;
  std::vector<std::pair<int32_t, std::string>> sums;
  // The same in row q of the target, which uses the kernel's row, where `is_there`.
  std::vector<std::pair<int32_t, std::string>> used_sums;
  std::string is_there;
  int columns = 1;  // of a block
};

// What the statements of a kernel body declare; those that ask memory where the operands of its row are, and, by
// `use`, of its first use by another row; beside a product those that ask for operands, of the row and of that use, and
// those that work out what does not need the product, and what comes after it; else all are late, behind their loads.
struct Parts {
  std::string declared, indices, use, early, early_use, meanwhile, late;
  // The indices of row `row_ahead`, in variables of their own, and those as the indices of the row.
  std::string declared_ahead, ahead, taken;

  std::string asked() const { return indices + early + use + early_use; }
  std::string all() const { return declared + asked() + meanwhile + late; }
};
Parts kernel_parts(const Program& program, const Step& kernel, bool leaves, const Placed& placed, int each = 1);

// How many columns of a row a thread of a kernel of its own best has: so that it asks memory for several at once, and
// for indices once.
int columns_each(const Step& kernel);

// All steps of a pass on one task of vertices with children, as statements of vertex/exec/cuda/tail.jit.cu, where
// buffers are those of the program.
std::string tail_body(const Program& program, const std::vector<Step>& steps);

}  // namespace weft::vertex
