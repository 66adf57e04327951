// A kernel of a vertex function as C++: the body of vertex/cuda/frontier.jit.cu for one row (or edge) and one column.
// Free of torch and CUDA.
#pragma once
#include <string>

#include "vertex/code.h"

namespace weft::vertex {

// Statements without a line break. They read `index`, the row or edge, and `j`, the column, and what the kernel's
// source declares: the arrays of the schedule, data(b) and stride(b) of the b-th of kernel.buffers, and the type T.
std::string kernel_body(const Program& program, const Step& kernel);

}  // namespace weft::vertex
