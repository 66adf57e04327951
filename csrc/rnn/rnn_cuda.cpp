// weft::rnn on CUDA.
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "rnn/rnn.h"
#include "rnn/rnn_reference.h"
#include "scan/scan_rnn.h"

namespace weft {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rnn_cuda(const Tensor& input, const OptionalTensor& h0,
                                                            const OptionalTensor& c0, at::TensorList weights,
                                                            const OptionalTensor& batch_sizes,
                                                            c10::string_view cell_name, bool bidirectional,
                                                            bool keep_cells, bool save) {
  const char* op = "weft::rnn";
  const RnnArgs args{input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional};
  const RnnSizes sizes = check_rnn(op, args);
  const c10::cuda::CUDAGuard guard(input.device());
  return rnn_reference(args, sizes, keep_cells, save).tuple();
}

std::vector<Tensor> rnn_backward_cuda(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                      const OptionalTensor& grad_c_n, const OptionalTensor& grad_cells,
                                      const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
                                      at::TensorList weights, const OptionalTensor& batch_sizes, const Tensor& output,
                                      const Tensor& cells, const Tensor& gates, c10::string_view cell_name,
                                      bool bidirectional, c10::List<bool> output_mask) {
  const char* op = "weft::rnn_backward";
  const RnnArgs args{input, h0, c0, weights, batch_sizes, parse_cell(op, cell_name), bidirectional};
  const RnnGrads grads{grad_output, grad_h_n, grad_c_n, grad_cells};
  const RnnSizes sizes = check_rnn(op, args);
  const c10::cuda::CUDAGuard guard(input.device());
  check_rnn_saved(op, args, sizes, grads, output, cells, gates, output_mask);
  return rnn_backward_reference(grads, args, sizes, output_mask);
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("rnn", &rnn_cuda);
  m.impl("rnn_backward", &rnn_backward_cuda);
}

}  // namespace
}  // namespace weft
