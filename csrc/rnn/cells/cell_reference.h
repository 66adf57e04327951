// One step of a recurrent cell and its derivative in differentiable ATen operations: what the references are made of.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

#include "rnn/cells/cell.h"

namespace weft::rnn {

// A step taken, with what its derivative needs; every tensor (B,H).
struct CellStep {
  at::Tensor h_before, c_before;
  std::array<at::Tensor, 4> gates;  // gru: r, z, n, m; lstm: i, f, g, o; else undefined
  at::Tensor h, c;                  // after the step; c for an lstm alone
};

// The step from the state (h, c), given in = W_ih x + b_ih and rec = W_hh h + b_hh, both (B,G*H). c is undefined except
// for an lstm.
CellStep cell_step(Cell cell, const at::Tensor& in, const at::Tensor& rec, const at::Tensor& h, const at::Tensor& c);

// The gradients of a step: of in and rec, (B,G*H), and of the state before it along the ways that do not lead through
// rec, (B,H): h (undefined for none) and, for an lstm, c.
struct CellStepGrads {
  at::Tensor in, rec, h, c;
};
CellStepGrads cell_step_backward(Cell cell, const CellStep& step, const at::Tensor& grad_h, const at::Tensor& grad_c);

}  // namespace weft::rnn
