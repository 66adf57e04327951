// The CPU kernels of slice_product: included once per instruction set, like common/cpu/simd-inl.h, whose rule on the
// standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "scan/slices/cpu/slice_product_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using scan::DenseProduct;
using scan::DoubleBits;

constexpr int64_t kOfZero = -(1ll << 40);       // the exponent of a zero: below every other
constexpr int64_t kOfZeroColumn = kOfZero / 2;  // that of a column of zeros, which may meet other exponents

// Of x as a number of [1, 2), that of what is not finite being 0.
WEFT_INLINE int64_t exponent_of(double x) {
  if (x == 0) return kOfZero;
  int64_t exponent = 0;
  if (scan::is_finite_bits(x)) scan::mantissa_of(x, exponent);
  return exponent;
}

WEFT_INLINE double power_of_two(int64_t e) {
  return DoubleBits{.bits = (e + 1023) << 52}.number;
}

// x 2^e
WEFT_INLINE double scaled(double x, int64_t e) {
  while (e != 0 && x != 0) {
    const int64_t part = e < -1022 ? -1022 : e > 1023 ? 1023 : e;
    x *= power_of_two(part);
    e -= part;
    if (!scan::is_finite_bits(x)) break;
  }
  return x;
}

// to = left * right, by rows of `size` numbers; `left` has whole fours of rows.
template <int kVectors>
WEFT_INLINE void columns_of_product(const double* left, const double* right, double* to, int64_t H, int64_t size) {
  using S = Simd<double>;
  for (int64_t i = 0; i < H; i += 4) {
    S::Vec sums[4][kVectors] = {};
    for (int64_t k = 0; k < H; ++k) {
      S::Vec row[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) row[v] = S::load(right + k * size + v * S::kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const auto a = S::broadcast(left[(i + r) * size + k]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[r][v] += a * row[v];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) S::store(to + (i + r) * size + v * S::kLanes, sums[r][v]);
    }
  }
}

WEFT_INLINE void multiply(const double* left, const double* right, double* to, int64_t H) {
  constexpr int64_t kLanes = Simd<double>::kLanes;
  const int64_t size = scan::product_row(H);
  int64_t j = 0;
  for (; j + 2 * kLanes <= size; j += 2 * kLanes) columns_of_product<2>(left, right + j, to + j, H, size);
  for (; j < size; j += kLanes) columns_of_product<1>(left, right + j, to + j, H, size);
}

// Brings the largest number of every column near 1. Whether all columns are zero to every state.
template <typename E>
WEFT_INLINE bool rescale(double* matrix, int64_t* exponents, int64_t H, double* scratch) {
  const int64_t size = scan::product_row(H);
  for (int64_t j = 0; j < size; ++j) scratch[j] = 0;
  for (int64_t i = 0; i < H; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const double number = __builtin_fabs(matrix[i * size + j]);
      const bool stays = number <= scratch[j] || scratch[j] != scratch[j];  // a NaN does, and one that comes is taken
      scratch[j] = stays ? scratch[j] : number;
    }
  }
  bool zero = true;
  for (int64_t j = 0; j < H; ++j) {
    const int64_t e = exponent_of(scratch[j]);
    zero = zero && scan::is_finite_bits(scratch[j]) && exponents[j] + e < scan::kProductIsZero<E>;
    const bool takes = e > -1000 && e < 1000;
    exponents[j] = scratch[j] == 0 ? kOfZeroColumn : exponents[j] + (takes ? e : 0);
    scratch[j] = takes ? power_of_two(-e) : 1;
  }
  for (int64_t i = 0; i < H; ++i) {
    for (int64_t j = 0; j < size; ++j) matrix[i * size + j] *= scratch[j];
  }
  return zero;
}

// Column k of an earlier product times row k of what follows: an exponent of column k of the later one. What is
// multiplied then is at most 1.
WEFT_INLINE void take_exponents(const int64_t* later, double* matrix, int64_t* exponents, int64_t H) {
  const int64_t size = scan::product_row(H);
  for (int64_t j = 0; j < H; ++j) {
    int64_t largest = kOfZero;
    for (int64_t k = 0; k < H; ++k) {
      if (matrix[k * size + j] == 0) continue;
      const int64_t e = exponent_of(matrix[k * size + j]) + later[k];
      largest = e > largest ? e : largest;
    }
    if (largest == kOfZero) continue;
    for (int64_t k = 0; k < H; ++k) {
      matrix[k * size + j] = scaled(matrix[k * size + j], later[k] - largest);
    }
    exponents[j] += largest;
  }
}

template <typename E>
void steps(const DenseProduct& p, int64_t row, int64_t first, int64_t last, double* matrix, int64_t* exponents) {
  const int64_t H = p.H, size = scan::product_row(H), numbers = scan::product_numbers(H);
  double *now = matrix, *next = matrix + numbers, *const step = next + numbers;
  for (int64_t i = 0; i < 3 * numbers; ++i) matrix[i] = 0;
  for (int64_t j = 0; j < H; ++j) now[j * size + j] = 1, exponents[j] = 0;
  for (int64_t t = first; t < last; ++t) {
    const E* const A = static_cast<const E*>(p.A) + t * p.A_t + row * p.A_b;
    for (int64_t i = 0; i < H; ++i) {
      const E* const from = A + i * p.A_row;
      double* const to = step + i * size;
      if (p.A_col == 1) {
        for (int64_t k = 0; k < H; ++k) to[k] = double(from[k]);
      } else {
        for (int64_t k = 0; k < H; ++k) to[k] = double(from[k * p.A_col]);
      }
    }
    if constexpr (sizeof(E) == 8) {  // a double's own range
      int64_t* const of_columns = exponents + H;
      for (int64_t k = 0; k < H; ++k) {
        int64_t largest = kOfZero;
        for (int64_t i = 0; i < H; ++i) {
          const int64_t e = exponent_of(step[i * size + k]);
          largest = e > largest ? e : largest;
        }
        of_columns[k] = largest == kOfZero ? kOfZeroColumn : largest;
        for (int64_t i = 0; i < H; ++i) step[i * size + k] = scaled(step[i * size + k], -of_columns[k]);
      }
      take_exponents(of_columns, now, exponents, H);
    }
    multiply(step, now, next, H);
    double* const other = now;
    now = next, next = other;
    const bool looks = (t - first) % scan::kFactors == scan::kFactors - 1 || t + 1 == last;
    if (looks && rescale<E>(now, exponents, H, next)) {
      for (int64_t i = 0; i < numbers; ++i) matrix[i] = 0;
      return;
    }
  }
  if (now == matrix) return;
  for (int64_t i = 0; i < numbers; ++i) matrix[i] = now[i];
}

void then(int64_t H, const double* later, const int64_t* later_exponents, double* matrix, int64_t* exponents) {
  const int64_t numbers = scan::product_numbers(H);
  double* const to = matrix + numbers;
  take_exponents(later_exponents, matrix, exponents, H);
  multiply(later, matrix, to, H);
  for (int64_t i = 0; i < numbers; ++i) matrix[i] = to[i];
  rescale<double>(matrix, exponents, H, to);
}

}  // namespace

const scan::SliceProductKernels slice_product_kernels = {{steps<float>, steps<double>}, then};

}  // namespace weft::cpu::WEFT_ISA
