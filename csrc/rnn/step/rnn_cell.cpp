// weft::rnn_cell: argument checks, allocation, the products of the backward pass.
#include "rnn/step/rnn_cell.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "common/check.h"
#include "rnn/cells/cells.h"
#include "rnn/cells/heads.h"
#include "rnn/rnn.h"

namespace weft::rnn {
namespace {

CellElement element_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return CellElement::kHalf;
    case at::kBFloat16:
      return CellElement::kBFloat16;
    case at::kDouble:
      return CellElement::kDouble;
    default:
      return CellElement::kFloat;
  }
}

// Null for a tensor that is undefined or has no elements. The tensor is held by the caller.
const void* data(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.const_data_ptr() : nullptr;
}
void* mutable_data(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.mutable_data_ptr() : nullptr;
}

}  // namespace

void check_rnn_cell(const char* op, const RnnCellArgs& a) {
  const bool with_c = has_c(a.cell);
  TORCH_CHECK_VALUE(a.input.dim() == 2, op, ": input must be (B, I), got ", a.input.dim(),
                    " dimensions: ", a.input.sizes());
  check_floating(op, "input", a.input);
  TORCH_CHECK_VALUE(a.heads >= 1, op, ": num_heads must be at least 1, got ", a.heads);
  const char* const recurrent = a.heads == 1 ? "(G*H, H)" : "(G*H, H / num_heads)";
  TORCH_CHECK_VALUE(a.w_hh.dim() == 2, op, ": w_hh must be ", recurrent, ", got ", a.w_hh.dim(),
                    " dimensions: ", a.w_hh.sizes());
  const int64_t B = a.input.size(0), I = a.input.size(1), P = a.w_hh.size(1), H = a.heads * P,
                rows = gate_blocks(a.cell) * H;
  const int S = other_states(a.cell);
  const char* const others = S == 1 ? "(B, H)" : "(B, S*H)";
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    check_shape(op, name, t, shape, layout);
    check_like(op, name, t, "input", a.input);
  };
  check("h", a.h, {B, H}, "(B, H)");
  TORCH_CHECK_VALUE(a.c.has_value() == with_c, op, ": c must be ", with_c ? others : "None except", " for ",
                    with_c ? std::string(kCells[int(a.cell)].name) : cells_with_c(),
                    with_c ? ", got None" : ", got a tensor");
  if (with_c) check("c", *a.c, {B, S * H}, others);
  check("w_ih", a.w_ih, {rows, I}, "(G*H, I)");
  check("w_hh", a.w_hh, {rows, P}, recurrent);
  TORCH_CHECK_VALUE(a.b_ih.has_value() == a.b_hh.has_value(), op,
                    ": b_ih and b_hh must both be given or both be None, got ", a.b_ih ? "only b_ih" : "only b_hh");
  if (a.b_ih) {
    check("b_ih", *a.b_ih, {rows}, "(G*H)");
    check("b_hh", *a.b_hh, {rows}, "(G*H)");
  }
}

void check_rnn_cell_saved(const char* op, const RnnCellArgs& a, const RnnCellGrads& grads, const RnnCellSaved& saved) {
  const bool with_c = has_c(a.cell);
  const int64_t B = a.B(), H = a.H();
  const int S = other_states(a.cell);
  const char* const others = S == 1 ? "(B, H)" : "(B, S*H)";
  const auto check = [&](const char* name, const at::Tensor& t, at::IntArrayRef shape, const char* layout) {
    check_shape(op, name, t, shape, layout);
    check_like(op, name, t, "input", a.input);
  };
  if (grads.h_next) check("grad_h_next", *grads.h_next, {B, H}, "(B, H)");
  TORCH_CHECK_VALUE(with_c || !grads.c_next, op, ": grad_c_next must be None except for ", cells_with_c(),
                    ", got a tensor");
  if (grads.c_next) check("grad_c_next", *grads.c_next, {B, S * H}, others);
  check("h_next", saved.h_next, {B, H}, "(B, H)");
  if (with_c) check("c_next", saved.c_next, {B, S * H}, others);
  if (has_gates(a.cell)) check("gates", saved.gates, {B, 4 * H}, "(B, 4H) as a forward with save=True returns it");
}

