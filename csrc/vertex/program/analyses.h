// What follows from a program's steps. Free of torch and CUDA.
#pragma once
#include <cstdint>
#include <span>

#include "vertex/graph/schedule.h"
#include "vertex/program/program.h"

namespace weft::vertex {

// What kernels do at vertices without children: what is gathered, and products of nothing else, are zero, and inner
// rows are not there.
void specialise_for_leaves(Program& program);

// Which gradients of inputs the backward pass writes in all rows and columns.
void find_written(Program& program);

// Multiply-adds of the products of a pass over these tasks.
int64_t multiply_adds(const Program& program, std::span<const Task> tasks, bool backward);

}  // namespace weft::vertex
