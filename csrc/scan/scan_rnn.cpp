// weft::scan_rnn: argument checks.
#include "scan/scan_rnn.h"

#include <ATen/ops/empty.h>

#include <string>
#include <utility>

#include "common/check.h"

namespace weft {
namespace {

constexpr std::pair<const char*, Cell> kCells[] = {
    {"rnn_tanh", Cell::kRnnTanh}, {"rnn_relu", Cell::kRnnRelu}, {"gru", Cell::kGru}, {"lstm", Cell::kLstm}};

void check_rank(const char* op, const char* name, const at::Tensor& t, int64_t rank, const char* layout) {
  WEFT_CHECK_VALUE(t.dim() == rank, op, ": ", name, " must be ", layout, ", got ", t.dim(), " dimensions: ", t.sizes());
}

}  // namespace

Cell parse_cell(const char* op, c10::string_view name) {
  std::string known;
  for (const auto& [known_name, cell] : kCells) {
    if (name == known_name) return cell;
    known += (known.empty() ? "'" : ", '") + std::string(known_name) + "'";
  }
  WEFT_CHECK_VALUE(false, op, ": cell must be one of ", known, ", got '", name, "'");
}

at::ScalarType accumulate_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

ScanRnnSizes check_scan_rnn(const char* op, Cell cell, const at::Tensor& input, const at::Tensor& h0,
                            const std::optional<at::Tensor>& c0, const at::Tensor& w_ih, const at::Tensor& w_hh,
                            const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh) {
  const bool lstm = cell == Cell::kLstm;
  check_rank(op, "input", input, 3, "(T, B, I)");
  check_rank(op, "h0", h0, 3, "(1, B, H)");
  check_rank(op, "w_ih", w_ih, 2, "(G*H, I)");
  const ScanRnnSizes s{input.size(0), input.size(1), input.size(2), h0.size(2), gate_blocks(cell)};
  const int64_t rows = s.gates * s.H;
  check_shape(op, "h0", h0, {1, s.B, s.H}, "(1, B, H)");
  check_shape(op, "w_ih", w_ih, {rows, s.I}, "(G*H, I)");
  check_shape(op, "w_hh", w_hh, {rows, s.H}, "(G*H, H)");
  WEFT_CHECK_VALUE(c0.has_value() == lstm, op, ": c0 must be ", lstm ? "(1, B, H) for" : "None except for",
                   " lstm, got ", lstm ? "None" : "a tensor");
  WEFT_CHECK_VALUE(b_ih.has_value() == b_hh.has_value(), op, ": b_ih and b_hh must both be given or both be None, got ",
                   b_ih.has_value() ? "only b_ih" : "only b_hh");
  if (c0) check_shape(op, "c0", *c0, {1, s.B, s.H}, "(1, B, H)");
  if (b_ih) {
    check_shape(op, "b_ih", *b_ih, {rows}, "(G*H)");
    check_shape(op, "b_hh", *b_hh, {rows}, "(G*H)");
  }
  check_floating(op, "input", input);
  check_like(op, "h0", h0, "input", input);
  if (c0) check_like(op, "c0", *c0, "input", input);
  check_like(op, "w_ih", w_ih, "input", input);
  check_like(op, "w_hh", w_hh, "input", input);
  if (b_ih) {
    check_like(op, "b_ih", *b_ih, "input", input);
    check_like(op, "b_hh", *b_hh, "input", input);
  }
  return s;
}

void check_scan_rnn_saved(const char* op, Cell cell, const ScanRnnSizes& s, const at::Tensor& input,
                          const std::optional<at::Tensor>& grad_output, const std::optional<at::Tensor>& grad_h_n,
                          const std::optional<at::Tensor>& grad_c_n, const at::Tensor& output, const at::Tensor& gates,
                          const at::Tensor& cells) {
  const bool lstm = cell == Cell::kLstm;
  auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    check_shape(op, name, t, shape, layout);
    check_like(op, name, t, "input", input);
  };
  if (grad_output) check("grad_output", *grad_output, {s.T, s.B, s.H}, "(T, B, H)");
  if (grad_h_n) check("grad_h_n", *grad_h_n, {1, s.B, s.H}, "(1, B, H)");
  WEFT_CHECK_VALUE(lstm || !grad_c_n, op, ": grad_c_n must be None except for lstm, got a tensor");
  if (grad_c_n) check("grad_c_n", *grad_c_n, {1, s.B, s.H}, "(1, B, H)");
  check("output", output, {s.T, s.B, s.H}, "(T, B, H)");

  const auto accumulate = accumulate_type(input.scalar_type());
  auto check_saved = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    check_shape(op, name, t, shape, layout);
    WEFT_CHECK_TYPE(t.scalar_type() == accumulate, op, ": ", name, " must be ", accumulate, " for ",
                    input.scalar_type(), " inputs, got ", t.scalar_type());
    TORCH_CHECK(t.device() == input.device(), op, ": ", name, " must be on the device of input, ", input.device(),
                ", got ", t.device());
  };
  if (has_gates(cell)) {
    check_saved("gates", gates, {s.T, s.B, 4 * s.H}, "(T, B, 4H) as a forward with save=True returns it");
  }
  if (lstm) check_saved("cells", cells, {s.T, s.B, s.H}, "(T, B, H) as a forward with save=True returns it");
}

ScanRnnGrads without_undefined(const ScanRnnGrads& grads, const at::Tensor& like) {
  // An op's results are tensors; empty ones are only made for those that are missing, each costs two microseconds.
  auto filled = [&](const at::Tensor& t) { return t.defined() ? t : at::empty({0}, like.options()); };
  return std::apply([&](const auto&... g) { return ScanRnnGrads{filled(g)...}; }, grads);
}

}  // namespace weft
