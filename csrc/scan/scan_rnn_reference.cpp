#include "scan/scan_rnn_reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

#include "rnn/cell_reference.h"

namespace weft {

ScanRnnGrads scan_rnn_backward_reference(const std::optional<at::Tensor>& grad_output,
                                         const std::optional<at::Tensor>& grad_h_n,
                                         const std::optional<at::Tensor>& grad_c_n, const at::Tensor& input,
                                         const at::Tensor& h0, const std::optional<at::Tensor>& c0,
                                         const at::Tensor& w_ih, const at::Tensor& w_hh,
                                         const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
                                         Cell cell, bool reverse, const std::array<bool, 7>& mask) {
  // Under autocast the products here would round to half types.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = input.scalar_type(), compute = accumulate_type(type);
  const auto cast = [&](const std::optional<at::Tensor>& t) { return t ? t->to(compute) : at::Tensor(); };
  const at::Tensor x = input.to(compute), wi = w_ih.to(compute), wh = w_hh.to(compute), bi = cast(b_ih),
                   bh = cast(b_hh);
  const at::Tensor gy = cast(grad_output), gh = cast(grad_h_n), gc = cast(grad_c_n);
  const int64_t T = x.size(0);
  const auto time_of = [&](int64_t step) { return reverse ? T - 1 - step : step; };
  const auto affine = [](const at::Tensor& v, const at::Tensor& w, const at::Tensor& b) {
    return b.defined() ? at::addmm(b, v, w.t()) : at::mm(v, w.t());
  };

  std::vector<CellStep> steps(T);
  const auto rows = [](const at::Tensor& state) { return state.defined() ? state.squeeze(0) : state; };  // (B, H)
  at::Tensor h = rows(h0.to(compute)), c = rows(cast(c0));
  for (int64_t step = 0; step < T; ++step) {
    CellStep& s = steps[step];
    s = cell_step(cell, affine(x.select(0, time_of(step)), wi, bi), affine(h, wh, bh), h, c);
    h = s.h;
    c = s.c;
  }

  at::Tensor dh = gh.defined() ? rows(gh) : at::zeros_like(h);
  at::Tensor dc = cell != Cell::kLstm ? at::Tensor() : gc.defined() ? rows(gc) : at::zeros_like(c);
  if (T == 0) {  // no step makes a new tensor of them, and results share no memory with arguments
    dh = dh.clone();
    if (dc.defined()) dc = dc.clone();
  }
  std::vector<at::Tensor> grad_x(T);
  at::Tensor grad_wi = at::zeros_like(wi), grad_wh = at::zeros_like(wh), grad_bi, grad_bh;
  if (bi.defined()) {
    grad_bi = at::zeros_like(bi);
    grad_bh = at::zeros_like(bh);
  }
  for (int64_t step = T - 1; step >= 0; --step) {
    const CellStep& s = steps[step];
    const int64_t t = time_of(step);
    if (gy.defined()) dh = dh + gy.select(0, t);
    const CellStepGrads d = cell_step_backward(cell, s, dh, dc);
    dh = at::mm(d.rec, wh);
    if (d.h.defined()) dh = dh + d.h;
    dc = d.c;
    if (mask[0]) grad_x[t] = at::mm(d.in, wi);
    if (mask[3]) grad_wi = grad_wi + at::mm(d.in.t(), x.select(0, t));
    if (mask[4]) grad_wh = grad_wh + at::mm(d.rec.t(), s.h_before);
    if (mask[5] && bi.defined()) grad_bi = grad_bi + d.in.sum(0);
    if (mask[6] && bi.defined()) grad_bh = grad_bh + d.rec.sum(0);
  }

  const auto result = [&](int index, const at::Tensor& grad) {
    return mask[index] && grad.defined() ? grad.to(type) : at::empty({0}, input.options());
  };
  const at::Tensor grad_input = !mask[0] ? at::Tensor() : T > 0 ? at::stack(grad_x) : at::zeros_like(x);
  const auto state = [](const at::Tensor& grad) { return grad.defined() ? grad.unsqueeze(0) : grad; };
  return {result(0, grad_input), result(1, state(dh)), result(2, state(dc)), result(3, grad_wi),
          result(4, grad_wh),    result(5, grad_bi),   result(6, grad_bh)};
}

}  // namespace weft
