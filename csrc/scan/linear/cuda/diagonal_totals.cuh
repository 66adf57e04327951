// What many steps of a diagonal scan make of a state: x -> product x + value, in more digits and more range than the
// state has, with a bound of the terms that make up the value. Product and value may cancel to something far smaller
// than either, and a product overflows or underflows where the recurrence itself does not.
//
// A float state has totals in double. Where their range is left, the steps are run again: a product that overflows says
// so, and one that underflows takes along a share of the state that is nothing to a float, which may only not grow back
// unseen. A double state has totals in pairs of doubles, and a product a 64-bit power of two of its own. A complex
// state of floats has complex totals in double, which say what follows beside the size of the whole, not of each part.
#pragma once
#include <cstdint>

#include "scan/linear/cuda/state.cuh"

namespace weft::scan {

// A pair of doubles: |lo| is at most half a unit in the last place of hi. A sum or a product of two is off by 2^-103 of
// the terms.
struct Wide {
  double hi, lo;
};

// How far a state may be off, in units of its size or of its dtype's least normal number: a quarter of its own
// rounding, 26 or 55 digits. Of a total's rounding, 53 or 103 digits, that is 1 / kLost.
template <typename Acc>
struct Kept;
template <>
struct Kept<float> {
  static constexpr double kLeast = 0x1p-126, kLost = 0x1p-27;
};
template <>
struct Kept<double> {
  static constexpr double kLeast = 0x1p-1022, kLost = 0x1p-48;
};

template <>
struct Kept<Complex<float>> : Kept<float> {};

// A state as one word, and back.
__device__ inline double as_word(float x) {
  return x;
}
__device__ inline double as_word(double x) {
  return x;
}
__device__ inline double as_word(Complex<float> x) {
  // Of a NaN without its payload, which could make the word look like none.
  const auto bits = [](float v) { return uint64_t(v == v ? __float_as_uint(v) : 0x7fc00000u); };
  return __longlong_as_double(int64_t(bits(x.im) << 32 | bits(x.re)));
}
template <typename State>
__device__ inline State from_word(double word) {
  if constexpr (kComplex<State>) {
    const uint64_t bits = uint64_t(__double_as_longlong(word));
    return {__uint_as_float(uint32_t(bits)), __uint_as_float(uint32_t(bits >> 32))};
  } else {
    return State(word);
  }
}

// a + b exactly, and as a pair, for |a| >= |b|.
__device__ inline Wide ordered_sum(double a, double b) {
  const double sum = __dadd_rn(a, b);
  return {sum, __dadd_rn(b, -__dadd_rn(sum, -a))};
}

// The same for any order.
__device__ inline Wide exact_sum(double a, double b) {
  const double sum = __dadd_rn(a, b), b_part = __dadd_rn(sum, -a), a_part = __dadd_rn(sum, -b_part);
  return {sum, __dadd_rn(__dadd_rn(a, -a_part), __dadd_rn(b, -b_part))};
}

__device__ inline Wide product(const Wide& w, double factor) {
  const double main = __dmul_rn(w.hi, factor);
  return ordered_sum(main, fma(w.lo, factor, fma(w.hi, factor, -main)));
}

__device__ inline Wide product(const Wide& a, const Wide& b) {
  const double main = __dmul_rn(a.hi, b.hi);
  return ordered_sum(main, fma(a.lo, b.hi, fma(a.hi, b.lo, fma(a.hi, b.hi, -main))));
}

__device__ inline Wide sum(const Wide& a, const Wide& b) {
  const Wide high = exact_sum(a.hi, b.hi), low = exact_sum(a.lo, b.lo);
  const Wide part = ordered_sum(high.hi, __dadd_rn(high.lo, low.hi));
  return ordered_sum(part.hi, __dadd_rn(part.lo, low.lo));
}

__device__ inline Wide multiply_add(double a, const Wide& w, double b) {
  return sum(product(w, a), Wide{b, 0});
}

__device__ inline void scale(Wide& w, int e) {
  w.hi = scalbn(w.hi, e);
  w.lo = scalbn(w.lo, e);
}

// The power of two that brings a normal number into [0.5, 1); 0 for zero, inf and NaN.
__device__ inline int exponent(double v) {
  const int field = int(__double_as_longlong(v) >> 52) & 0x7ff;
  return field == 0 || field == 0x7ff ? 0 : field - 1022;
}

// 2^e for |e| <= 1022
__device__ inline double power_of_two(int e) {
  return __longlong_as_double(int64_t(1023 + e) << 52);
}

// A factor as m * 2^e with |m| in [0.5, 1).
struct Factor {
  double m;
  int e;
};
__device__ inline Factor split(double a) {
  const bool tiny = fabs(a) < 0x1p-1000;
  const double m = tiny ? a * 0x1p200 : a;
  const int e = exponent(m);
  // Two factors, because 2^-e alone may be subnormal.
  return {m * power_of_two(-e / 2) * power_of_two(-e - -e / 2), e - (tiny ? 200 : 0)};
}

// An exponent that scalbn takes; beyond it everything is zero or infinite.
__device__ inline int clamped(int64_t e) {
  return int(e > 100000 ? 100000 : e < -100000 ? -100000 : e);
}

// m * 2^e with |m.hi| in [0.5, 1) after normalise(), or m zero, inf or NaN.
struct Product {
  Wide m{1, 0};
  int64_t e = 0;

