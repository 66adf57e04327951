// weft::scan_rnn_backward in differentiable ATen operations, one time step after another: slow, and right for gradients
// of any order.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "scan/scan_rnn.h"

namespace weft {

// The arguments of scan_rnn_backward without what the forward saved: activations are computed again from the inputs, so
// that the result depends on them differentiably. Runs in the accumulate type; the results have the dtype of input.
ScanRnnGrads scan_rnn_backward_reference(const std::optional<at::Tensor>& grad_output,
                                         const std::optional<at::Tensor>& grad_h_n,
                                         const std::optional<at::Tensor>& grad_c_n, const at::Tensor& input,
                                         const at::Tensor& h0, const std::optional<at::Tensor>& c0,
                                         const at::Tensor& w_ih, const at::Tensor& w_hh,
                                         const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
                                         Cell cell, bool reverse, const std::array<bool, 7>& output_mask);

}  // namespace weft
