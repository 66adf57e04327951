// What follows from a program's steps. Free of torch and CUDA.
#pragma once
#include "vertex/program/program.h"

namespace weft::vertex {

// What kernels do at vertices without children: what is gathered, and products of nothing else, are zero, and inner
// rows are not there.
void specialise_for_leaves(Program& program);

// Which gradients of inputs and layers the backward pass writes in all rows and columns.
void find_written(Program& program);

// What the backward pass reads, of what it gives gradients, and which totals are all that there is of a vector's.
void find_gradients(Program& program);

}  // namespace weft::vertex
