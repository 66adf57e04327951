#include "rnn/cells/cell_reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "rnn/cells/cells.h"

namespace weft::rnn {
namespace {

using at::Tensor;

// The math of a cell's step for whole tensors, see cells.h.
struct TensorMath {
  static constexpr int kOne = 1;
  static Tensor sigmoid(const Tensor& x) { return at::sigmoid(x); }
  static Tensor tanh(const Tensor& x) { return at::tanh(x); }
  static Tensor relu(const Tensor& x) { return at::relu(x); }
  static Tensor log_sigmoid(const Tensor& x) { return at::log_sigmoid(x); }
  static Tensor exp(const Tensor& x) { return at::exp(x); }
  static Tensor positive(const Tensor& y, const Tensor& a, const Tensor& b) { return at::where(y > 0, a, b); }
  static Tensor ratio(const Tensor& a, const Tensor& b) { return a / b; }
  static Tensor like(const Tensor& x, double number) { return at::full_like(x, number); }
  static Tensor where_positive(const Tensor& y, const Tensor& x) { return at::where(y <= 0, at::zeros_like(x), x); }
};

// States side by side.
Tensor joined(const std::vector<Tensor>& states) {
  return states.size() == 1 ? states[0] : at::cat(states, 1);
}

template <Cell C>
CellStep step_of(const Tensor& in, const Tensor& rec, const Tensor& h, const Tensor& c) {
  using Tr = Traits<C>;
  const int64_t H = h.size(1);
  const auto block = [H](const Tensor& t, int64_t index) { return t.narrow(1, index * H, H); };
  CellStep s;
  constexpr int kOthers = Tr::kStates - 1;
  s.h_before = h;
  s.c_before = c;
  Tensor pre[Tr::kGates], apart, others[kOthers + 1];
  for (int i = 0; i < kOthers; ++i) others[i] = block(c, i);
  // Where all sides are added, one sum serves all gates.
  const Tensor sum = Tr::kApart < 0 ? in + rec : Tensor();
  for (int g = 0; g < Tr::kGates; ++g) {
    pre[g] = Tr::kApart < 0 ? block(sum, g) : g == Tr::kApart ? block(rec, g) : block(in, g) + block(rec, g);
  }
  if constexpr (Tr::kApart >= 0) apart = block(in, Tr::kApart);
  s.h = Tr::template forward<TensorMath>(pre, apart, h, others, s.gates.data());
  if constexpr (kOthers > 0) s.c = joined(std::vector<Tensor>(others, others + kOthers));
  return s;
}

template <Cell C>
CellStepGrads grads_of(const CellStep& s, const Tensor& dh, const Tensor& dc) {
  using Tr = Traits<C>;
  constexpr int kOthers = Tr::kStates - 1;
  const int64_t H = s.h.size(1);
  Tensor d[Tr::kChain], direct[kOthers + 1], after[Tr::kKept + 1] = {s.h}, before[Tr::kKept + 1] = {s.h_before};
  for (int i = 0; i < Tr::kKept; ++i) {
    if constexpr (Tr::kAfter == StateName::kC) after[i] = s.c.narrow(1, i * H, H);
    if constexpr (Tr::kBefore == StateName::kC) before[i] = s.c_before.narrow(1, i * H, H);
  }
  const auto arrive = [&](const Tensor& from_h, int i = 0) { return dc.narrow(1, i * H, H) + from_h; };
  Tr::template backward<TensorMath>(dh, arrive, s.gates.data(), after, before, d, direct);
  CellStepGrads grads;
  std::vector<Tensor> in(d, d + Tr::kGates), rec = in;
  if constexpr (Tr::kApart >= 0) rec[Tr::kApart] = d[Tr::kChain - 1];
  grads.in = at::cat(in, 1);
  grads.rec = Tr::kApart >= 0 ? at::cat(rec, 1) : grads.in;
  if constexpr (Tr::kBefore == StateName::kH) grads.h = direct[0];
  if constexpr (Tr::kBefore == StateName::kC) grads.c = joined(std::vector<Tensor>(direct, direct + kOthers));
  return grads;
}

}  // namespace

CellStep cell_step(Cell cell, const Tensor& in, const Tensor& rec, const Tensor& h, const Tensor& c) {
  CellStep result;
  with_cell(cell, [&]<Cell C>() { result = step_of<C>(in, rec, h, c); });
  return result;
}

CellStepGrads cell_step_backward(Cell cell, const CellStep& step, const Tensor& dh, const Tensor& dc) {
  CellStepGrads result;
  with_cell(cell, [&]<Cell C>() { result = grads_of<C>(step, dh, dc); });
  return result;
}

}  // namespace weft::rnn
