#include "rnn/slice/rnn_slice_maps.h"

#include <ATen/ops/empty.h>

#include "common/check.h"
#include "rnn/scan/limits.h"
#include "scan/slices/slice_args.h"

namespace weft::rnn {
namespace {

const std::optional<at::Tensor> kNoSizes;

// As the other ops of rnn take them, with the state as an optional.
struct CheckedSlice {
  std::optional<at::Tensor> h0;
  RnnArgs args;
  RnnSizes sizes;

  CheckedSlice(const char* op, const RnnSlice& slice, c10::string_view cell, const RnnGrads& grads,
               const c10::List<bool>& output_mask)
      : h0(slice.h0),
        args{slice.input,
             h0,
             slice.c0,
             slice.weights,
             kNoSizes,
             parse_cell(op, cell),
             /*bidirectional=*/false,
             Backward::kScan},
        sizes(check_rnn(op, args)) {
    TORCH_CHECK_VALUE(scan_max_hidden(args.cell) > 0, op, ": the chain of a ", cell, " is none of matrices");
    TORCH_CHECK_TYPE(slice.input.scalar_type() == at::kFloat, op, ": input must be float32, got ",
                     slice.input.scalar_type());
    check_rnn_saved(op, args, sizes, grads, slice.output, slice.cells, slice.gates, output_mask);
    TORCH_CHECK_VALUE(sizes.T >= 1, op, ": input must have at least one step");
    TORCH_CHECK_VALUE(1 <= slice.chunks && slice.chunks <= sizes.T, op, ": chunks must be 1 to ", sizes.T, ", got ",
                      slice.chunks);
  }
};

c10::List<bool> nothing_of(const RnnSlice& slice) {
  c10::List<bool> mask;
  for (size_t i = 0; i < 3 + slice.weights.size(); ++i) mask.push_back(false);
  return mask;
}

}  // namespace

RnnMaps rnn_slice_maps(const RnnHalves& halves, const RnnSlice& slice, c10::string_view cell) {
  const std::optional<at::Tensor> none;
  const CheckedSlice checked("rnn_slice_maps", slice, cell, {slice.grad_output, none, none, none}, nothing_of(slice));
  const RnnSizes& s = checked.sizes;
  const int64_t states = states_of(checked.args.cell) * s.H;
  const auto options = slice.input.options();
  const at::Tensor maps = at::empty({slice.chunks, s.B, halves.map_floats(checked.args.cell, s.H)}, options),
                   value = at::empty({s.B, states}, options),
                   message = at::empty({scan::slice_message_numbers(s.B * states * states, s.B * states)},
                                       options.dtype(at::kInt));
  if (s.B > 0 && s.H > 0) {
    halves.maps(slice, checked.args, s, maps, value, message);
  } else {
    message.fill_(1);
  }
  return {maps, value, message};
}

std::vector<at::Tensor> rnn_slice_backward(const RnnHalves& halves, const at::Tensor& maps, const RnnSlice& slice,
                                           const at::Tensor& grad_h_n, const std::optional<at::Tensor>& grad_c_n,
                                           c10::string_view cell, const c10::List<bool>& output_mask) {
  const char* const op = "rnn_slice_backward";
  const std::optional<at::Tensor> none, given(grad_h_n);
  const RnnGrads grads{slice.grad_output, given, grad_c_n, none};
  const CheckedSlice checked(op, slice, cell, grads, output_mask);
  const int64_t wanted[] = {slice.chunks, checked.sizes.B, halves.map_floats(checked.args.cell, checked.sizes.H)};
  check_like(op, "maps", maps, "input", slice.input);
  check_shape(op, "maps", maps, wanted, "(chunks, B, floats)");
  TORCH_CHECK_VALUE(maps.is_contiguous(), op, ": maps must be contiguous");
  return halves.backward(slice, grads, checked.args, checked.sizes, output_mask, maps);
}

}  // namespace weft::rnn
