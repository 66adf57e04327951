// weft::rnn_cell on the CPU: who takes which hidden units. The arithmetic is in rnn_cell_kernels-inl.h.
#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "rnn/rnn.h"
#include "rnn/step/cpu/rnn_cell_kernels.h"
#include "rnn/step/rnn_cell.h"
#include "rnn/step/rnn_cell_reference.h"

namespace weft::rnn {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Up to so many sequences the products are dot products: their weights are read once for four of them.
constexpr int64_t kFewSequences = 4;
// Multiply-adds, and elements, that are worth a thread.
constexpr int64_t kThreadProducts = 1 << 17, kThreadElements = 1 << 14;

// Calls run(j0, j1) for all H hidden units, each of which is so much work, in pieces that are worth a thread.
template <typename F>
void for_each_units(CellElement element, int64_t H, int64_t work, int64_t least, const F& run) {
  const int64_t lanes = cpu::rnn_cell_kernels().lanes(element), blocks = (H + lanes - 1) / lanes;
  const int64_t grain = std::max<int64_t>(1, least / (work * lanes));
  const auto some = [&](int64_t begin, int64_t end) { run(begin * lanes, std::min(H, end * lanes)); };
  if (grain >= blocks) return some(0, blocks);
  at::parallel_for(0, blocks, grain, some);
}

Tensor product(const Tensor& x, const Tensor& w) {
  return at::mm(x, w.t()).to(accumulate_type(x.scalar_type()));
}

std::tuple<Tensor, Tensor, Tensor> rnn_cell_cpu(const Tensor& input, const Tensor& h, const OptionalTensor& c,
                                                const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                                                const OptionalTensor& b_hh, c10::string_view cell, bool save,
                                                int64_t heads) {
  const char* op = "weft::rnn_cell";
  const RnnCellArgs args{input, h, c, w_ih, w_hh, b_ih, b_hh, parse_cell(op, cell), heads};
  check_rnn_cell(op, args);
  if (!args.has_work()) return rnn_cell_reference(args, save).tuple();
  const RnnCellForward f = prepare_rnn_cell(args, save, kFewSequences, product);
  const int64_t G = gate_blocks(args.cell);
  const bool few = f.args.in == nullptr;
  // A vector of units lies within a head.
  const int64_t lanes = cpu::rnn_cell_kernels().lanes(f.element), padded = (f.args.P + lanes - 1) / lanes * lanes,
                units = heads == 1 ? args.H() : heads * padded;
  for_each_units(f.element, units, G * (few ? args.I() + f.args.P : args.B()), few ? kThreadProducts : kThreadElements,
                 [&](int64_t j0, int64_t j1) { cpu::rnn_cell_kernels().forward(f.element, f.args, j0, j1); });
  return f.results.tuple();
}

std::vector<Tensor> rnn_cell_backward_cpu(const OptionalTensor& grad_h_next, const OptionalTensor& grad_c_next,
                                          const Tensor& input, const Tensor& h, const OptionalTensor& c,
                                          const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                                          const OptionalTensor& b_hh, const Tensor& h_next, const Tensor& c_next,
                                          const Tensor& gates, c10::string_view cell, RnnCellMask mask, int64_t heads) {
  const char* op = "weft::rnn_cell_backward";
  const RnnCellArgs args{input, h, c, w_ih, w_hh, b_ih, b_hh, parse_cell(op, cell), heads};
  const RnnCellGrads grads{grad_h_next, grad_c_next};
  const RnnCellSaved saved{h_next, c_next, gates};
  check_rnn_cell(op, args);
  check_rnn_cell_saved(op, args, grads, saved);
  if (!args.has_work()) return rnn_cell_backward_reference(grads, args, mask);
  const RnnCellBackward b(args, grads, saved, mask, /*sum_bias=*/false);
  for_each_units(
      b.element(), args.H(), gate_blocks(args.cell) * args.B(), kThreadElements,
      [&](int64_t j0, int64_t j1) { cpu::rnn_cell_kernels().backward(b.element(), b.kernel_args(), j0, j1); });
  return b.gradients();
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("rnn_cell", &rnn_cell_cpu);
  m.impl("rnn_cell_backward", &rnn_cell_backward_cpu);
}

}  // namespace
}  // namespace weft::rnn
