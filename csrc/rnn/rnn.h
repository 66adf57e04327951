// weft::rnn: one layer of a tanh RNN, ReLU RNN, GRU, LSTM or sLSTM over all its time steps, in one or two directions,
// padded or packed, of one head or several; its backward pass step by step or, with backward="scan", as a linear scan.
//
//   rnn    h[t] = f(W_ih x[t] + b_ih + W_hh h[t-1] + b_hh)                         f = tanh or relu
//   gru    r = s(..), z = s(..), m = W_hn h[t-1] + b_hn, n = tanh(W_in x[t] + b_in + r m),  h[t] = n + z (h[t-1] - n)
//   lstm   i = s(..), f = s(..), g = tanh(..), o = s(..),  c[t] = f c[t-1] + i g,  h[t] = o tanh(c[t])
//   slstm  see cells/slstm.h: states h, c, n, m; slstm_exp has the exponential forget gate
//
// The states beside h are called c: S of them, 1 of an lstm, 3 of an slstm, lie side by side.
//
// T steps, B sequences, I inputs, H hidden units, G = 1, 1, 3, 4, 4 gate blocks for rnn_tanh, rnn_relu, gru, lstm,
// slstm, in torch's order (gru: r, z, n; lstm: i, f, g, o; slstm: i, f, z, o); heads of P = H / num_heads units, each
// with recurrent weights of its own; D = 2 directions if bidirectional, else 1; R rows of input: T*B,
// packed N = sum of batch_sizes. Any of T, B, I, H may be 0; T = 0 gives h_n = h0.
//
// rnn(input (T,B,I) or packed (N,I), h0 (D,B,H) | None, c0 (D,B,H) | None, weights, batch_sizes (T) | None;
//     cell, bidirectional, keep_cells, save, backward, num_heads)
//   h0, c0       None for zeros; c0 (D,B,S*H) for an lstm or slstm, and there exactly where h0 is given
//   weights      for each direction w_ih (G*H,I), w_hh (G*H,P), rows of head h after each other within a gate, and, in
//   both directions or in none,
//                b_ih (G*H), b_hh (G*H)
//   batch_sizes  packed: sequences running at each step, int64 on the CPU, each at least 1, none above the one before,
//                their sum N. B is the first. Step t has the rows after those of the steps before it; sequence b is row
//                b of every step that it runs in, so that sequences are ordered from the longest to the shortest.
//   output (T,B,D*H) or (N,D*H)  h at every step; direction d in columns [d*H, (d+1)*H). Direction 1 runs from each
//                                sequence's own last step to its first; its h at step t stays at step t.
//   h_n    (D,B,H)  the state after the last step that each sequence takes: its own last one, in direction 1 step 0
//   c_n    (D,B,S*H)  lstm, slstm; else (0)
//   cells  like output, with K*H columns for each direction: lstm (K = 1) and slstm (K = 2, c and n) with save or
//          keep_cells: the state at every step, rounded to the saved dtype; else (0)
//   gates  (D,R,4*H)  with save: gru r, z, n, m with m = W_hn h + b_hn; lstm i, f, g, o; slstm see there; after their
//                     nonlinearity, rounded to the saved dtype. Without save, and for the rnns: (0)
//   save is switched on by the autograd kernel where a gradient is needed. output, h_n, c_n and cells are
//   differentiable, gates is not.
//
// rnn_backward(grad_output, grad_h_n, grad_c_n, grad_cells: each like its result | None, the five tensor arguments
//              above, output, cells, gates; cell, bidirectional, output_mask, backward and num_heads: the forward
//              pass's)
//   one gradient for each of input, h0, c0, *weights, in this order, which is that of output_mask; (0) where masked out
//   or where the argument is None. A gradient that is not asked for costs no matrix product. None means zeros.
//   It is differentiable to any order, step by step through rnn_reference.h, in everything but output, cells and gates,
//   which it takes for the functions of the other arguments that they are.
//
// backward
//   "persistent"  step by step, with the weights on the chip. The saved dtype is input's.
//   "scan"        a parallel scan over transposed Jacobians (BPPSA, MLSys 2020, section 3), in the accumulate type and
//                 never in TF32, for long sequences, small batches and few hidden units. The saved dtype is the
//                 accumulate type: the chunks' products of Jacobians multiply what rounding leaves in them. It has
//                 kernels on CUDA for padded input and H up to 128, an lstm's up to 64, in float64 up to 32; none
//                 for an slstm or several heads. Elsewhere,
//                 and where cells have a gradient, it is "persistent" in the accumulate type.
//   "newton"      the backward pass of "scan"; the forward pass in chunks of time that are walked at once and again
//                 until their seams meet, see newton/chunks.h. Each step satisfies the recurrence from the step before
//                 it to 2^-20 max(1, |h|), in float64 to 2^-48. It has kernels for padded input, on CUDA where a warp
//                 holds the layer; elsewhere it is "scan". An open weft.scan.newton_report is told of it.
//   The forward pass is chosen apart from it: on CUDA, with "scan", one warp per sequence for H <= 32, beyond the
//   persistent kernel in the accumulate type, else torch's (cuDNN), from whose output gates and cells are recovered;
//   cuDNN's first for an lstm in one direction.
//
// Dtypes: float16, bfloat16, float32, float64, one for all arguments but batch_sizes. float16 and bfloat16 accumulate,
// carry the state and compute the gates in float32 (the accumulate type), and round where a result is written.
// Aliasing: no result shares memory with an argument or with another result. Results are contiguous.
// Determinism: two runs give the same bits.
// NaN and inf in one sequence of the batch stay in that sequence's rows (and reach the sums over the batch, i.e. the
// gradients of weights and biases).
// Errors: ValueError for shapes, names and counts, TypeError for dtypes, RuntimeError for devices and for batch_sizes.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/op_handle.h"
#include "rnn/cells/cells.h"