std::vector<at::Tensor> rnn_cell_products(const RnnCellArgs& a, const RnnCellSteps& d, const RnnCellMask& mask) {
  std::vector<at::Tensor> grads(mask.size());
  if (mask[0]) grads[0] = at::mm(d.in, a.w_ih);
  if (mask[1] && a.heads == 1) grads[1] = d.h.defined() ? at::addmm(d.h, d.rec, a.w_hh) : at::mm(d.rec, a.w_hh);
  if (mask[1] && a.heads > 1) {
    grads[1] = heads_grad_state(d.rec, a.w_hh, a.heads);
    if (d.h.defined()) grads[1] += d.h;
  }
  if (mask[2] && a.c) grads[2] = d.c;
  if (mask[3]) grads[3] = at::mm(d.in.t(), a.input);
  if (mask[4]) grads[4] = heads_grad_weight(d.rec, a.h, a.heads);
  if (mask[5] && a.b_ih) grads[5] = d.b_ih.defined() ? d.b_ih : d.in.sum(0);
  if (mask[6] && a.b_hh) grads[6] = d.b_hh.defined() ? d.b_hh : d.rec.sum(0);
  for (at::Tensor& grad : grads) {
    if (!grad.defined()) grad = at::empty({0}, a.input.options());
  }
  return grads;
}

RnnCellForward prepare_rnn_cell(const RnnCellArgs& a, bool save, int64_t few, RnnCellProduct product) {
  const auto options = a.input.options();
  const int64_t B = a.B(), I = a.I(), H = a.H();
  const bool with_c = has_c(a.cell);
  RnnCellForward f;
  f.results.h_next = at::empty({B, H}, options);
  f.results.c_next = with_c ? at::empty({B, other_states(a.cell) * H}, options) : at::empty({0}, options);
  f.results.gates = at::empty(save && has_gates(a.cell) ? at::IntArrayRef{B, 4 * H} : at::IntArrayRef{0}, options);
  auto& [x, h, c, w_ih, w_hh, b_ih, b_hh, in, rec] = f.held;
  x = a.input.contiguous();
  h = a.h.contiguous();
  if (a.c) c = a.c->contiguous();
  if (a.b_ih) b_ih = a.b_ih->contiguous(), b_hh = a.b_hh->contiguous();
  if (B <= few) {
    w_ih = a.w_ih.contiguous();
    w_hh = a.w_hh.contiguous();
  } else {
    in = product(x, a.w_ih);
    rec = a.heads == 1 ? product(h, a.w_hh) : heads_product(h, a.w_hh, {}, a.heads).to(in.scalar_type());
  }
  f.element = element_of(a.input.scalar_type());
  f.args = {a.cell,
            B,
            I,
            H,
            H / a.heads,
            data(x),
            data(h),
            data(c),
            data(w_ih),
            data(w_hh),
            data(b_ih),
            data(b_hh),
            data(in),
            data(rec),
            mutable_data(f.results.h_next),
            mutable_data(f.results.c_next),
            mutable_data(f.results.gates)};
  return f;
}

RnnCellBackward::RnnCellBackward(const RnnCellArgs& a, const RnnCellGrads& grads, const RnnCellSaved& saved,
                                 const RnnCellMask& mask, bool sum_bias)
    : args_(a), mask_(mask), element_(element_of(a.input.scalar_type())) {
  const auto options = a.input.options();
  const int64_t B = a.B(), H = a.H(), columns = gate_blocks(a.cell) * H;
  steps_.in = at::empty({B, columns}, options);
  steps_.rec = sides_apart(a.cell) ? at::empty({B, columns}, options) : steps_.in;
  if (state_before(a.cell) == StateName::kH) steps_.h = at::empty({B, H}, options);
  if (state_before(a.cell) == StateName::kC) steps_.c = at::empty({B, other_states(a.cell) * H}, options);
  if (sum_bias && mask[5] && a.b_ih) steps_.b_ih = at::empty({columns}, options);
  if (sum_bias && mask[6] && a.b_hh) steps_.b_hh = at::empty({columns}, options);
  auto& [grad_h, grad_c, h, c, h_next, c_next, gates] = held_;
  if (grads.h_next) grad_h = grads.h_next->contiguous();
  if (grads.c_next) grad_c = grads.c_next->contiguous();
  h = a.h.contiguous();
  if (a.c) c = a.c->contiguous();
  h_next = saved.h_next.contiguous();
  c_next = saved.c_next.contiguous();
  gates = saved.gates.contiguous();
  kernel_ = {a.cell,
             B,
             H,
             data(grad_h),
             data(grad_c),
             data(h),
             data(c),
             data(h_next),
             data(c_next),
             data(gates),
             mutable_data(steps_.in),
             mutable_data(steps_.rec),
             mutable_data(steps_.h),
             mutable_data(steps_.c),
             mutable_data(steps_.b_ih),
             mutable_data(steps_.b_hh)};
}

}  // namespace weft::rnn
