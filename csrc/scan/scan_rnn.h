// weft::scan_rnn: one layer, one direction of a tanh RNN, ReLU RNN, GRU or LSTM whose backward pass is a linear scan.
//
//   rnn    h[t] = f(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh)                         f = tanh or relu
//   gru    r = s(..), z = s(..), m = W_hn h[t-1] + b_hn, n = tanh(W_in x[t] + b_in + r m),  h[t] = n + z (h[t-1] - n)
//   lstm   i = s(..), f = s(..), g = tanh(..), o = s(..),  c[t] = f c[t-1] + i g,  h[t] = o tanh(c[t])
//
// T steps, B sequences, I inputs, H hidden units, G = 1, 1, 3, 4 gate blocks for rnn_tanh, rnn_relu, gru, lstm, in
// torch's order (gru: r, z, n; lstm: i, f, g, o). Any of T, B, I, H may be 0; T = 0 gives h_n = h0.
//
// The state has a leading dimension of 1, as torch has it for one layer and direction.
//
// scan_rnn(input (T,B,I), h0 (1,B,H), c0 (1,B,H) | None, w_ih (G*H,I), w_hh (G*H,H), b_ih (G*H) | None,
//          b_hh (G*H) | None; cell, reverse, save)
//   output (T,B,H)   h[t]; with reverse, time runs from T-1 down to 0 and output[t] stays at its own t
//   h_n    (1,B,H)   the state after the last step taken
//   c_n    (1,B,H)   lstm; else (0)
//   gates            with save: gru (T,B,4H) = r, z, n, m; lstm (T,B,4H) = i, f, g, o, all after their nonlinearity;
//                    accumulate type. Without save, and for the rnns: (0)
//   cells            with save: lstm (T,B,H) = c[t], accumulate type; else (0)
//   save is switched on by the autograd kernel where a gradient is needed.
//
// scan_rnn_backward(grad_output (T,B,H) | None, grad_h_n (1,B,H) | None, grad_c_n (1,B,H) | None, the seven tensors
//                   above, output, gates, cells; cell, reverse, output_mask[7])
//   the gradients of the seven tensor arguments in their order; (0) where masked out or absent. None means zeros.
//   It is differentiable to any order, step by step through scan_rnn_reference.h, in everything but output, gates and
//   cells, which it takes for the functions of the other arguments that they are.
//
// On a CPU it is weft::rnn in the accumulate type.
// On CUDA the forward pass for H > 32 is torch's kernel in the accumulate type (cuDNN, with TF32 where
// torch.backends.cudnn.allow_tf32 has it); gates and cells are computed from its output, without TF32. The backward
// pass has kernels for H <= 128, an lstm's H <= 64, in float64 for H <= 32; beyond, it is a slow loop over the steps.
//
// Dtypes: float16, bfloat16, float32, float64, one for all arguments. float16 and bfloat16 accumulate, and carry the
// state, in float32 (the accumulate type), and round where a result is written.
// Aliasing: no result shares memory with an argument or with another result.
// Determinism: two runs give the same bits.
// NaN and inf in one sequence of the batch stay in that sequence's rows (and reach the sums over the batch, i.e. the
// gradients of weights and biases).
// Errors: ValueError for shapes and names, TypeError for dtypes, RuntimeError for devices.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

#include "rnn/cell.h"

namespace weft {

// ValueError that names the op and lists the known cells, for any other name.
Cell parse_cell(const char* op, c10::string_view name);

// float32 for float16, bfloat16 and float32; float64 for float64.
at::ScalarType accumulate_type(at::ScalarType type);

struct ScanRnnSizes {
  int64_t T, B, I, H;
  int gates;  // G
};

// Rank, sizes, dtype and device of the arguments of the forward op; c0 exactly for an lstm; both biases or none.
ScanRnnSizes check_scan_rnn(const char* op, Cell cell, const at::Tensor& input, const at::Tensor& h0,
                            const std::optional<at::Tensor>& c0, const at::Tensor& w_ih, const at::Tensor& w_hh,
                            const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh);

// What the backward op takes besides: the incoming gradients and what a forward with save=True returned.
void check_scan_rnn_saved(const char* op, Cell cell, const ScanRnnSizes& sizes, const at::Tensor& input,
                          const std::optional<at::Tensor>& grad_output, const std::optional<at::Tensor>& grad_h_n,
                          const std::optional<at::Tensor>& grad_c_n, const at::Tensor& output, const at::Tensor& gates,
                          const at::Tensor& cells);

using ScanRnnGrads = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Undefined gradients as empty tensors (0) of `like`'s dtype and device: what the op returns.
ScanRnnGrads without_undefined(const ScanRnnGrads& grads, const at::Tensor& like);

}  // namespace weft
