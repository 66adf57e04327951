// What a kernel of a slice is given on either device: pointers, strides and sizes, no torch header. As LinearScan
// (scan/linear/linear_scan_args.h), everything is in the order of processing; strides are in elements, channels lie one
// after another.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"

namespace weft::scan {

// The product of all steps of a diagonal A.
struct SliceProduct {
  const void* A;
  int64_t A_t, A_b;
  int64_t T, B, H;
  DType dtype;  // f64, f32, or bf16, whose values are floats
};

// The product of all steps of a dense A, in the order of processing; element (i, k) of a step is A_row and A_col away.
struct DenseProduct {
  const void* A;
  int64_t A_t, A_b, A_row, A_col;
  int64_t T, B, H;
  bool wide;  // double, else float
};

// The message of one rank: packed products, values (B, H), and whether anything leaves the slice. Products are (B, H)
// of a diagonal A, else (B, H, H) or, shared by the batch, (1, H, H). Numbers of int32, of int64 for doubles.
constexpr int64_t slice_message_numbers(int64_t products, int64_t channels) {
  return products + channels + 1;
}

// What a rank tells of its slice, float, where chunk maps are what its scan goes by.
struct SliceMaps {
  float* maps;       // of all chunks, and behind them the states at their starts
  float* value;      // (B, H)
  int32_t* message;  // null: nobody asks
  int64_t rows;      // 1, or B: of products
  int64_t products;  // numbers of them
  WEFT_HOST_DEVICE int32_t* values() const { return message + products; }
};

// States between slices, of the messages of all ranks in order of rank.
struct SliceStates {
  const void* messages;
  int64_t ranks, B, H, matrices, order;  // `matrices`: 0 diagonal, else 1 or B; `order`: this rank's in the scan
  bool reverse, shares, wide;            // `shares`: behind a message lies its share of what enters the first
  void *entered, *end;                   // (B, H): the state that enters this slice, and the one that leaves the last
  double* products;                      // (ranks, ...), in the order of the scan; zero where nothing comes in
  int32_t* came;                         // whether anything comes in
  WEFT_HOST_DEVICE int64_t product_numbers() const { return matrices > 0 ? matrices * H * H : B * H; }
  // Of the i-th rank in the order of the scan.
  template <typename Number>
  WEFT_HOST_DEVICE const Number* message(int64_t i) const {
    return static_cast<const Number*>(messages) +
           (reverse ? ranks - 1 - i : i) * (slice_message_numbers(product_numbers(), B * H) + shares * B * H);
  }
};

// Gradients of the states between slices, in the order of the scan: `messages` (ranks, B, H), in order of rank, what
// each rank gives on where nothing enters its end; or (ranks, 2, B, H), where the second is its share of what enters
// the last.
struct SliceGradients {
  const void* messages;
  const double* products;
  int64_t ranks, B, H, matrices, order;  // as of SliceStates
  bool reverse, shares, wide;
  void* left;  // (B, H), of the state that leaves this slice
  // Numbers of the i-th rank in the order of the scan, and where `shares`, its share behind them.
  template <typename T>
  WEFT_HOST_DEVICE const T* message(int64_t i) const {
    return static_cast<const T*>(messages) + (reverse ? ranks - 1 - i : i) * (shares ? 2 : 1) * B * H;
  }
  // Nothing has entered the last one's end, whose product then is nobody's.
  WEFT_HOST_DEVICE bool enters(int64_t i) const { return shares || i < ranks - 1; }
};

// x[k] += v[k], where v[k] = A[k] v[k-1] and v[-1] is the state. With gradients, x is the gradient of b, grad_A gets
// v[k] times the x before it, and v[k] = A[k-1] v[k-1], v[0] being the state.
struct SliceMend {
  const void* A;
  int64_t A_t, A_b;
  const void* state;    // (B, H)
  const int32_t* came;  // whether there is one; null: yes
  void* x;
  int64_t x_t, x_b;
  const void* before;  // at each step the x before it in the scan; the last step is given `first`. Null: no grad_A
  int64_t before_t, before_b;
  const void* first;  // (B, H), or null for zeros
  void* grad_A;
  int64_t grad_A_t, grad_A_b;
  int64_t T, B, H;
  bool gradients;
  DType dtype;  // of steps: f64, f32, or bf16, whose rows (B, H) are floats
};

// Below this power of two a product makes zero of every state, or has made it on the way.
template <typename T>
constexpr int kProductIsZero = sizeof(T) == 8 ? -2300 : -320;

// m 2^e packed: a sign, one bit more of exponent and one less of mantissa than a state's number has, so that every
// ratio of two states is there. What lies beyond saturates: below it is zero, above it the largest number.
template <typename T>
struct Packed {
  using Number = int32_t;
  static constexpr int kExponent = 9, kMantissa = 22;
};
template <>
struct Packed<double> {
  using Number = int64_t;
  static constexpr int kExponent = 12, kMantissa = 51;
};

union DoubleBits {
  double number;
  int64_t bits;
};

WEFT_HOST_DEVICE inline bool is_finite_bits(double x) {
  return (DoubleBits{x}.bits >> 52 & 0x7ff) != 0x7ff;
}

// Of a finite number that is not zero: m in [1, 2) with the sign, and its exponent.
WEFT_HOST_DEVICE inline double mantissa_of(double x, int64_t& exponent) {
  DoubleBits u{x};
  int64_t field = u.bits >> 52 & 0x7ff;
  if (field == 0) {  // subnormal
    u.number = x * 0x1p64;
    field = (u.bits >> 52 & 0x7ff) - 64;
  }
  exponent += field - 1023;
  u.bits = (u.bits & ~(0x7ffll << 52)) | 1023ll << 52;
  return u.number;
}

// A product in the making: m 2^e, with m far from the ends of a double's range.
struct Scaled {
  double m = 1;
  int64_t e = 0;
  // After so many factors at most of a float, each of one of a double whose mantissa is taken.
  WEFT_HOST_DEVICE void rescale() {
    if (m != 0 && is_finite_bits(m)) m = mantissa_of(m, e);
  }
  // The same where the next factors could leave the range.
  WEFT_HOST_DEVICE void rescale_if_far() {
    const double size = m < 0 ? -m : m;
    if (!(size > 0x1p-300 && size < 0x1p300)) rescale();
  }
  WEFT_HOST_DEVICE void multiply(float a) { m *= double(a); }
  WEFT_HOST_DEVICE void multiply(double a) { m *= a != 0 && is_finite_bits(a) ? mantissa_of(a, e) : a; }
  WEFT_HOST_DEVICE void multiply(const Scaled& other) {
    m *= other.m, e += other.e;
    rescale();
  }
  // Of the whole, to a few: that of a zero is far below every other.
  WEFT_HOST_DEVICE int64_t exponent() const {
    int64_t found = e;
    if (m == 0) return -(1ll << 40);
    if (is_finite_bits(m)) mantissa_of(m, found);
    return found;
  }
  template <typename T>
  WEFT_HOST_DEVICE bool is_zero() const {
    return exponent() < kProductIsZero<T>;
  }
};
// Factors of a float between two calls of rescale, or of rescale_if_far: their product with m a double holds.
constexpr int kFactors = 4;

template <typename T>
WEFT_HOST_DEVICE typename Packed<T>::Number pack_product(Scaled p) {
  using P = Packed<T>;
  constexpr int64_t most = (1ll << P::kExponent) - 1, bias = most >> 1, largest = (most << P::kMantissa) - 1;
  constexpr int drop = 52 - P::kMantissa;
  p.rescale();
  const DoubleBits u{p.m};
  const int64_t sign = u.bits >> 63 & 1;
  int64_t magnitude;
  if (!is_finite_bits(p.m)) {
    magnitude = (most << P::kMantissa) + (p.m != p.m);
  } else if (p.m == 0 || p.e + 1 + bias <= 0) {
    magnitude = 0;
  } else if (p.e + 1 + bias >= most) {
    magnitude = largest;
  } else {
    // Rounding may carry into the exponent. Mantissas are those of [1/2, 1), as frexp's.
    const int64_t mantissa = ((u.bits & ((1ll << 52) - 1)) + (1ll << (drop - 1))) >> drop;
    magnitude = ((p.e + 1 + bias) << P::kMantissa) + mantissa;
    if (magnitude > largest) magnitude = largest;
  }
  const auto unsigned_number = uint64_t(magnitude) | uint64_t(sign) << (P::kExponent + P::kMantissa);
  return typename P::Number(unsigned_number);
}

// As a double; what is beyond its range saturates.
template <typename T>
WEFT_HOST_DEVICE double unpack_product(typename Packed<T>::Number number) {
  using P = Packed<T>;
  constexpr int64_t most = (1ll << P::kExponent) - 1, bias = most >> 1;
  const int64_t bits = int64_t(number), magnitude = bits & int64_t((1ull << (P::kExponent + P::kMantissa)) - 1);
  const int64_t field = magnitude >> P::kMantissa, mantissa = magnitude & ((1ll << P::kMantissa) - 1);
  DoubleBits u;
  if (field == 0) {
    u.bits = 0;
  } else if (field == most) {
    u.bits = 0x7ffll << 52 | int64_t(mantissa != 0) << 51;
  } else {
    const int64_t exponent = field - bias - 1 + 1023;  // of a double
    u.bits = mantissa << (52 - P::kMantissa);
    if (exponent >= 2047) {
      u.bits = (0x7ffll << 52) - 1;
    } else if (exponent > 0) {
      u.bits |= exponent << 52;
    } else {
      u.bits |= 1023ll << 52;
      const int64_t rest = exponent - 1023;  // in two powers that are doubles
      const int64_t part = rest < -1022 ? -1022 : rest;
      u.number = u.number * DoubleBits{.bits = (part + 1023) << 52}.number;
      if (rest - part < -100) {
        u.number = 0;
      } else if (rest != part) {
        u.number = u.number * DoubleBits{.bits = (rest - part + 1023) << 52}.number;
      }
    }
  }
  return bits < 0 ? -u.number : u.number;
}

// Whose messages are read before what they say is used: a channel's numbers lie far apart, and each is waited for.
constexpr int kRanksAhead = 8;

// The states between slices of one channel: its products and values are `stride` numbers apart from rank to rank.
template <typename T>
WEFT_HOST_DEVICE void carry_between_slices(const SliceStates& s, int64_t channel) {
  using Number = typename Packed<T>::Number;
  const int64_t channels = s.B * s.H;
  double state = 0;
  bool came = false;
  for (int64_t first = 0; first < s.ranks; first += kRanksAhead) {
    Number products[kRanksAhead];
    T values[kRanksAhead];
    bool leaves[kRanksAhead];
    for (int k = 0; k < kRanksAhead; ++k) {
      const Number* const message = s.message<Number>(first + k < s.ranks ? first + k : s.ranks - 1);
      products[k] = message[channel];
      __builtin_memcpy(values + k, message + channels + channel, sizeof(T));
      leaves[k] = message[2 * channels] != 0;
    }
    for (int k = 0; k < kRanksAhead; ++k) {
      const int64_t i = first + k;
      if (i >= s.ranks) break;
      if (i == s.order) {
        static_cast<T*>(s.entered)[channel] = T(state);
        if (channel == 0) *s.came = came;
      }
      const double product = came ? unpack_product<T>(products[k]) : 0.0;
      s.products[i * channels + channel] = product;
      state = came ? product * state + double(values[k]) : double(values[k]);
      came = came || leaves[k];
    }
  }
  static_cast<T*>(s.end)[channel] = T(state);
}

// The gradient that enters this slice's end, of one channel: products transposed, from the last rank to the first.
template <typename T>
WEFT_HOST_DEVICE void carry_back_between_slices(const SliceGradients& s, int64_t channel) {
  const int64_t channels = s.B * s.H;
  double state = 0;
  for (int64_t i = 0; s.shares && i < s.ranks; ++i) state += double(s.message<T>(i)[channels + channel]);
  for (int64_t last = s.ranks - 1; last > s.order; last -= kRanksAhead) {
    double products[kRanksAhead], values[kRanksAhead];
    for (int k = 0; k < kRanksAhead; ++k) {
      const int64_t i = last - k > s.order ? last - k : last;
      products[k] = s.products[i * channels + channel], values[k] = double(s.message<T>(i)[channel]);
    }
    for (int k = 0; k < kRanksAhead; ++k) {
      if (last - k <= s.order) break;
      state = s.enters(last - k) ? products[k] * state + values[k] : values[k];
    }
  }
  static_cast<T*>(s.left)[channel] = T(state);
}

}  // namespace weft::scan
