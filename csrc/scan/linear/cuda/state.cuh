// What a diagonal scan carries from step to step: a number in acc_t of the tensors' elements, or a pair of numbers. The
// operations of both, so that kernels need not know which; a pair is loaded and stored at once.
#pragma once
#include "common/element.cuh"

namespace weft::scan {

template <typename R>
struct alignas(2 * sizeof(R)) Complex {
  R re, im;

  template <typename S>
  __device__ Complex& operator+=(const Complex<S>& other) {
    re += other.re, im += other.im;
    return *this;
  }
};

template <typename T>
struct StateOf {
  using State = acc_t<T>;
  using Sum = double;  // of many states
};
template <typename R>
struct StateOf<Complex<R>> {
  using State = Complex<R>;
  using Sum = Complex<double>;
};
template <typename T>
using state_t = typename StateOf<T>::State;
template <typename State>
using sum_t = typename StateOf<State>::Sum;
template <typename T>
constexpr bool kComplex = false;
template <typename R>
constexpr bool kComplex<Complex<R>> = true;

template <typename T>
__device__ __forceinline__ state_t<T> to_state(T x) {
  if constexpr (kComplex<T>) {
    return x;
  } else {
    return to_acc(x);
  }
}
template <typename T>
__device__ __forceinline__ T to_element(state_t<T> x) {
  if constexpr (kComplex<T>) {
    return x;
  } else {
    return from_acc<T>(x);
  }
}
// A sum of states as a state.
template <typename State>
__device__ __forceinline__ State rounded(sum_t<State> x) {
  if constexpr (kComplex<State>) {
    using R = decltype(State::re);
    return {R(x.re), R(x.im)};
  } else {
    return State(x);
  }
}

__device__ __forceinline__ float fused(float a, float x, float b) {
  return fmaf(a, x, b);
}
__device__ __forceinline__ double fused(double a, double x, double b) {
  return fma(a, x, b);
}
template <typename R>
__device__ __forceinline__ Complex<R> fused(Complex<R> a, Complex<R> x, Complex<R> b) {
  return {fused(-a.im, x.im, fused(a.re, x.re, b.re)), fused(a.im, x.re, fused(a.re, x.im, b.im))};
}

__device__ __forceinline__ float times(float a, float b) {
  return a * b;
}
__device__ __forceinline__ double times(double a, double b) {
  return a * b;
}
template <typename R>
__device__ __forceinline__ Complex<R> times(Complex<R> a, Complex<R> b) {
  return {fused(a.re, b.re, -(a.im * b.im)), fused(a.re, b.im, a.im * b.re)};
}

__device__ __forceinline__ float conjugate(float x) {
  return x;
}
__device__ __forceinline__ double conjugate(double x) {
  return x;
}
template <typename R>
__device__ __forceinline__ Complex<R> conjugate(Complex<R> x) {
  return {x.re, -x.im};
}
// A as the scan itself takes it, or as its gradients do.
template <bool kGradients, typename State>
__device__ __forceinline__ State factor(State a) {
  return kGradients ? conjugate(a) : a;
}

}  // namespace weft::scan
