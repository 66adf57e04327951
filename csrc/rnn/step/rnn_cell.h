// weft::rnn_cell: one time step of a tanh RNN, ReLU RNN, GRU, LSTM or sLSTM, both products and the gates in one op. The
// formulas are those of weft::rnn, see rnn/rnn.h, as are S, the number of states beside h, and num_heads.
//
// B sequences, I inputs, H hidden units, G = 1, 1, 3, 4, 4 gate blocks for rnn_tanh, rnn_relu, gru, lstm, slstm,
// in torch's order; P = H / num_heads. Any of B, I, H may be 0.
//
// rnn_cell(input (B,I), h (B,H), c (B,S*H) | None, w_ih (G*H,I), w_hh (G*H,P), b_ih (G*H) | None, b_hh (G*H) | None;
//          cell, save, num_heads)
//   c       where S > 0; the biases both or neither
//   h_next  (B,H)  the state after the step
//   c_next  (B,S*H)  or (0)
//   gates   (B,4*H)  with save: gru r, z, n, m with m = W_hn h + b_hn; lstm i, f, g, o; slstm see cells/slstm.h; after
//                    their nonlinearity. Without save, and for the rnns: (0)
//   save is switched on by the autograd kernel where a gradient is needed. h_next and c_next are differentiable.
//
// rnn_cell_backward(grad_h_next, grad_c_next: each like its result | None, the seven tensor arguments above, h_next,
//                   c_next, gates; cell, output_mask, num_heads)
//   one gradient for each of input, h, c, w_ih, w_hh, b_ih, b_hh, in this order, which is that of output_mask; (0)
//   where masked out or where the argument is None. None means zeros. It is differentiable to any order, through
//   rnn_cell_reference.h, in everything but h_next, c_next and gates, which it takes for the functions of the other
//   arguments that they are.
//
// Dtypes: float16, bfloat16, float32, float64, one for all arguments. float16 and bfloat16 compute the gates in
// float32; products of many sequences round to them once before, as torch's do. Float32 products take TF32 where
// torch's do. Aliasing: no result shares memory with an argument or with another result. Results are contiguous.
// Determinism: two runs give the same bits, with any number of threads.
// NaN and inf in one sequence of the batch stay in that sequence's rows (and reach the sums over the batch, i.e. the
// gradients of weights and biases).
// Errors: ValueError for shapes, names and counts, TypeError for dtypes, RuntimeError for devices.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "common/op_handle.h"
#include "rnn/cells/cell.h"
#include "rnn/step/cell_step.h"

namespace weft::rnn {

// The arguments of the forward op. It refers to the caller's tensors: for the length of a call.
struct RnnCellArgs {
  const at::Tensor& input;
  const at::Tensor& h;
  const std::optional<at::Tensor>& c;
  const at::Tensor& w_ih;
  const at::Tensor& w_hh;
  const std::optional<at::Tensor>& b_ih;
  const std::optional<at::Tensor>& b_hh;
  Cell cell;
  int64_t heads = 1;

  int64_t B() const { return input.size(0); }
  int64_t I() const { return input.size(1); }
  int64_t H() const { return h.size(1); }
  bool has_work() const { return B() > 0 && I() > 0 && H() > 0; }
};

// The gradients that arrive at the backward op, and what the forward op left.
struct RnnCellGrads {
  const std::optional<at::Tensor>& h_next;
  const std::optional<at::Tensor>& c_next;
};
struct RnnCellSaved {
  const at::Tensor& h_next;
  const at::Tensor& c_next;
  const at::Tensor& gates;
};

struct RnnCellResults {
  at::Tensor h_next, c_next, gates;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> tuple() const { return {h_next, c_next, gates}; }
};

// Whether each gradient is asked for.
using RnnCellMask = std::array<bool, 7>;

// Every argument: number, rank, sizes, dtype, device.
void check_rnn_cell(const char* op, const RnnCellArgs& args);
void check_rnn_cell_saved(const char* op, const RnnCellArgs& args, const RnnCellGrads& grads,
                          const RnnCellSaved& saved);

// dgates, the gradients of what enters the nonlinearities, (B,G*H): on the input's side and on the recurrent side,
// which differ for a gru alone and are else one tensor; what reaches h past the weights (gru), and c (lstm), else
// undefined; the gradients of the biases where a kernel has summed them.
struct RnnCellSteps {
  at::Tensor in, rec, h, c, b_ih, b_hh;
};

// All gradients from dgates, by torch's products.
std::vector<at::Tensor> rnn_cell_products(const RnnCellArgs& args, const RnnCellSteps& steps, const RnnCellMask& mask);

// x (B, K) times the transposed w (N, K): (B, N), contiguous.
using RnnCellProduct = at::Tensor (*)(const at::Tensor& x, const at::Tensor& w);

// A forward call: its results, not yet computed, and what a kernel takes, with the tensors that it points to. Where B
// is above `few` the products are there.
struct RnnCellForward {
  RnnCellResults results;
  CellElement element;
  CellForwardArgs args;
  std::array<at::Tensor, 9> held;
};
RnnCellForward prepare_rnn_cell(const RnnCellArgs& args, bool save, int64_t few, RnnCellProduct product);

// A backward call likewise: a kernel computes dgates, from which `gradients` makes the results by torch's products.
// sum_bias: the kernel sums dgates for the biases, too.
class RnnCellBackward {
 public:
  RnnCellBackward(const RnnCellArgs& args, const RnnCellGrads& grads, const RnnCellSaved& saved,
                  const RnnCellMask& mask, bool sum_bias);
  const CellBackwardArgs& kernel_args() const { return kernel_; }
  CellElement element() const { return element_; }
  std::vector<at::Tensor> gradients() const { return rnn_cell_products(args_, steps_, mask_); }

 private:
  const RnnCellArgs& args_;
  RnnCellMask mask_;
  RnnCellSteps steps_;
  CellElement element_;
  CellBackwardArgs kernel_;
  std::array<at::Tensor, 7> held_;
};

inline const OpHandle<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, c10::string_view, bool, int64_t)>
    rnn_cell_op("weft::rnn_cell");
inline const OpHandle<std::vector<at::Tensor>(const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                                              const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                              const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                              const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                                              const at::Tensor&, c10::string_view, RnnCellMask, int64_t)>
    rnn_cell_backward_op("weft::rnn_cell_backward");

}  // namespace weft::rnn
