#include "rnn/rnn_reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "rnn/cells/cell_reference.h"
#include "rnn/cells/heads.h"

namespace weft::rnn {
namespace {

// The one tensor of a list, or all of them on top of each other.
at::Tensor joined(const std::vector<at::Tensor>& parts, int64_t dim) {
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

// `rows` instead of the first rows of `state`.
at::Tensor with_first_rows(const at::Tensor& state, const at::Tensor& rows) {
  const int64_t n = rows.size(0), B = state.size(0);
  return n == B ? rows : at::cat({rows, state.narrow(0, n, B - n)}, 0);
}

// Arguments and weights in the accumulate type, and the places of the steps.
struct Problem {
  const RnnSizes& sizes;
  Cell cell;
  at::ScalarType compute;
  RnnSteps places;
  at::Tensor x;   // (R,I)
  at::Tensor h0;  // (D,B,H)
  at::Tensor c0;  // (D,B,S*H), undefined where the cell has no c

  Problem(const RnnArgs& args, const RnnSizes& s)
      : sizes(s),
        cell(args.cell),
        compute(accumulate_type(args.input.scalar_type())),
        places(rnn_steps(args, s)),
        x(args.input.reshape({s.R, s.I}).to(compute)) {
    const auto state = [&](const std::optional<at::Tensor>& t, int states) {
      return t ? t->to(compute) : at::zeros({s.D, s.B, states * s.H}, x.options());
    };
    h0 = state(args.h0, 1);
    if (has_c(cell)) c0 = state(args.c0, s.S);
  }

  int64_t running(int64_t t) const { return places.offsets[t + 1] - places.offsets[t]; }
  // The rows of step t in a tensor of all R rows.
  at::Tensor rows(const at::Tensor& all, int64_t t) const { return all.narrow(0, places.offsets[t], running(t)); }
  // The step that a direction takes as its n-th.
  int64_t step_at(int direction, int64_t n) const { return direction == 0 ? n : sizes.T - 1 - n; }
};

struct Direction {
  RnnWeights weights;           // in the accumulate type
  std::vector<CellStep> steps;  // (T), each with the rows of the sequences that run in it
  at::Tensor h, c;              // (B,H) and (B,S*H), after the last step
};

Direction run(const Problem& p, const RnnWeights& given, int direction) {
  const auto cast = [&](const at::Tensor& t) { return t.defined() ? t.to(p.compute) : t; };
  const auto affine = [](const at::Tensor& v, const at::Tensor& w, const at::Tensor& b) {
    return b.defined() ? at::addmm(b, v, w.t()) : at::mm(v, w.t());
  };
  Direction d;
  d.weights = {cast(given.w_ih), cast(given.w_hh), cast(given.b_ih), cast(given.b_hh)};
  d.steps.resize(p.sizes.T);
  d.h = p.h0.select(0, direction);
  if (p.c0.defined()) d.c = p.c0.select(0, direction);
  const at::Tensor projected = affine(p.x, d.weights.w_ih, d.weights.b_ih);
  for (int64_t n = 0; n < p.sizes.T; ++n) {
    const int64_t t = p.step_at(direction, n), rows = p.running(t);
    const at::Tensor h = d.h.narrow(0, 0, rows), c = d.c.defined() ? d.c.narrow(0, 0, rows) : d.c;
    d.steps[t] =
        cell_step(p.cell, p.rows(projected, t), heads_product(h, d.weights.w_hh, d.weights.b_hh, p.sizes.heads), h, c);
    d.h = with_first_rows(d.h, d.steps[t].h);
    if (d.c.defined()) d.c = with_first_rows(d.c, d.steps[t].c);
  }
  return d;
}

// One row for every row of the input, from what `get` finds in each step.
template <typename Get>
at::Tensor all_rows(const Problem& p, int64_t width, const std::vector<CellStep>& steps, const Get& get) {
  if (steps.empty()) return at::zeros({0, width}, p.x.options());
  std::vector<at::Tensor> parts(steps.size());
  std::transform(steps.begin(), steps.end(), parts.begin(), get);
  return at::cat(parts, 0);
}

}  // namespace

RnnResults rnn_reference(const RnnArgs& args, const RnnSizes& s, bool keep_cells, bool save) {
  // Under autocast the products here would round to half types.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = args.input.scalar_type();
  const bool with_c = has_c(args.cell), with_gates = save && has_gates(args.cell),
             with_cells = with_c && (save || keep_cells);
  const Problem p(args, s);
  std::vector<at::Tensor> outputs, cells, h_n, c_n, gates;
  for (int direction = 0; direction < s.D; ++direction) {
    const Direction d = run(p, rnn_weights(args, s, direction), direction);
    outputs.push_back(all_rows(p, s.H, d.steps, [](const CellStep& step) { return step.h; }));
    h_n.push_back(d.h);
    if (with_c) c_n.push_back(d.c);
    if (with_cells) {
      cells.push_back(
          all_rows(p, s.K * s.H, d.steps, [&](const CellStep& step) { return step.c.narrow(1, 0, s.K * s.H); }));
    }
    if (with_gates) {
      gates.push_back(all_rows(p, 4 * s.H, d.steps, [](const CellStep& step) { return at::cat(step.gates, 1); }));
    }
  }
  const auto saved = args.saved_type();
  const auto none = [&](at::ScalarType type) { return at::empty({0}, args.input.options().dtype(type)); };
  const auto like_output = [&](const std::vector<at::Tensor>& parts, at::ScalarType type) {
    const at::Tensor rows = joined(parts, 1).to(type);
    return s.packed ? rows : rows.view({s.T, s.B, rows.size(1)});
  };
  const auto stacked = [](const std::vector<at::Tensor>& parts, at::ScalarType type) {
    return at::stack(parts).to(type);
  };
  return {like_output(outputs, type), stacked(h_n, type), with_c ? stacked(c_n, type) : none(type),
          with_cells ? like_output(cells, saved) : none(saved), with_gates ? stacked(gates, saved) : none(saved)};
}

std::vector<at::Tensor> rnn_backward_reference(const RnnGrads& grads, const RnnArgs& args, const RnnSizes& s,
                                               const c10::List<bool>& mask) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto type = args.input.scalar_type();
  const bool with_c = has_c(args.cell);
  const Problem p(args, s);
  const auto columns = [&](const std::optional<at::Tensor>& t, int direction, int states) {
    const int64_t width = states * s.H;
    return t ? t->reshape({s.R, s.D * width}).narrow(1, direction * width, width).to(p.compute) : at::Tensor();
  };
  const auto state = [&](const std::optional<at::Tensor>& t, int direction, int states) {
    return t ? t->select(0, direction).to(p.compute) : at::zeros({s.B, states * s.H}, p.x.options());
  };
  // The gradient of the kept states is that of the first of all others.
  const auto with_kept = [&](const at::Tensor& all, const at::Tensor& kept) {
    const int64_t width = s.K * s.H, rest = all.size(1) - width;
    return rest == 0 ? all + kept : at::cat({all.narrow(1, 0, width) + kept, all.narrow(1, width, rest)}, 1);
  };

