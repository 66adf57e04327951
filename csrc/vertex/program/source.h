// A kernel of a vertex function as C++: the body of vertex/exec/cuda/frontier.jit.cu for one row (or edge) and one
// column. Free of torch and CUDA.
#pragma once
#include <string>

#include "vertex/program/program.h"

namespace weft::vertex {

// Statements without a line break. They read `index`, the row or edge, and `j`, the column, and what the kernel's
// source declares: the arrays of the schedule, data(E, b) and stride(b) of the b-th of kernel.buffers, whose elements E
// are Float16, BFloat16, float or double, and T, float or double, what registers are; every E converts to T and back.
// For vertices without children where `leaves`. With `each` above 1 a row has `lanes` threads, each of which has as
// many columns, `lanes` apart.
std::string kernel_body(const Program& program, const Step& kernel, bool leaves = false, int each = 1);

// How many columns of a row a thread of a kernel of its own best has: so that it asks memory for several at once, and
// for indices once.
int columns_each(const Step& kernel);

// All steps of a pass on one task of vertices with children, as statements of vertex/exec/cuda/tail.jit.cu, where
// buffers are those of the program.
std::string tail_body(const Program& program, const std::vector<Step>& steps);

}  // namespace weft::vertex
