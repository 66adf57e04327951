// weft::rnn and its backward in differentiable ATen operations, one time step after another, on any device and in any
// dtype: slow, right for gradients of any order, and what runs where there is no kernel.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "rnn/rnn.h"

namespace weft::rnn {

// Both take arguments that were checked, compute in the accumulate type and return results as the op's contract has
// them.
RnnResults rnn_reference(const RnnArgs& args, const RnnSizes& sizes, bool keep_cells, bool save);

// The arguments of rnn_backward without what the forward saved: activations are computed again from the inputs, so that
// the result depends on them differentiably.
std::vector<at::Tensor> rnn_backward_reference(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& sizes,
                                               const c10::List<bool>& output_mask);

}  // namespace weft::rnn