  __device__ void multiply(double a) {
    const Factor f = split(a);
    m = product(m, f.m);
    e += f.e;
  }
  __device__ void normalise() {
    const int by = exponent(m.hi);
    e += by;
    const double factor = power_of_two(-by);
    m.hi *= factor;
    m.lo *= factor;
  }
  __device__ Wide apply(double x) const {
    const Factor f = split(x);
    Wide result = product(m, f.m);
    scale(result, clamped(e + f.e));
    return result;
  }
};

// Between two calls of normalise() the mantissa cannot leave the range of a double.
constexpr int kFactorsPerNormalise = 4;

// The state that follows x, of `moved` + a value = `total`; false, and x as it was, where a finite state leads to one
// that is not finite or that is too small, beside the terms, to have all its digits. `roundings`: of a term on its way.
template <typename Acc>
__device__ inline bool accept(double roundings, double moved, double magnitude, double total, Acc& x) {
  const double lost = (fabs(moved) + magnitude) * (roundings * Kept<Acc>::kLost);
  const Acc next = Acc(total);
  const bool digits_left = (lost <= fabs(total)) | (lost <= Kept<Acc>::kLeast);  // not with a NaN
  // Once a channel is not finite it stays so, and nothing is left to save. Without branches, so that many go at once.
  const bool taken = (digits_left & bool(isfinite(next))) | !isfinite(x);
  x = taken ? next : x;
  return taken;
}

// What `steps` steps make of a state.
//   step       one step more
//   normalise  after every kFactorsPerNormalise of them, and after the last
//   then       the same after `later` steps more
//   follow     see accept()
//   each_word  f(i, word) for the words that it is kept in, kWords of them
template <typename Acc>
struct Total;

template <>
struct Total<float> {
  static constexpr int kWords = 3;
  double product = 1, value = 0;
  double magnitude = 0;  // what value would be if every a and b were positive: a bound of all terms it is made of

  __device__ void step(float a, float b) {
    product = __dmul_rn(product, double(a));
    value = fma(double(a), value, double(b));
    magnitude = fma(fabs(double(a)), magnitude, fabs(double(b)));
  }
  // So large that what underflows in four steps, for any state, is below the roundings of this bound.
  __device__ void normalise() { magnitude = fmax(magnitude, 0x1p-300); }
  __device__ void then(const Total& later) {
    value = fma(later.product, value, later.value);
    magnitude = fma(fabs(later.product), magnitude, later.magnitude);
    product = __dmul_rn(later.product, product);
  }
  __device__ bool follow(double roundings, float& x) const {
    const double moved = __dmul_rn(product, double(x));
    return accept(roundings, moved, magnitude, __dadd_rn(moved, value), x);
  }
  template <typename F>
  __device__ void each_word(F f) {
    f(0, product);
    f(1, value);
    f(2, magnitude);
  }
};

template <>
struct Total<Complex<float>> {
  static constexpr int kWords = 6;
  Complex<double> product{1, 0}, value{0, 0};
  double size = 1, magnitude = 0;  // size: a bound of abs(product) that needs no root

