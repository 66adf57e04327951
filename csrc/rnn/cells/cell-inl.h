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
  static WEFT_INLINE Vec positive(Vec y, Vec a, Vec b) { return y > T(0) ? a : b; }
  static WEFT_INLINE Vec exp(Vec x) { return Simd<T>::exp(x); }
  static WEFT_INLINE Vec ratio(Vec a, Vec b) { return a / b; }
  static WEFT_INLINE Vec like(Vec, double number) { return Simd<T>::broadcast(T(number)); }
  // log(1 + u) of u = exp(-|x|) is 2 atanh(r) with r = u / (2 + u); above the square root of 2 half of 1 + u is taken,
  // so that |r| < 0.172 and a few terms do.
  static WEFT_INLINE Vec log_sigmoid(Vec x) {
    const Vec u = exp(x < T(0) ? x : -x);
    const auto large = u > T(0.41421356);
    const Vec r = (large ? u - T(1) : u) / (u + (large ? like(x, 3) : like(x, 2))), z = r * r;
    constexpr int kTerms = sizeof(T) == 4 ? 5 : 11;
    Vec p = like(x, 2.0 / (2 * kTerms - 1));
#pragma GCC unroll 16
    for (int k = kTerms - 1; k > 0; --k) p = p * z + T(2.0 / (2 * k - 1));
    return (x < T(0) ? x : Vec{}) - (p * r + (large ? like(x, 0.69314718055994530942) : Vec{}));
  }
};

// h after the step. `gate`: the sums before the nonlinearities, a vector for each gate block; of a gate whose sides
// stay apart the recurrent side's, and `apart` its input side. `h` and `c`: before the step, where the cell reads them;
// c, which stands for all of the other states, c_stride apart, is replaced. What is saved of the gates is left in
// `saved`, H apart, unless that is null.
template <typename T, Cell C>
WEFT_INLINE typename Simd<T>::Vec cell_forward(const T* gate, const T* apart, const T* h, T* c, int64_t c_stride,
                                               T* saved, int64_t H, int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Tr = Traits<C>;
  constexpr int kOthers = Tr::kStates - 1;
  Vec pre[Tr::kGates], input{}, before{}, others[kOthers + 1], kept[Tr::kSaved + 1];
#pragma GCC unroll 8
  for (int g = 0; g < Tr::kGates; ++g) pre[g] = S::load(gate + g * S::kLanes);
  if constexpr (Tr::kApart >= 0) input = S::load(apart);
  if constexpr (Tr::kBefore == StateName::kH) before = S::load(h);
#pragma GCC unroll 4
  for (int s = 0; s < kOthers; ++s) others[s] = S::load(c + s * c_stride);
  const Vec next = Tr::template forward<VectorMath<T>>(pre, input, before, others, kept);
#pragma GCC unroll 4
  for (int s = 0; s < kOthers; ++s) S::store(c + s * c_stride, others[s]);
  if (Tr::kSaved > 0 && saved != nullptr) {
#pragma GCC unroll 8
    for (int g = 0; g < Tr::kSaved; ++g) S::store(saved + g * H, kept[g], lanes);
  }
  return next;
}

// The gradients before the nonlinearities. `grad`: of h after the step. `y`: that h, `c`: the kept states after it, H
// apart like `gates`, as saved, where the cell reads them. `before`: the states before the step that the cell reads, H
// apart, or null for zeros. `grad_c`: what arrives at the kept states after the step from outside, or null. `carried`:
// set to what reaches h before the step past the weights, where something does. `carried_c`: the gradients of the other
// states after the step, c_stride apart, replaced by those before it.
template <typename T, Cell C>
struct CellGrads {
  typename Simd<T>::Vec d[Traits<C>::kChain];
};
template <typename T, Cell C>
WEFT_INLINE CellGrads<T, C> cell_backward(typename Simd<T>::Vec grad, const T* y, const T* gates, int64_t H,
                                          const T* before, const T* c, const T* grad_c, T* carried, T* carried_c,
                                          int64_t c_stride, int64_t lanes) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Tr = Traits<C>;
  constexpr int kOthers = Tr::kStates - 1, kRead = states_read(C);
  Vec kept[Tr::kSaved + 1], after[Tr::kKept + 1] = {}, previous[kRead + 1] = {}, direct[kOthers + 1] = {};
#pragma GCC unroll 8
  for (int g = 0; g < Tr::kSaved; ++g) kept[g] = S::load(gates + g * H, lanes);
  if constexpr (Tr::kAfter == StateName::kH) after[0] = S::load(y, lanes);
  if constexpr (Tr::kAfter == StateName::kC) {
#pragma GCC unroll 4
    for (int s = 0; s < Tr::kKept; ++s) after[s] = S::load(c + s * H, lanes);
  }
  if (kRead > 0 && before != nullptr) {
#pragma GCC unroll 4
    for (int s = 0; s < kRead; ++s) previous[s] = S::load(before + s * H, lanes);
  }
  const auto arrive = [&](Vec from_h, int s = 0) __attribute__((always_inline)) {
    Vec sum = S::load(carried_c + s * c_stride) + from_h;
    if (s < Tr::kKept && grad_c != nullptr) sum += S::load(grad_c + s * H, lanes);
    return sum;
  };
  CellGrads<T, C> grads;
  Tr::template backward<VectorMath<T>>(grad, arrive, kept, after, previous, grads.d, direct);
  if constexpr (Tr::kBefore == StateName::kH) S::store(carried, direct[0]);
  if constexpr (Tr::kBefore == StateName::kC) {
#pragma GCC unroll 4
    for (int s = 0; s < kOthers; ++s) S::store(carried_c + s * c_stride, direct[s]);
  }
  return grads;
}

}  // namespace
}  // namespace weft::rnn::WEFT_ISA
