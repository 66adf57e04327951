#include "rnn/step/rnn_cell_reference.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "rnn/cells/cell_reference.h"
#include "rnn/cells/heads.h"
#include "rnn/rnn.h"

namespace weft::rnn {
namespace {

using at::Tensor;

// Arguments in the accumulate type, and the step that they make.
struct Step {
  Tensor input, h, w_ih, w_hh;
  std::optional<Tensor> c, b_ih, b_hh;
  CellStep step;

  explicit Step(const RnnCellArgs& a) {
    const auto type = accumulate_type(a.input.scalar_type());
    const auto cast = [&](const std::optional<Tensor>& t) { return t ? std::optional(t->to(type)) : std::nullopt; };
    const auto affine = [](const Tensor& v, const Tensor& w, const std::optional<Tensor>& b) {
      return b ? at::addmm(*b, v, w.t()) : at::mm(v, w.t());
    };
    input = a.input.to(type), h = a.h.to(type), w_ih = a.w_ih.to(type), w_hh = a.w_hh.to(type);
    c = cast(a.c), b_ih = cast(a.b_ih), b_hh = cast(a.b_hh);
    step = cell_step(a.cell, affine(input, w_ih, b_ih), heads_product(h, w_hh, b_hh ? *b_hh : Tensor(), a.heads), h,
                     c ? *c : Tensor());
  }
};

}  // namespace

RnnCellResults rnn_cell_reference(const RnnCellArgs& a, bool save) {
  // Under autocast the products here would round to half types.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = a.input.scalar_type();
  const auto none = [&] { return at::empty({0}, a.input.options()); };
  const Step s(a);
  return {s.step.h.to(type), a.c ? s.step.c.to(type) : none(),
          save && has_gates(a.cell) ? at::cat(s.step.gates, 1).to(type) : none()};
}

std::vector<Tensor> rnn_cell_backward_reference(const RnnCellGrads& grads, const RnnCellArgs& a,
                                                const RnnCellMask& mask) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = a.input.scalar_type();
  const Step s(a);
  const auto arriving = [&](const std::optional<Tensor>& t, const Tensor& like) {
    return t ? t->to(like.scalar_type()) : at::zeros_like(like);
  };
  const CellStepGrads d =
      cell_step_backward(a.cell, s.step, arriving(grads.h_next, s.h), a.c ? arriving(grads.c_next, *s.c) : Tensor());
  const RnnCellArgs cast{s.input, s.h, s.c, s.w_ih, s.w_hh, s.b_ih, s.b_hh, a.cell, a.heads};
  std::vector<Tensor> result = rnn_cell_products(cast, {d.in, d.rec, d.h, d.c, {}, {}}, mask);
  for (Tensor& t : result) t = t.to(type);
  return result;
}

}  // namespace weft::rnn
