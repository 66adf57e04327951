// The products of a recurrence over heads in ATen operations: w (G*H, P) holds for each of G gates the P = H / heads
// rows of each head, which multiply the head's own P values. One head: plain products.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace weft::rnn {

// h (B,H) times w, plus b (G*H) where it is defined: (B,G*H).
at::Tensor heads_product(const at::Tensor& h, const at::Tensor& w, const at::Tensor& b, int64_t heads);
// What d (B,G*H), the gradient of that, makes of the gradients of h (B,H) and of w (G*H,P).
at::Tensor heads_grad_state(const at::Tensor& d, const at::Tensor& w, int64_t heads);
at::Tensor heads_grad_weight(const at::Tensor& d, const at::Tensor& h, int64_t heads);

}  // namespace weft::rnn