namespace weft::rnn {

// ValueError that names the op and lists the known cells, for any other name.
Cell parse_cell(const char* op, c10::string_view name);

// The names of the cells that have a state c, for messages.
std::string cells_with_c();

// What users call the layer of a cell: weft.nn.RNN, ...
std::string layer_of(Cell cell);

// How the backward pass runs.
enum class Backward { kPersistent, kScan, kNewton };
Backward parse_backward(const char* op, c10::string_view name);  // ValueError likewise

// float32 for float16, bfloat16 and float32; float64 for float64.
at::ScalarType accumulate_type(at::ScalarType type);

// The arguments of the forward op. It refers to the caller's tensors: for the length of a call.
struct RnnArgs {
  const at::Tensor& input;
  const std::optional<at::Tensor>& h0;
  const std::optional<at::Tensor>& c0;
  at::TensorList weights;
  const std::optional<at::Tensor>& batch_sizes;
  Cell cell;
  bool bidirectional;
  Backward backward = Backward::kPersistent;
  int64_t heads = 1;

  // Of cells and gates.
  at::ScalarType saved_type() const {
    const auto type = input.scalar_type();
    return backward == Backward::kPersistent ? type : accumulate_type(type);
  }
};

// The gradients that arrive at the backward op, likewise.
struct RnnGrads {
  const std::optional<at::Tensor>& output;
  const std::optional<at::Tensor>& h_n;
  const std::optional<at::Tensor>& c_n;
  const std::optional<at::Tensor>& cells;
};

struct RnnSizes {
  int64_t T, B, I, H;
  int64_t R;         // rows: T*B, packed N
  int D, G;          // directions, gate blocks
  int64_t heads, P;  // H = heads * P
  int S, K;          // other states, and those of them that `cells` holds
  bool packed, bias;
};

// Every argument of the forward op: number, rank, sizes, dtype, device, and the values of batch_sizes.
RnnSizes check_rnn(const char* op, const RnnArgs& args);

// What the backward op takes besides.
void check_rnn_saved(const char* op, const RnnArgs& args, const RnnSizes& sizes, const RnnGrads& grads,
                     const at::Tensor& output, const at::Tensor& cells, const at::Tensor& gates,
                     const c10::List<bool>& output_mask);

// The weights of one direction; the biases are undefined where there are none.
struct RnnWeights {
  at::Tensor w_ih, w_hh, b_ih, b_hh;
};
RnnWeights rnn_weights(const RnnArgs& args, const RnnSizes& sizes, int direction);

// Where w_ih of a direction stands in output_mask and among the gradients; w_hh, b_ih and b_hh follow it.
inline int rnn_first_weight(const RnnSizes& sizes, int direction) {
  return 3 + direction * (sizes.bias ? 4 : 2);
}

// Where the steps lie among the rows of input, output, cells and gates; for padded input, too.
struct RnnSteps {
  std::vector<int64_t> offsets;  // (T+1): step t has the rows [offsets[t], offsets[t+1]), one for each running sequence
  std::vector<int64_t> lengths;  // (B), descending: the steps of each sequence
};
RnnSteps rnn_steps(const RnnArgs& args, const RnnSizes& sizes);

// Calls f(row, before, sequence) for every row, where `before` is the row of the step that the direction takes before
// this one, -1 at the sequence's first.
template <typename F>
void for_each_row(const RnnSizes& sizes, const RnnSteps& steps, int direction, const F& f) {
  for (int64_t t = 0; t < sizes.T; ++t) {
    const int64_t count = steps.offsets[t + 1] - steps.offsets[t], t_before = direction == 0 ? t - 1 : t + 1;
    const bool inside = t_before >= 0 && t_before < sizes.T;
    const int64_t running = inside ? steps.offsets[t_before + 1] - steps.offsets[t_before] : 0;
    for (int64_t b = 0; b < count; ++b) {
      f(steps.offsets[t] + b, b < running ? steps.offsets[t_before] + b : -1, b);
    }
  }
}

// The results of a forward.
struct RnnResults {
  at::Tensor output, h_n, c_n, cells, gates;
  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> tuple() const {
    return {output, h_n, c_n, cells, gates};
  }
};

// Uninitialised: output, h_n and c_n in `type`, cells and gates in `saved`; those that are not asked for are (0).
RnnResults allocate_rnn(const RnnArgs& args, const RnnSizes& sizes, bool keep_cells, bool save, at::ScalarType type,
                        at::ScalarType saved);

inline const OpHandle<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(
    const at::Tensor&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, at::TensorList,
    const std::optional<at::Tensor>&, c10::string_view, bool, bool, bool, c10::string_view, int64_t)>
    rnn_op("weft::rnn");
inline const OpHandle<std::vector<at::Tensor>(
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const at::Tensor&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, at::TensorList, const std::optional<at::Tensor>&, const at::Tensor&,
    const at::Tensor&, const at::Tensor&, c10::string_view, bool, c10::List<bool>, c10::string_view, int64_t)>
    rnn_backward_op("weft::rnn_backward");

}  // namespace weft::rnn
