// weft::rnn_cell in differentiable ATen operations: what runs where sizes are 0, and what differentiates the backward
// pass. Computes in the accumulate type.
#pragma once
#include "rnn/step/rnn_cell.h"

namespace weft::rnn {

RnnCellResults rnn_cell_reference(const RnnCellArgs& args, bool save);

// The step again, then its gradients.
std::vector<at::Tensor> rnn_cell_backward_reference(const RnnCellGrads& grads, const RnnCellArgs& args,
                                                    const RnnCellMask& mask);

}  // namespace weft::rnn
