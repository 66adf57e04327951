#include "scan/cell/scan_cell.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <limits>

namespace weft::scan::cell {
namespace {

constexpr const char* kOp = "scan_cell";

using Weights = c10::List<std::optional<at::Tensor>>;
using Step = std::tuple<at::Tensor, at::Tensor>;

void check_count(const Weights& weights, size_t count, std::string_view cell) {
  TORCH_CHECK_VALUE(weights.size() == count, kOp, ": ", cell, " has ", count, " weights, got ", weights.size());
}

at::Tensor present(const Weights& weights, size_t i) {
  const std::optional<at::Tensor> weight = weights.get(i);
  TORCH_CHECK_VALUE(weight.has_value() && weight->defined(), kOp, ": weight ", i, " must be a tensor, got None");
  return *weight;
}

// The state before in the dtype of the state, none where there is none.
at::Tensor before(const std::optional<at::Tensor>& h, at::ScalarType state) {
  if (!h.has_value() || !h->defined()) return {};
  if (h->scalar_type() == state) return *h;
  TORCH_CHECK_TYPE(at::autocast::is_autocast_enabled(h->device().type()), kOp, ": h must be ", state,
                   ", as the state is, got ", h->scalar_type());
  return h->to(state);
}

at::ScalarType wide(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

// A h + b
at::Tensor next(const at::Tensor& A, const at::Tensor& h, const at::Tensor& b) {
  return h.defined() ? at::addcmul(b, A, h) : b;
}

Step gated(const at::Tensor& input, const std::optional<at::Tensor>& h, const Weights& weights, bool lstm,
           bool positive) {
  const at::Tensor gates = at::linear(input, present(weights, 0), weights.get(1));
  const auto parts = gates.chunk(lstm ? 3 : 2, -1);
  at::Tensor candidate = parts.back(), open;
  if (positive) candidate = at::where(candidate >= 0, candidate + 0.5, candidate.sigmoid());
  if (lstm) {
    open = (at::softplus(-parts[0]) - at::softplus(-parts[1])).to(gates.scalar_type()).sigmoid();
  } else {
    open = parts[0].sigmoid();
  }
  const at::Tensor start = before(h, gates.scalar_type());
  const at::Tensor state = start.defined() ? at::lerp(start, candidate, open) : open * candidate;
  return {state, state};
}

Step rg_lru(const at::Tensor& input, const std::optional<at::Tensor>& h, const Weights& weights) {
  const at::Tensor weight = present(weights, 0), Lambda = present(weights, 2);
  const std::optional<at::Tensor> gate_bias = weights.get(1), projection = weights.get(3);
  const at::Tensor x = projection ? at::linear(input, *projection, weights.get(4)) : input;
  at::Tensor gates =
      at::einsum("bki,koi->bko", {x.unflatten_symint(-1, {weight.sym_size(0), weight.sym_size(2)}), weight});
  const auto dtype = gates.scalar_type();
  if (gate_bias) gates = gates + *gate_bias;
  const auto parts = gates.sigmoid().chunk(2, -1);
  const at::Tensor r = parts[0].flatten(-2), i = parts[1].flatten(-2);
  const auto state = wide(x.scalar_type());
  const at::Tensor log_a = r.to(state) * (8.0 * at::log_sigmoid(Lambda.to(state)));
  const double least = state == at::kDouble ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  // The root of zero has no gradient: the least normal number instead.
  const at::Tensor b = (-(2 * log_a).expm1()).clamp_min(least).sqrt() * (i * x).to(state);
  const at::Tensor h_next = next(log_a.exp(), before(h, state), b);
  return {h_next.to(dtype), h_next};
}

Step complex(const at::Tensor& input, const std::optional<at::Tensor>& h, const Weights& weights, bool s5) {
  const auto state = wide(present(weights, 3).scalar_type());
  const auto get = [&](size_t i) { return present(weights, i).to(state); };
  at::Tensor A, B = get(3);
  if (s5) {
    const at::Tensor Lambda = at::complex(get(0).clamp_max(-1e-4), get(1));
    A = (Lambda * get(2).exp()).exp();
    const at::Tensor factor = (A - 1) / Lambda;
    B = at::view_as_real(factor.unsqueeze(-1) * at::complex(B.select(1, 0), B.select(1, 1))).movedim(-1, 1);
  } else {
    A = at::polar((-get(0).exp()).exp(), get(1).exp());
    B = get(2).exp().unsqueeze(-1).unsqueeze(-1) * B;
  }
  const at::Tensor pairs = at::linear(input, B.flatten(0, 1).to(input.scalar_type()));
  const auto N = B.sym_size(0);
  const at::Tensor b = at::view_as_complex(pairs.to(state).unflatten_symint(-1, {N, 2}).contiguous());
  const at::Tensor h_next = next(A, before(h, b.scalar_type()), b);
  const at::Tensor C = present(weights, 4);
  // Re(C h) of pairs is one real product with (re, -im); a state of s5 stands for its conjugate, too.
  const at::Tensor read = (at::stack({C.select(2, 0), -C.select(2, 1)}, 2) * (s5 ? 2.0 : 1.0)).flatten(1);
  at::Tensor y = at::linear(at::view_as_real(h_next).flatten(-2).to(pairs.scalar_type()), read.to(pairs.scalar_type()));
  if (const std::optional<at::Tensor> D = weights.get(5); D && D->defined()) {
    y = y + (D->dim() == 1 ? *D * input : at::linear(input, *D)).to(y.scalar_type());
  }
  return {y, h_next};
}

}  // namespace

Step scan_cell(const at::Tensor& input, const std::optional<at::Tensor>& h, const Weights& weights,
               std::string_view cell) {
  const bool lstm = cell == "min_lstm" || cell == "min_lstm_g", gru = cell == "min_gru" || cell == "min_gru_g";
  if (lstm || gru) {
    check_count(weights, 2, cell);
    return gated(input, h, weights, lstm, cell.ends_with("_g"));
  }
  if (cell == "rg_lru") {
    check_count(weights, 5, cell);
    return rg_lru(input, h, weights);
  }
  TORCH_CHECK_VALUE(cell == "lru" || cell == "s5", kOp,
                    ": cell must be min_gru, min_gru_g, min_lstm, min_lstm_g, rg_lru, ", "lru or s5, got ", cell);
  check_count(weights, 6, cell);
  return complex(input, h, weights, cell == "s5");
}

TORCH_LIBRARY_IMPL(weft, CompositeImplicitAutograd, m) {
  m.impl("scan_cell", scan_cell);
}
TORCH_LIBRARY_IMPL(weft, FuncTorchBatchedDecomposition, m) {
  m.impl("scan_cell", scan_cell);
}

}  // namespace weft::scan::cell
