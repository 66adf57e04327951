// What many steps of a diagonal scan make of a state: x -> product x + value, in more digits and more range than the
// state has. A product overflows or underflows where the recurrence itself does not, and product and value may cancel
// to something far smaller than either. So they have at least twice the digits of the state (double for float, a pair
// of doubles for double), a product has a 64-bit power of two of its own, and a value comes with a bound of the terms
// that make it up.
#pragma once
#include <cstdint>

namespace weft::scan {

// A number with at least twice the digits of Acc. A sum or a product of two of them is off by 2^-kDigits of the terms.
template <typename Acc>
struct Wide;
template <>
struct Wide<float> {
  static constexpr double kDigits = 53;
  double hi;
};
template <>
struct Wide<double> {
  static constexpr double kDigits = 103;
  double hi, lo;  // |lo| is at most half a unit in the last place of hi
};

// How far a state may be off, in units of its size or of its dtype's least normal number: a quarter of its own
// rounding.
template <typename Acc>
struct Kept;
template <>
struct Kept<float> {
  static constexpr double kDigits = 26, kLeast = 0x1p-126;
};
template <>
struct Kept<double> {
  static constexpr double kDigits = 55, kLeast = 0x1p-1022;
};

// a + b exactly, and as a pair, for |a| >= |b|.
__device__ inline Wide<double> ordered_sum(double a, double b) {
  const double sum = __dadd_rn(a, b);
  return {sum, __dadd_rn(b, -__dadd_rn(sum, -a))};
}

// The same for any order.
__device__ inline Wide<double> exact_sum(double a, double b) {
  const double sum = __dadd_rn(a, b), b_part = __dadd_rn(sum, -a), a_part = __dadd_rn(sum, -b_part);
  return {sum, __dadd_rn(__dadd_rn(a, -a_part), __dadd_rn(b, -b_part))};
}

__device__ inline Wide<float> product(const Wide<float>& w, double factor) {
  return {__dmul_rn(w.hi, factor)};
}
__device__ inline Wide<double> product(const Wide<double>& w, double factor) {
  const double main = __dmul_rn(w.hi, factor);
  return ordered_sum(main, fma(w.lo, factor, fma(w.hi, factor, -main)));
}

__device__ inline Wide<float> product(const Wide<float>& a, const Wide<float>& b) {
  return {__dmul_rn(a.hi, b.hi)};
}
__device__ inline Wide<double> product(const Wide<double>& a, const Wide<double>& b) {
  const double main = __dmul_rn(a.hi, b.hi);
  return ordered_sum(main, fma(a.lo, b.hi, fma(a.hi, b.lo, fma(a.hi, b.hi, -main))));
}

__device__ inline Wide<float> sum(const Wide<float>& a, const Wide<float>& b) {
  return {__dadd_rn(a.hi, b.hi)};
}
__device__ inline Wide<double> sum(const Wide<double>& a, const Wide<double>& b) {
  const Wide<double> high = exact_sum(a.hi, b.hi), low = exact_sum(a.lo, b.lo);
  const Wide<double> part = ordered_sum(high.hi, __dadd_rn(high.lo, low.hi));
  return ordered_sum(part.hi, __dadd_rn(part.lo, low.lo));
}

__device__ inline Wide<float> multiply_add(float a, const Wide<float>& w, float b) {
  return {fma(double(a), w.hi, double(b))};
}
__device__ inline Wide<double> multiply_add(double a, const Wide<double>& w, double b) {
  return sum(product(w, a), Wide<double>{b, 0});
}

__device__ inline void scale(Wide<float>& w, int e) {
  w.hi = scalbn(w.hi, e);
}
__device__ inline void scale(Wide<double>& w, int e) {
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

// A factor as m * 2^e with |m| in [0.5, 1). A float is one as it is: four of them stay far inside the range of a
// double.
struct Factor {
  double m;
  int e;
};
__device__ inline Factor split(float a) {
  return {a, 0};
}
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
template <typename Acc>
struct Product {
  Wide<Acc> m{1};
  int64_t e = 0;

  __device__ void multiply(Acc a) {
    const Factor f = split(a);
    m = product(m, f.m);
    e += f.e;
  }
  __device__ void normalise() {
    const int by = exponent(m.hi);
    e += by;
    const double factor = power_of_two(-by);
    m.hi *= factor;
    if constexpr (sizeof(Acc) == 8) m.lo *= factor;
  }
  __device__ Wide<Acc> apply(Acc x) const {
    const Factor f = split(x);
    Wide<Acc> result = product(m, f.m);
    scale(result, clamped(e + f.e));
    return result;
  }
};

// Between two calls of normalise() the mantissa cannot leave the range of a double.
constexpr int kFactorsPerNormalise = 4;

// What `steps` steps make of a state.
template <typename Acc>
struct Total {
  Product<Acc> product;
  Wide<Acc> value{0};
  double magnitude = 0;  // what value would be if every a and b were positive: a bound of all terms it is made of

  __device__ void step(Acc a, Acc b) {
    product.multiply(a);
    value = multiply_add(a, value, b);
    magnitude = fma(fabs(double(a)), magnitude, fabs(double(b)));
  }

  // The same after `later` steps more.
  __device__ void then(const Total& later) {
    const int shift = clamped(later.product.e);
    Wide<Acc> moved = weft::scan::product(later.product.m, value);
    scale(moved, shift);
    value = sum(moved, later.value);
    magnitude = scalbn(fabs(later.product.m.hi) * magnitude, shift) + later.magnitude;
    product.m = weft::scan::product(later.product.m, product.m);
    product.e += later.product.e;
    product.normalise();
  }

  // The state that follows x; false, and x as it was, where a finite state leads to one that is not finite or that is
  // too small, beside the terms, to have all its digits. `roundings`: of a term on its way into value.
  __device__ bool follow(double roundings, Acc& x) const {
    const double lost = roundings * exp2(Kept<Acc>::kDigits - Wide<Acc>::kDigits);
    const Wide<Acc> moved = product.apply(x);
    const double total = sum(moved, value).hi;
    const Acc next = Acc(total);
    const bool digits_left =
        (fabs(moved.hi) + magnitude) * lost <= fmax(fabs(total), Kept<Acc>::kLeast);  // not with a NaN
    // Once a channel is not finite it stays so, and nothing is left to save.
    if (!(digits_left && isfinite(next)) && isfinite(x)) return false;
    x = next;
    return true;
  }
};

}  // namespace weft::scan
