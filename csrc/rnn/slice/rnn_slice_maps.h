// The backward pass of a slice of a tanh or ReLU RNN, a GRU or an LSTM whose whole lies on many ranks, in two halves
// with the exchange between them, so that no pass over the steps is added: the chain of Jacobians is linear, whatever
// the net is forward.
//
// rnn_slice_maps(grad_output, input, h0, c0, weights, output, cells, gates, chunks, *, cell) -> (maps, value, message)
//   the arguments of rnn_backward for one direction of float32 and backward="scan", T at least 1; on CUDA H up to 32
//   chunks   of time, 1 to T
//   value    (B, S H), h before c: the gradient of the state that enters the slice, where the one that leaves has none
//   message  (B S H S H + B S H + 1), int32: as slice_message packs it the product (B, S H, S H) that takes a gradient
//   of
//            the state that leaves to the one that enters, the bits of value, and 1
//   maps     what rnn_slice_backward goes by: on CUDA (chunks, B, slice_map_floats(cell, H)), on the CPU (chunks, B, 0)
// rnn_slice_backward(maps, grad_output, grad_h_n, grad_c_n, the others, chunks, *, cell, output_mask) -> Tensor[]
//   what rnn_backward returns, where the state that leaves has the gradient grad_h_n (1, B, H) and grad_c_n
//
// Deterministic; batch rows are independent, but in the gradients of the weights. No autograd of their own: what calls
// them, python/weft/_distributed/recurrent.py, has it.
// Source: BPPSA (Wang, Bai, Pekhimenko, MLSys 2020), section 3, cut by devices.
#pragma once
#include "rnn/rnn.h"

namespace weft::rnn {

// The arguments that both share.
struct RnnSlice {
  const std::optional<at::Tensor>& grad_output;
  const at::Tensor& input;
  const at::Tensor& h0;
  const std::optional<at::Tensor>& c0;
  at::TensorList weights;
  const at::Tensor& output;
  const at::Tensor& cells;
  const at::Tensor& gates;
  int64_t chunks;
};

// What a device runs, of checked arguments without a size of 0.
struct RnnHalves {
  int64_t (*map_floats)(Cell cell, int64_t H);
  void (*maps)(const RnnSlice& slice, const RnnArgs& args, const RnnSizes& sizes, const at::Tensor& maps,
               const at::Tensor& value, const at::Tensor& message);
  std::vector<at::Tensor> (*backward)(const RnnSlice& slice, const RnnGrads& grads, const RnnArgs& args,
                                      const RnnSizes& sizes, const c10::List<bool>& output_mask,
                                      const at::Tensor& maps);
};

using RnnMaps = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
RnnMaps rnn_slice_maps(const RnnHalves& halves, const RnnSlice& slice, c10::string_view cell);
std::vector<at::Tensor> rnn_slice_backward(const RnnHalves& halves, const at::Tensor& maps, const RnnSlice& slice,
                                           const at::Tensor& grad_h_n, const std::optional<at::Tensor>& grad_c_n,
                                           c10::string_view cell, const c10::List<bool>& output_mask);

// Registers both for a device.
template <const RnnHalves& halves, typename Library>
void register_rnn_slice(Library& m) {
  m.impl("rnn_slice_maps",
         [](const std::optional<at::Tensor>& grad_output, const at::Tensor& input, const at::Tensor& h0,
            const std::optional<at::Tensor>& c0, at::TensorList weights, const at::Tensor& output,
            const at::Tensor& cells, const at::Tensor& gates, int64_t chunks, c10::string_view cell) {
           return rnn_slice_maps(halves, {grad_output, input, h0, c0, weights, output, cells, gates, chunks}, cell);
         });
  m.impl(
      "rnn_slice_backward",
      [](const at::Tensor& maps, const std::optional<at::Tensor>& grad_output, const at::Tensor& grad_h_n,
         const std::optional<at::Tensor>& grad_c_n, const at::Tensor& input, const at::Tensor& h0,
         const std::optional<at::Tensor>& c0, at::TensorList weights, const at::Tensor& output, const at::Tensor& cells,
         const at::Tensor& gates, int64_t chunks, c10::string_view cell, c10::List<bool> output_mask) {
        return rnn_slice_backward(halves, maps, {grad_output, input, h0, c0, weights, output, cells, gates, chunks},
                                  grad_h_n, grad_c_n, cell, output_mask);
      });
}

}  // namespace weft::rnn