  std::vector<at::Tensor> result(mask.size());
  at::Tensor grad_x;
  std::vector<at::Tensor> grad_h0, grad_c0;
  for (int direction = 0; direction < s.D; ++direction) {
    const Direction d = run(p, rnn_weights(args, s, direction), direction);
    const at::Tensor grad_output = columns(grads.output, direction, 1),
                     grad_cells = columns(grads.cells, direction, s.K);
    at::Tensor dh = state(grads.h_n, direction, 1), dc = with_c ? state(grads.c_n, direction, s.S) : at::Tensor();
    std::vector<at::Tensor> in(s.T), rec(s.T);
    for (int64_t n = s.T - 1; n >= 0; --n) {
      const int64_t t = p.step_at(direction, n), rows = p.running(t);
      at::Tensor h = dh.narrow(0, 0, rows), c = with_c ? dc.narrow(0, 0, rows) : dc;
      if (grad_output.defined()) h = h + p.rows(grad_output, t);
      if (grad_cells.defined()) c = with_kept(c, p.rows(grad_cells, t));
      const CellStepGrads step = cell_step_backward(p.cell, d.steps[t], h, c);
      in[t] = step.in;
      rec[t] = step.rec;
      h = heads_grad_state(step.rec, d.weights.w_hh, s.heads);
      dh = with_first_rows(dh, step.h.defined() ? h + step.h : h);
      if (with_c) dc = with_first_rows(dc, step.c);
    }
    grad_h0.push_back(dh);
    if (with_c) grad_c0.push_back(dc);

    const auto all = [&](const std::vector<at::Tensor>& parts) {
      return parts.empty() ? at::zeros({0, s.G * s.H}, p.x.options()) : at::cat(parts, 0);
    };
    const int first = rnn_first_weight(s, direction);
    const bool wants_b_ih = s.bias && mask[first + 2], wants_b_hh = s.bias && mask[first + 3];
    if (mask[0] || mask[first] || wants_b_ih) {
      const at::Tensor d_in = all(in);
      if (mask[0]) {
        const at::Tensor part = at::mm(d_in, d.weights.w_ih);
        grad_x = grad_x.defined() ? grad_x + part : part;
      }
      if (mask[first]) result[first] = at::mm(d_in.t(), p.x);
      if (wants_b_ih) result[first + 2] = d_in.sum(0);
    }
    if (mask[first + 1] || wants_b_hh) {
      const at::Tensor d_rec = all(rec);
      if (mask[first + 1]) {
        const auto before = all_rows(p, s.H, d.steps, [](const CellStep& step) { return step.h_before; });
        result[first + 1] = heads_grad_weight(d_rec, before, s.heads);
      }
      if (wants_b_hh) result[first + 3] = d_rec.sum(0);
    }
  }
  if (mask[0]) result[0] = grad_x.view(args.input.sizes());
  if (mask[1] && args.h0) result[1] = at::stack(grad_h0);
  if (mask[2] && args.c0) result[2] = at::stack(grad_c0);
  for (at::Tensor& grad : result) grad = grad.defined() ? grad.to(type) : at::empty({0}, args.input.options());
  return result;
}

}  // namespace weft::rnn
