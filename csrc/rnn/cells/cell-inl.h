// A time step of a cell for one vector of hidden units, past the matrix product. Included like common/cpu/simd-inl.h,
// whose rule on the standard library's templates holds here, too. `lanes` is how many units of the vector there are, at
// most; beyond, what is read is zero and nothing is written.
#pragma once
#include "common/cpu/simd-inl.h"
#include "rnn/cells/cells.h"

namespace weft::rnn::WEFT_ISA {
namespace {

using namespace weft::cpu::WEFT_ISA;

// The math of a cell's step for a vector, see cells.h.
template <typename T>
struct VectorMath {
  using Vec = typename Simd<T>::Vec;
  static constexpr T kOne = T(1);
  static WEFT_INLINE Vec sigmoid(Vec x) { return Simd<T>::sigmoid(x); }
  static WEFT_INLINE Vec tanh(Vec x) { return Simd<T>::tanh(x); }
  static WEFT_INLINE Vec relu(Vec x) { return Simd<T>::relu(x); }
  static WEFT_INLINE Vec where_positive(Vec y, Vec x) { return y <= T(0) ? Vec{} : x; }
};

// h after the step. `gate`: the sums before the nonlinearities, a vector for each gate block; of a gate whose sides
// stay apart the recurrent side's, and `apart` its input side. `h` and `c`: before the step, where the cell reads them;
// c is replaced. What is saved of the gates is left in `saved`, H apart, unless that is null.
template <typename T, Cell C>
WEFT_INLINE typename Simd<T>::Vec cell_forward(const T* gate, const T* apart, const T* h, T* c, T* saved, int64_t H,
                                               int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Tr = Traits<C>;
  Vec pre[Tr::kGates], input{}, before{}, cell{}, kept[Tr::kSaved + 1];
#pragma GCC unroll 8
  for (int g = 0; g < Tr::kGates; ++g) pre[g] = S::load(gate + g * S::kLanes);
  if constexpr (Tr::kApart >= 0) input = S::load(apart);
  if constexpr (Tr::kBefore == StateName::kH) before = S::load(h);
  if constexpr (Tr::kStates == 2) cell = S::load(c);
  const Vec next = Tr::template forward<VectorMath<T>>(pre, input, before, cell, kept);
  if constexpr (Tr::kStates == 2) S::store(c, cell);
  if (Tr::kSaved > 0 && saved != nullptr) {
#pragma GCC unroll 8
    for (int g = 0; g < Tr::kSaved; ++g) S::store(saved + g * H, kept[g], lanes);
  }
  return next;
}

// The gradients before the nonlinearities. `grad`: of h after the step. `y`: that h, `c`: the other state after it,
// where the cell reads them. `gates`: as saved. `before`: the state before the step that the cell reads. `grad_c`: what
// arrives at c after the step from outside, or null. `carried`: set to what reaches h before the step past the weights,
// where something does. `carried_c`: the gradient of c after the step, replaced by that of c before it.
template <typename T, Cell C>
struct CellGrads {
  typename Simd<T>::Vec d[Traits<C>::kChain];
};
template <typename T, Cell C>
WEFT_INLINE CellGrads<T, C> cell_backward(typename Simd<T>::Vec grad, const T* y, const T* gates, int64_t H,
                                          typename Simd<T>::Vec before, const T* c, const T* grad_c, T* carried,
                                          T* carried_c, int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Tr = Traits<C>;
  Vec kept[Tr::kSaved + 1], after{}, direct{};
#pragma GCC unroll 8
  for (int g = 0; g < Tr::kSaved; ++g) kept[g] = S::load(gates + g * H, lanes);
  if constexpr (Tr::kAfter == StateName::kH) after = S::load(y, lanes);
  if constexpr (Tr::kAfter == StateName::kC) after = S::load(c, lanes);
  const auto arrive = [&](Vec from_h) __attribute__((always_inline)) {
    Vec sum = S::load(carried_c) + from_h;
    if (grad_c != nullptr) sum += S::load(grad_c, lanes);
    return sum;
  };
  CellGrads<T, C> grads;
  Tr::template backward<VectorMath<T>>(grad, arrive, kept, after, before, grads.d, direct);
  if constexpr (Tr::kBefore == StateName::kH) S::store(carried, direct);
  if constexpr (Tr::kBefore == StateName::kC) S::store(carried_c, direct);
  return grads;
}

}  // namespace
}  // namespace weft::rnn::WEFT_ISA