  // At least |a|, and not much more: an excess grows with every step. In float, whose range the square may leave:
  // above, nothing is taken from this total; below, the bound is far too small to matter.
  __device__ static double size_of(Complex<float> a) {
    const float square = fmaxf(fmaf(a.re, a.re, a.im * a.im), 0x1p-124f);
    const bool zero = a.re == 0 && a.im == 0;
    return zero ? 0 : double(square * rsqrtf(square)) * (1 + 0x1p-20);
  }
  __device__ static Complex<double> multiply(const Complex<double>& a, const Complex<double>& b) {
    return {fma(a.re, b.re, -__dmul_rn(a.im, b.im)), fma(a.re, b.im, __dmul_rn(a.im, b.re))};
  }

  __device__ void step(Complex<float> a, Complex<float> b) {
    const Complex<double> wide{a.re, a.im};
    product = multiply(wide, product);
    value = fused(wide, value, Complex<double>{b.re, b.im});
    const double factor = size_of(a);
    size = __dmul_rn(size, factor);
    magnitude = fma(factor, magnitude, double(fabsf(b.re) + fabsf(b.im)));
  }
  __device__ void normalise() { magnitude = fmax(magnitude, 0x1p-300); }
  __device__ void then(const Total& later) {
    value = fused(later.product, value, later.value);
    magnitude = fma(later.size, magnitude, later.magnitude);
    product = multiply(later.product, product);
    size = __dmul_rn(later.size, size);
  }
  __device__ bool follow(double roundings, Complex<float>& x) const {
    const Complex<double> moved = multiply(product, {x.re, x.im});
    const double re = __dadd_rn(moved.re, value.re), im = __dadd_rn(moved.im, value.im);
    const double lost = (fabs(moved.re) + fabs(moved.im) + magnitude) * (roundings * Kept<float>::kLost);
    const Complex<float> next{float(re), float(im)};
    const auto finite = [](Complex<float> z) { return bool(isfinite(z.re)) & bool(isfinite(z.im)); };
    const bool digits_left = (lost <= fmax(fabs(re), fabs(im))) | (lost <= Kept<float>::kLeast);
    const bool taken = (digits_left & finite(next)) | !finite(x);
    x = taken ? next : x;
    return taken;
  }
  template <typename F>
  __device__ void each_word(F f) {
    f(0, product.re);
    f(1, product.im);
    f(2, value.re);
    f(3, value.im);
    f(4, size);
    f(5, magnitude);
  }
};

template <>
struct Total<double> {
  static constexpr int kWords = 6;
  Product product;
  Wide value{0, 0};
  double magnitude = 0;

  __device__ void step(double a, double b) {
    product.multiply(a);
    value = multiply_add(a, value, b);
    magnitude = fma(fabs(a), magnitude, fabs(b));
  }
  __device__ void normalise() { product.normalise(); }
  __device__ void then(const Total& later) {
    const int shift = clamped(later.product.e);
    Wide moved = weft::scan::product(later.product.m, value);
    scale(moved, shift);
    value = sum(moved, later.value);
    magnitude = scalbn(fabs(later.product.m.hi) * magnitude, shift) + later.magnitude;
    product.m = weft::scan::product(later.product.m, product.m);
    product.e += later.product.e;
    product.normalise();
  }
  __device__ bool follow(double roundings, double& x) const {
    const Wide moved = product.apply(x);
    return accept(roundings, moved.hi, magnitude, sum(moved, value).hi, x);
  }
  template <typename F>
  __device__ void each_word(F f) {
    f(0, product.m.hi);
    f(1, value.hi);
    f(2, magnitude);
    double bits = __longlong_as_double(product.e);
    f(3, bits);
    product.e = __double_as_longlong(bits);
    f(4, product.m.lo);
    f(5, value.lo);
  }
};

}  // namespace weft::scan
