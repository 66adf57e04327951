// The halves of a slice's backward pass on the CPU, where the chain is sequential in time: the first goes back for the
// gradient of the state, and once more for every column of the product; the second is rnn_backward.
#include "rnn/slice/rnn_slice_maps.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "scan/slices/slice_args.h"

namespace weft::rnn {
namespace {

std::vector<at::Tensor> go_back(const RnnSlice& slice, const RnnGrads& grads, const RnnArgs& args,
                                const c10::List<bool>& output_mask) {
  return rnn_backward_op(grads.output, grads.h_n, grads.c_n, std::nullopt, slice.input, args.h0, slice.c0,
                         slice.weights, std::nullopt, slice.output, slice.cells, slice.gates,
                         kCells[int(args.cell)].name, false, output_mask, "scan", 1);
}

// (B, S H), of the state that enters.
at::Tensor of_states(const RnnSlice& slice, const RnnGrads& grads, const RnnArgs& args) {
  const bool with_c = has_c(args.cell);
  c10::List<bool> mask;
  for (size_t i = 0; i < 3 + slice.weights.size(); ++i) mask.push_back(i == 1 || (i == 2 && with_c));
  const auto found = go_back(slice, grads, args, mask);
  return with_c ? at::cat({found[1], found[2]}, 2).squeeze(0) : found[1].squeeze(0);
}

void rnn_maps_on_cpu(const RnnSlice& slice, const RnnArgs& args, const RnnSizes& s, const at::Tensor&,
                     const at::Tensor& value, const at::Tensor& message) {
  const std::optional<at::Tensor> none;
  value.copy_(of_states(slice, {slice.grad_output, none, none, none}, args));
  const int64_t states = value.size(1), numbers = s.B * states * states;
  int32_t* const out = message.mutable_data_ptr<int32_t>();
  for (int64_t j = 0; j < states; ++j) {
    std::optional<at::Tensor> h = at::zeros({1, s.B, s.H}, value.options()), c;
    if (has_c(args.cell)) c = at::zeros_like(*h);
    (j < s.H ? h : c)->select(2, j % s.H).fill_(1);
    const at::Tensor column = of_states(slice, {none, h, c, none}, args).contiguous();
    const float* const from = column.const_data_ptr<float>();
    for (int64_t i = 0; i < s.B * states; ++i) {
      out[i * states + j] = scan::pack_product<float>(scan::Scaled{double(from[i]), 0});
    }
  }
  message.narrow(0, numbers, value.numel()).copy_(value.view(at::kInt).view(-1));
  message.select(0, -1).fill_(1);
}

std::vector<at::Tensor> rnn_slice_back_on_cpu(const RnnSlice& slice, const RnnGrads& grads, const RnnArgs& args,
                                              const RnnSizes&, const c10::List<bool>& output_mask, const at::Tensor&) {
  return go_back(slice, grads, args, output_mask);
}

constexpr RnnHalves kRnnHalves{[](Cell, int64_t) { return int64_t(0); }, rnn_maps_on_cpu, rnn_slice_back_on_cpu};

}  // namespace

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  register_rnn_slice<kRnnHalves>(m);
}

}  // namespace weft::rnn
