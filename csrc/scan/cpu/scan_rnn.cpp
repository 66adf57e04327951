// weft::scan_rnn on the CPU, which has few cores to fill: weft::rnn, step by step in time, in the accumulate type.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "rnn/rnn_op.h"
#include "scan/scan_rnn.h"

namespace weft {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The operands as weft::rnn takes them: in the accumulate type, and time in the order in which it runs.
struct Operands {
  at::ScalarType type;
  bool reverse;

  Tensor steps(const Tensor& t) const {
    const Tensor wide = t.to(type);
    return reverse ? wide.flip(0) : wide;
  }
  OptionalTensor steps(const OptionalTensor& t) const { return t ? OptionalTensor(steps(*t)) : std::nullopt; }
  OptionalTensor state(const OptionalTensor& t) const { return t ? OptionalTensor(t->to(type)) : std::nullopt; }
  std::vector<Tensor> weights(const Tensor& w_ih, const Tensor& w_hh, const OptionalTensor& b_ih,
                              const OptionalTensor& b_hh) const {
    std::vector<Tensor> all = {w_ih.to(type), w_hh.to(type)};
    if (b_ih) all.insert(all.end(), {b_ih->to(type), b_hh->to(type)});
    return all;
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> scan_rnn_cpu(const Tensor& input, const Tensor& h0,
                                                                const OptionalTensor& c0, const Tensor& w_ih,
                                                                const Tensor& w_hh, const OptionalTensor& b_ih,
                                                                const OptionalTensor& b_hh, c10::string_view cell_name,
                                                                bool reverse, bool save) {
  const char* op = "weft::scan_rnn";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = input.scalar_type();
  const Operands as{accumulate_type(type), reverse};
  auto [output, h_n, c_n, cells, gates] =
      rnn_op().call(as.steps(input), as.state(h0), as.state(c0), as.weights(w_ih, w_hh, b_ih, b_hh), std::nullopt,
                    cell_name, /*bidirectional=*/false, /*keep_cells=*/false, save);
  const bool lstm = cell == Cell::kLstm;
  if (save && has_gates(cell)) gates = as.steps(gates.view({s.T, s.B, 4 * s.H}));
  if (save && lstm) cells = as.steps(cells);
  return {as.steps(output).to(type), h_n.to(type), c_n.to(type), gates, cells};
}

ScanRnnGrads scan_rnn_backward_cpu(const OptionalTensor& grad_output, const OptionalTensor& grad_h_n,
                                   const OptionalTensor& grad_c_n, const Tensor& input, const Tensor& h0,
                                   const OptionalTensor& c0, const Tensor& w_ih, const Tensor& w_hh,
                                   const OptionalTensor& b_ih, const OptionalTensor& b_hh, const Tensor& output,
                                   const Tensor& gates, const Tensor& cells, c10::string_view cell_name, bool reverse,
                                   std::array<bool, 7> mask) {
  const char* op = "weft::scan_rnn_backward";
  const Cell cell = parse_cell(op, cell_name);
  const auto s = check_scan_rnn(op, cell, input, h0, c0, w_ih, w_hh, b_ih, b_hh);
  check_scan_rnn_saved(op, cell, s, input, grad_output, grad_h_n, grad_c_n, output, gates, cells);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = input.scalar_type();
  const Operands as{accumulate_type(type), reverse};
  const Tensor rows = has_gates(cell) ? as.steps(gates).reshape({1, s.T * s.B, 4 * s.H}) : gates;
  c10::List<bool> wanted;
  for (size_t i = 0; i < (b_ih ? 7 : 5); ++i) wanted.push_back(mask[i]);
  const std::vector<Tensor> found = rnn_backward_op().call(
      as.steps(grad_output), as.state(grad_h_n), as.state(grad_c_n), std::nullopt, as.steps(input), as.state(h0),
      as.state(c0), as.weights(w_ih, w_hh, b_ih, b_hh), std::nullopt, as.steps(output),
      cell == Cell::kLstm ? as.steps(cells) : cells, rows, cell_name, /*bidirectional=*/false, wanted);
  const auto result = [&](size_t index) {
    if (!mask[index] || index >= found.size()) return Tensor();
    const Tensor& grad = found[index];
    return (index == 0 ? as.steps(grad) : grad).to(type);
  };
  return without_undefined({result(0), result(1), result(2), result(3), result(4), result(5), result(6)}, input);
}

TORCH_LIBRARY_IMPL(weft, CPU, m) {
  m.impl("scan_rnn", &scan_rnn_cpu);
  m.impl("scan_rnn_backward", &scan_rnn_backward_cpu);
}

}  // namespace
}  // namespace weft
