#include "rnn/cells/heads.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>

namespace weft::rnn {
namespace {

using at::Tensor;

// (B, blocks * heads * P) as (heads, B, blocks * P).
Tensor by_head(const Tensor& t, int64_t heads, int64_t P) {
  const int64_t B = t.size(0), blocks = t.size(1) / (heads * P);
  return t.reshape({B, blocks, heads, P}).permute({2, 0, 1, 3}).reshape({heads, B, blocks * P});
}

// w (G*H, P) as (heads, G*P, P).
Tensor weights_by_head(const Tensor& w, int64_t heads) {
  const int64_t P = w.size(1), G = w.size(0) / (heads * P);
  return w.reshape({G, heads, P, P}).permute({1, 0, 2, 3}).reshape({heads, G * P, P});
}

}  // namespace

Tensor heads_product(const Tensor& h, const Tensor& w, const Tensor& b, int64_t heads) {
  const int64_t B = h.size(0), P = w.size(1);
  if (heads == 1 || P == 0) return b.defined() ? at::addmm(b, h, w.t()) : at::mm(h, w.t());
  const Tensor product = at::bmm(by_head(h, heads, P), weights_by_head(w, heads).transpose(1, 2))
                             .reshape({heads, B, w.size(0) / (heads * P), P})
                             .permute({1, 2, 0, 3})
                             .reshape({B, w.size(0)});
  return b.defined() ? product + b : product;
}

Tensor heads_grad_state(const Tensor& d, const Tensor& w, int64_t heads) {
  const int64_t B = d.size(0), P = w.size(1);
  if (heads == 1 || P == 0) return at::mm(d, w);
  return at::bmm(by_head(d, heads, P), weights_by_head(w, heads)).transpose(0, 1).reshape({B, heads * P});
}

Tensor heads_grad_weight(const Tensor& d, const Tensor& h, int64_t heads) {
  const int64_t P = h.size(1) / heads;
  if (heads == 1 || P == 0) return at::mm(d.t(), h);
  return at::bmm(by_head(d, heads, P).transpose(1, 2), by_head(h, heads, P))
      .reshape({heads, d.size(1) / (heads * P), P, P})
      .permute({1, 0, 2, 3})
      .reshape({d.size(1), P});
}

}  // namespace weft::rnn
