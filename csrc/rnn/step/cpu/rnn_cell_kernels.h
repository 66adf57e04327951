// The CPU kernels of weft::rnn_cell, one table per instruction set (common/cpu/kernels.h). No torch header.
//
// Of few sequences the products are dot products of the weights' rows as they lie in memory with input and state: every
// weight is read once, which is what a step costs, and nothing is packed. A block of hidden units, one vector wide, is
// what a thread takes at a time; its gates follow while the sums are in registers. A dot product is summed in the same
// order whichever thread takes it. Of many sequences the caller has the products from a BLAS, in the compute type, and
// the gates alone run here.
#pragma once
#include <cstdint>

#include "common/cpu/kernels.h"
#include "rnn/step/cell_step.h"

namespace weft::rnn {

struct RnnCellKernels {
  int64_t (*lanes)(CellElement);
  // Hidden units [j0, j1) of all sequences, j0 a multiple of lanes; forward counts those of each of several heads in
  // whole vectors.
  void (*forward)(CellElement, const CellForwardArgs&, int64_t j0, int64_t j1);
  void (*backward)(CellElement, const CellBackwardArgs&, int64_t j0, int64_t j1);
};

}  // namespace weft::rnn

WEFT_CPU_KERNELS(weft::rnn::RnnCellKernels, rnn_cell_kernels)
