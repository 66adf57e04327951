// weft::rnn_cell on CUDA: of few sequences one kernel, of many cuBLAS and a kernel for the gates.
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "common/cuda/tf32.h"
#include "rnn/persistent/cuda/multiply.h"
#include "rnn/rnn.h"
#include "rnn/step/cuda/cell_step.h"
#include "rnn/step/rnn_cell.h"
#include "rnn/step/rnn_cell_reference.h"

namespace weft::rnn {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// In float32 with TF32 where torch's own product would take it.
Tensor product(const Tensor& x, const Tensor& w) {
  if (x.scalar_type() == at::kDouble) return at::mm(x, w.t());
  const auto type = x.scalar_type() == at::kHalf        ? RecurrenceType::kHalf
                    : x.scalar_type() == at::kBFloat16  ? RecurrenceType::kBFloat16
                    : takes_tf32(at::Float32Op::MATMUL) ? RecurrenceType::kTF32
                                                        : RecurrenceType::kFloat;
  const Tensor right = w.contiguous();
  const int64_t B = x.size(0), K = x.size(1), N = w.size(0);
  Tensor out = at::empty({B, N}, x.options());
  multiply(type, B, N, K, {x.const_data_ptr(), K}, {right.const_data_ptr(), K, true}, out.mutable_data_ptr(), N, false);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> rnn_cell_cuda(const Tensor& input, const Tensor& h, const OptionalTensor& c,
                                                 const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                                                 const OptionalTensor& b_hh, c10::string_view cell, bool save,
                                                 int64_t heads) {
  const char* op = "weft::rnn_cell";
  const RnnCellArgs args{input, h, c, w_ih, w_hh, b_ih, b_hh, parse_cell(op, cell), heads};
  check_rnn_cell(op, args);
  const c10::cuda::CUDAGuard guard(input.device());
  if (!args.has_work()) return rnn_cell_reference(args, save).tuple();
  const int64_t few = few_sequences(w_ih.numel() + w_hh.numel());
  const RnnCellForward f = prepare_rnn_cell(args, save, few, product);
  cell_step_forward(f.element, f.args, c10::cuda::getCurrentCUDAStream());
  return f.results.tuple();
}

std::vector<Tensor> rnn_cell_backward_cuda(const OptionalTensor& grad_h_next, const OptionalTensor& grad_c_next,
                                           const Tensor& input, const Tensor& h, const OptionalTensor& c,
                                           const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                                           const OptionalTensor& b_hh, const Tensor& h_next, const Tensor& c_next,
                                           const Tensor& gates, c10::string_view cell, RnnCellMask mask,
                                           int64_t heads) {
  const char* op = "weft::rnn_cell_backward";
  const RnnCellArgs args{input, h, c, w_ih, w_hh, b_ih, b_hh, parse_cell(op, cell), heads};
  const RnnCellGrads grads{grad_h_next, grad_c_next};
  const RnnCellSaved saved{h_next, c_next, gates};
  check_rnn_cell(op, args);
  check_rnn_cell_saved(op, args, grads, saved);
  const c10::cuda::CUDAGuard guard(input.device());
  if (!args.has_work()) return rnn_cell_backward_reference(grads, args, mask);
  const RnnCellBackward b(args, grads, saved, mask, /*sum_bias=*/args.B() <= kSummedSequences);
  cell_step_backward(b.element(), b.kernel_args(), c10::cuda::getCurrentCUDAStream());
  return b.gradients();
}

TORCH_LIBRARY_IMPL(weft, CUDA, m) {
  m.impl("rnn_cell", &rnn_cell_cuda);
  m.impl("rnn_cell_backward", &rnn_cell_backward_cuda);
}

}  // namespace
}  // namespace weft::rnn
