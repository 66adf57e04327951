#include "scan/scan_rnn_reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

namespace weft {
namespace {

// What a step leaves for the backward.
struct Step {
  at::Tensor h_before, c_before;
  at::Tensor r, z, n, m;     // gru
  at::Tensor i, f, g, o, c;  // lstm
  at::Tensor h;
};

at::Tensor columns(const at::Tensor& t, int64_t block, int64_t H) {
  return t.narrow(1, block * H, H);
}

}  // namespace

ScanRnnGrads scan_rnn_backward_reference(const std::optional<at::Tensor>& grad_output,
                                         const std::optional<at::Tensor>& grad_h_n,
                                         const std::optional<at::Tensor>& grad_c_n, const at::Tensor& input,
                                         const at::Tensor& h0, const std::optional<at::Tensor>& c0,
                                         const at::Tensor& w_ih, const at::Tensor& w_hh,
                                         const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
                                         Cell cell, bool reverse, const std::array<bool, 7>& mask) {
  const auto type = input.scalar_type(), compute = accumulate_type(type);
  const auto cast = [&](const std::optional<at::Tensor>& t) { return t ? t->to(compute) : at::Tensor(); };
  const at::Tensor x = input.to(compute), wi = w_ih.to(compute), wh = w_hh.to(compute), bi = cast(b_ih),
                   bh = cast(b_hh);
  const at::Tensor gy = cast(grad_output), gh = cast(grad_h_n), gc = cast(grad_c_n);
  const int64_t T = x.size(0), H = h0.size(1);
  const auto time_of = [&](int64_t step) { return reverse ? T - 1 - step : step; };
  const auto affine = [](const at::Tensor& v, const at::Tensor& w, const at::Tensor& b) {
    return b.defined() ? at::addmm(b, v, w.t()) : at::mm(v, w.t());
  };

  std::vector<Step> steps(T);
  at::Tensor h = h0.to(compute), c = cast(c0);
  for (int64_t step = 0; step < T; ++step) {
    Step& s = steps[step];
    s.h_before = h;
    s.c_before = c;
    const at::Tensor in = affine(x.select(0, time_of(step)), wi, bi), rec = affine(h, wh, bh);
    switch (cell) {
      case Cell::kRnnTanh:
        h = at::tanh(in + rec);
        break;
      case Cell::kRnnRelu:
        h = at::relu(in + rec);
        break;
      case Cell::kGru:
        s.r = at::sigmoid(columns(in, 0, H) + columns(rec, 0, H));
        s.z = at::sigmoid(columns(in, 1, H) + columns(rec, 1, H));
        s.m = columns(rec, 2, H);
        s.n = at::tanh(columns(in, 2, H) + s.r * s.m);
        h = s.n + s.z * (h - s.n);
        break;
      case Cell::kLstm: {
        const at::Tensor pre = in + rec;
        s.i = at::sigmoid(columns(pre, 0, H));
        s.f = at::sigmoid(columns(pre, 1, H));
        s.g = at::tanh(columns(pre, 2, H));
        s.o = at::sigmoid(columns(pre, 3, H));
        c = s.f * c + s.i * s.g;
        s.c = c;
        h = s.o * at::tanh(c);
        break;
      }
    }
    s.h = h;
  }

  at::Tensor dh = gh.defined() ? gh : at::zeros_like(h);
  at::Tensor dc = cell != Cell::kLstm ? at::Tensor() : gc.defined() ? gc : at::zeros_like(c);
  std::vector<at::Tensor> grad_x(T);
  at::Tensor grad_wi = at::zeros_like(wi), grad_wh = at::zeros_like(wh), grad_bi, grad_bh;
  if (bi.defined()) {
    grad_bi = at::zeros_like(bi);
    grad_bh = at::zeros_like(bh);
  }
  for (int64_t step = T - 1; step >= 0; --step) {
    const Step& s = steps[step];
    const int64_t t = time_of(step);
    if (gy.defined()) dh = dh + gy.select(0, t);
    at::Tensor d_in, d_rec, direct;  // direct: what reaches h_before past the recurrent weights
    switch (cell) {
      case Cell::kRnnTanh:
        d_in = d_rec = dh * (1 - s.h * s.h);
        break;
      case Cell::kRnnRelu:
        d_in = d_rec = at::where(s.h <= 0, at::zeros_like(dh), dh);
        break;
      case Cell::kGru: {
        const at::Tensor dn = dh * (1 - s.z) * (1 - s.n * s.n), dz = dh * (s.h_before - s.n) * s.z * (1 - s.z),
                         dr = dn * s.m * s.r * (1 - s.r);
        d_in = at::cat({dr, dz, dn}, 1);
        d_rec = at::cat({dr, dz, dn * s.r}, 1);
        direct = dh * s.z;
        break;
      }
      case Cell::kLstm: {
        const at::Tensor squashed = at::tanh(s.c), d = dc + dh * s.o * (1 - squashed * squashed);
        d_in = d_rec = at::cat({d * s.g * s.i * (1 - s.i), d * s.c_before * s.f * (1 - s.f), d * s.i * (1 - s.g * s.g),
                                dh * squashed * s.o * (1 - s.o)},
                               1);
        dc = d * s.f;
        break;
      }
    }
    dh = at::mm(d_rec, wh);
    if (direct.defined()) dh = dh + direct;
    if (mask[0]) grad_x[t] = at::mm(d_in, wi);
    if (mask[3]) grad_wi = grad_wi + at::mm(d_in.t(), x.select(0, t));
    if (mask[4]) grad_wh = grad_wh + at::mm(d_rec.t(), s.h_before);
    if (mask[5] && bi.defined()) grad_bi = grad_bi + d_in.sum(0);
    if (mask[6] && bi.defined()) grad_bh = grad_bh + d_rec.sum(0);
  }

  const auto result = [&](int index, const at::Tensor& grad) {
    return mask[index] && grad.defined() ? grad.to(type) : at::empty({0}, input.options());
  };
  const at::Tensor grad_input = !mask[0] ? at::Tensor() : T > 0 ? at::stack(grad_x) : at::zeros_like(x);
  return {result(0, grad_input), result(1, dh),      result(2, dc),     result(3, grad_wi),
          result(4, grad_wh),    result(5, grad_bi), result(6, grad_bh)};
}

}  // namespace weft
