// One step of a recurrent cell and its derivative in differentiable ATen operations: what the references are made of.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

#include "rnn/cells/cell.h"

namespace weft::rnn {

// A step taken, with what its derivative needs; every tensor (B,H).
struct CellStep {
  at::Tensor h_before, c_before;    // c: all other states, (B, states * H)
  std::array<at::Tensor, 4> gates;  // what the cell saves; else undefined
  at::Tensor h, c;                  // after the step
};

// The step from the state (h, c), given in = W_ih x + b_ih and rec = W_hh h + b_hh, both (B,G*H). c is undefined where
// the cell has no other states.
CellStep cell_step(Cell cell, const at::Tensor& in, const at::Tensor& rec, const at::Tensor& h, const at::Tensor& c);

// The gradients of a step: of in and rec, (B,G*H), and of the state before it along the ways that do not lead through
// rec: h, (B,H), undefined for none, and c.
struct CellStepGrads {
  at::Tensor in, rec, h, c;
};
CellStepGrads cell_step_backward(Cell cell, const CellStep& step, const at::Tensor& grad_h, const at::Tensor& grad_c);

}  // namespace weft::rnn
