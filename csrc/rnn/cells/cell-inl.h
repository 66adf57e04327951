// A time step of a cell for one vector of hidden units, past the matrix product. Included like common/cpu/simd-inl.h,
// whose rule on the standard library's templates holds here, too. `lanes` is how many units of the vector there are, at
// most; beyond, what is read is zero and nothing is written.
#pragma once
#include "common/cpu/simd-inl.h"
#include "rnn/cells/cell.h"

namespace weft::rnn::WEFT_ISA {
namespace {

using namespace weft::cpu::WEFT_ISA;

// h after the step. `gate`: the sums before the nonlinearities, a vector for each gate block; gru's third is W_hn h +
// b_hn, to which the input side `input_n` comes when r has multiplied it. `h`: before the step, for gru. `c`: for lstm,
// replaced. The gates after their nonlinearities are left in `saved`, H apart, unless that is null.
template <typename T, Cell C>
WEFT_INLINE typename Simd<T>::Vec cell_forward(const T* gate, const T* input_n, const T* h, T* c, T* saved, int64_t H,
                                               int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kLanes = S::kLanes;
  if constexpr (C == Cell::kRnnTanh) {
    return S::tanh(S::load(gate));
  } else if constexpr (C == Cell::kRnnRelu) {
    return S::relu(S::load(gate));
  } else if constexpr (C == Cell::kGru) {
    const Vec reset = S::sigmoid(S::load(gate));
    const Vec update = S::sigmoid(S::load(gate + kLanes));
    const Vec m = S::load(gate + 2 * kLanes);
    const Vec n = S::tanh(S::load(input_n) + reset * m);
    if (saved != nullptr) {
      S::store(saved, reset, lanes);
      S::store(saved + H, update, lanes);
      S::store(saved + 2 * H, n, lanes);
      S::store(saved + 3 * H, m, lanes);
    }
    return n + update * (S::load(h) - n);
  } else {
    const Vec in = S::sigmoid(S::load(gate));
    const Vec forget = S::sigmoid(S::load(gate + kLanes));
    const Vec g = S::tanh(S::load(gate + 2 * kLanes));
    const Vec out = S::sigmoid(S::load(gate + 3 * kLanes));
    const Vec next = forget * S::load(c) + in * g;
    S::store(c, next);
    if (saved != nullptr) {
      S::store(saved, in, lanes);
      S::store(saved + H, forget, lanes);
      S::store(saved + 2 * H, g, lanes);
      S::store(saved + 3 * H, out, lanes);
    }
    return out * S::tanh(next);
  }
}

// The gradients before the nonlinearities. `grad`: of h after the step. `y`: that h, for the rnns. `gates`: as saved.
// `before`: h (gru) or c (lstm) before the step. `c`: after it, and `grad_c` what arrives at it from outside, or null.
// `carried`: for gru, set to what reaches h before the step past the weights. `carried_c`: for lstm, the gradient of c
// after the step, replaced by that of c before it.
template <typename T, Cell C>
struct CellGrads {
  typename Simd<T>::Vec d[chain_blocks(C)];  // gru: r, z, n, m; lstm: i, f, g, o
};
template <typename T, Cell C>
WEFT_INLINE CellGrads<T, C> cell_backward(typename Simd<T>::Vec grad, const T* y, const T* gates, int64_t H,
                                          typename Simd<T>::Vec before, const T* c, const T* grad_c, T* carried,
                                          T* carried_c, int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  if constexpr (C == Cell::kRnnTanh) {
    const Vec h = S::load(y, lanes);
    return {{grad * (T(1) - h * h)}};
  } else if constexpr (C == Cell::kRnnRelu) {
    return {{S::load(y, lanes) <= T(0) ? Vec{} : grad}};
  } else if constexpr (C == Cell::kGru) {
    const Vec reset = S::load(gates, lanes), update = S::load(gates + H, lanes), n = S::load(gates + 2 * H, lanes),
              m = S::load(gates + 3 * H, lanes);
    const Vec dn = grad * (T(1) - update) * (T(1) - n * n);
    S::store(carried, grad * update);
    return {{dn * m * reset * (T(1) - reset), grad * (before - n) * update * (T(1) - update), dn, dn * reset}};
  } else {
    const Vec in = S::load(gates, lanes), forget = S::load(gates + H, lanes), g = S::load(gates + 2 * H, lanes),
              out = S::load(gates + 3 * H, lanes);
    const Vec squashed = S::tanh(S::load(c, lanes));
    Vec dc = S::load(carried_c) + grad * out * (T(1) - squashed * squashed);
    if (grad_c != nullptr) dc += S::load(grad_c, lanes);
    S::store(carried_c, dc * forget);
    return {{dc * g * in * (T(1) - in), dc * before * forget * (T(1) - forget), dc * in * (T(1) - g * g),
             grad * squashed * out * (T(1) - out)}};
  }
}

}  // namespace
}  // namespace weft::rnn::WEFT_ISA
