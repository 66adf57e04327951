#include "rnn/cells/cell_reference.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

namespace weft::rnn {

CellStep cell_step(Cell cell, const at::Tensor& in, const at::Tensor& rec, const at::Tensor& h, const at::Tensor& c) {
  const int64_t H = h.size(1);
  const auto block = [H](const at::Tensor& t, int64_t index) { return t.narrow(1, index * H, H); };
  CellStep s;
  s.h_before = h;
  s.c_before = c;
  switch (cell) {
    case Cell::kRnnTanh:
      s.h = at::tanh(in + rec);
      break;
    case Cell::kRnnRelu:
      s.h = at::relu(in + rec);
      break;
    case Cell::kGru: {
      auto& [r, z, n, m] = s.gates;
      r = at::sigmoid(block(in, 0) + block(rec, 0));
      z = at::sigmoid(block(in, 1) + block(rec, 1));
      m = block(rec, 2);
      n = at::tanh(block(in, 2) + r * m);
      s.h = n + z * (h - n);
      break;
    }
    case Cell::kLstm: {
      auto& [i, f, g, o] = s.gates;
      const at::Tensor pre = in + rec;
      i = at::sigmoid(block(pre, 0));
      f = at::sigmoid(block(pre, 1));
      g = at::tanh(block(pre, 2));
      o = at::sigmoid(block(pre, 3));
      s.c = f * c + i * g;
      s.h = o * at::tanh(s.c);
      break;
    }
  }
  return s;
}

CellStepGrads cell_step_backward(Cell cell, const CellStep& s, const at::Tensor& dh, const at::Tensor& dc) {
  CellStepGrads grads;
  switch (cell) {
    case Cell::kRnnTanh:
      grads.in = grads.rec = dh * (1 - s.h * s.h);
      break;
    case Cell::kRnnRelu:
      grads.in = grads.rec = at::where(s.h <= 0, at::zeros_like(dh), dh);
      break;
    case Cell::kGru: {
      const auto& [r, z, n, m] = s.gates;
      const at::Tensor dn = dh * (1 - z) * (1 - n * n), dz = dh * (s.h_before - n) * z * (1 - z),
                       dr = dn * m * r * (1 - r);
      grads.in = at::cat({dr, dz, dn}, 1);
      grads.rec = at::cat({dr, dz, dn * r}, 1);
      grads.h = dh * z;
      break;
    }
    case Cell::kLstm: {
      const auto& [i, f, g, o] = s.gates;
      const at::Tensor squashed = at::tanh(s.c), d = dc + dh * o * (1 - squashed * squashed);
      grads.in = grads.rec = at::cat(
          {d * g * i * (1 - i), d * s.c_before * f * (1 - f), d * i * (1 - g * g), dh * squashed * o * (1 - o)}, 1);
      grads.c = d * f;
      break;
    }
  }
  return grads;
}

}  // namespace weft::rnn
