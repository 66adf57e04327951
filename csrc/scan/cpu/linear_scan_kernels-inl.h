// The CPU kernels of linear_scan: included once per instruction set, like common/cpu/simd-inl.h, whose rule on the
// standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "scan/cpu/linear_scan_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using scan::LinearScan;

template <typename E>
using Compute = typename Element<E>::Compute;

// Calls f(j, n) for the vectors of `count` elements: n of them from j on, all lanes or what is left.
template <typename T, typename F>
WEFT_INLINE void each_vector(int64_t count, F f) {
  constexpr int64_t kLanes = Simd<T>::kLanes;
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) f(j, kLanes);
  const int64_t rest = count - j;
  if (rest >= kLanes) __builtin_unreachable();  // so that what loads `rest` lanes does not ask
  if (rest > 0) f(j, rest);
}

// Between memory and rows of whole vectors, zero beyond `count`. (Stores under a mask cannot be forwarded to loads.)
template <typename E>
WEFT_INLINE void widen(const E* from, Compute<E>* to, int64_t count) {
  using T = Compute<E>;
  each_vector<T>(count, [&](int64_t j, int64_t n) { Simd<T>::store(to + j, Element<E>::load(from + j, n)); });
}
template <typename E>
WEFT_INLINE void narrow(const Compute<E>* from, E* to, int64_t count) {
  using T = Compute<E>;
  each_vector<T>(count, [&](int64_t j, int64_t n) { Element<E>::store(to + j, Simd<T>::load(from + j), n); });
}

template <typename E>
struct Pointers {
  explicit WEFT_INLINE Pointers(const LinearScan& s)
      : A(static_cast<const E*>(s.A)),
        b(static_cast<const E*>(s.b)),
        x0(static_cast<const E*>(s.x0)),
        out(static_cast<E*>(s.out)) {}
  const E *A, *b, *x0;
  E* out;
};

// state[j] = x0[row][begin + j], or 0
template <typename E>
WEFT_INLINE void load_start(const LinearScan& s, const Pointers<E>& p, int64_t row, int64_t begin, int64_t count,
                            Compute<E>* state) {
  if (p.x0 != nullptr) {
    widen(p.x0 + row * s.x0_b + begin, state, count);
  } else {
    fill_zero(state, count);
  }
}

template <typename E>
void diagonal(const LinearScan& s, int64_t row, int64_t channel0, int64_t channel1) {
  using T = Compute<E>;
  using S = Simd<T>;
  const Pointers<E> p(s);
  // Blocks of channels whose state stays in L1 and whose rows are long enough for the hardware prefetchers.
  constexpr int64_t kBlock = 2048;
  alignas(64) T state[kBlock];
  for (int64_t begin = channel0; begin < channel1; begin += kBlock) {
    const int64_t count = smaller(kBlock, channel1 - begin);
    load_start(s, p, row, begin, count, state);
    for (int64_t t = 0; t < s.T; ++t) {
      const E* const A = p.A + t * s.A_t + row * s.A_b + begin;
      const E* const b = p.b + t * s.b_t + row * s.b_b + begin;
      E* const out = p.out + t * s.out_t + row * s.out_b + begin;
      if (t == 0 && p.x0 == nullptr) {
        widen(b, state, count);
        narrow(state, out, count);
        continue;
      }
      each_vector<T>(count, [&](int64_t j, int64_t n) {
        const auto x = Element<E>::load(A + j, n) * S::load(state + j) + Element<E>::load(b + j, n);
        S::store(state + j, x);
        Element<E>::store(out + j, x, n);
      });
    }
  }
}

// sums = A x for kRows rows of a row-major A, 1 to 4, zeros beyond: a vector of partial sums per row, summed in a fixed
// order.
template <int kRows, typename T>
WEFT_INLINE void rows_times_vector(const T* A, int64_t stride, const T* x, int64_t H, typename Simd<T>::Four& sums) {
  using S = Simd<T>;
  typename S::Vec partial[4] = {};
  each_vector<T>(H, [&](int64_t j, int64_t n) {
    const auto v = S::load(x + j);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) partial[r] += S::load(A + r * stride + j, n) * v;
  });
  S::sums(partial, sums);
}

template <typename T>
WEFT_INLINE void last_rows_times_vector(const T* A, int64_t stride, const T* x, int64_t H, int64_t rows,
                                        typename Simd<T>::Four& sums) {
  switch (rows) {
    case 1:
      return rows_times_vector<1>(A, stride, x, H, sums);
    case 2:
      return rows_times_vector<2>(A, stride, x, H, sums);
    default:
      return rows_times_vector<3>(A, stride, x, H, sums);
  }
}

// y += A x for a row-major A. Whole vectors of y are stored: who loads one that several stores have made waits for
// them.
template <typename T>
WEFT_INLINE void all_rows_times_vector(const T* A, int64_t stride, const T* x, int64_t H, T* y) {
  using S = Simd<T>;
  constexpr int kFours = S::kLanes < 4 ? 1 : S::kLanes / 4;
  for (int64_t i = 0; i < H; i += 4 * kFours) {
    typename S::Four four[kFours] = {};
#pragma GCC unroll 4
    for (int q = 0; q < kFours; ++q) {
      const int64_t first = i + 4 * q;
      if (first + 4 <= H) {
        rows_times_vector<4>(A + first * stride, stride, x, H, four[q]);
      } else if (first < H) {
        last_rows_times_vector(A + first * stride, stride, x, H, H - first, four[q]);
      }
    }
    if constexpr (kFours == 1) {
      typename S::Four sum;
      __builtin_memcpy(&sum, y + i, sizeof(sum));
      sum += four[0];
      __builtin_memcpy(y + i, &sum, sizeof(sum));
    } else if constexpr (kFours == 2) {
      S::store(y + i, S::load(y + i) + __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 4, 5, 6, 7));
    } else {
      const auto low = __builtin_shufflevector(four[0], four[1], 0, 1, 2, 3, 4, 5, 6, 7);
      const auto high = __builtin_shufflevector(four[2], four[3], 0, 1, 2, 3, 4, 5, 6, 7);
      S::store(y + i, S::load(y + i) +
                          __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
  }
}

// y += A x for a column-major A of kVectors vectors of rows, which stay in registers.
template <int kVectors, typename T>
WEFT_INLINE void columns_times_vector(const T* A, int64_t stride, const T* x, int64_t H, T* y) {
  using S = Simd<T>;
  constexpr int kLanes = S::kLanes, kChains = kVectors == 1 ? 4 : 2;
  const int64_t last = H - (kVectors - 1) * kLanes;
  typename S::Vec sums[kChains][kVectors] = {};
  const auto add = [&](int chain, int64_t j) __attribute__((always_inline)) {
    const auto xj = S::broadcast(x[j]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[chain][v] += S::load(A + j * stride + v * kLanes, v + 1 < kVectors ? kLanes : last) * xj;
    }
  };
  int64_t j = 0;
  for (; j + kChains <= H; j += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) add(c, j + c);
  }
  for (; j < H; ++j) add(0, j);
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    auto sum = sums[0][v];
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) sum += sums[c][v];
    S::store(y + v * kLanes, S::load(y + v * kLanes) + sum);
  }
}

// The same of any size, four columns at a time, each read from one end to the other.
template <typename T>
WEFT_INLINE void long_columns_times_vector(const T* A, int64_t stride, const T* x, int64_t H, T* y) {
  using S = Simd<T>;
  int64_t j = 0;
  for (; j + 4 <= H; j += 4) {
    const T *const a0 = A + j * stride, *const a1 = a0 + stride, *const a2 = a1 + stride, *const a3 = a2 + stride;
    const auto x0 = S::broadcast(x[j]), x1 = S::broadcast(x[j + 1]), x2 = S::broadcast(x[j + 2]),
               x3 = S::broadcast(x[j + 3]);
    each_vector<T>(H, [&](int64_t i, int64_t n) {
      const auto sum =
          (S::load(a0 + i, n) * x0 + S::load(a1 + i, n) * x1) + (S::load(a2 + i, n) * x2 + S::load(a3 + i, n) * x3);
      S::store(y + i, S::load(y + i) + sum);
    });
  }
  for (; j < H; ++j) {
    const auto xj = S::broadcast(x[j]);
    each_vector<T>(
        H, [&](int64_t i, int64_t n) { S::store(y + i, S::load(y + i) + S::load(A + j * stride + i, n) * xj); });
  }
}

// y += A x with A by rows (column stride 1) or by columns (row stride 1); x and y are rows of whole vectors.
template <typename T>
WEFT_INLINE void matrix_times_vector(const T* A, int64_t row_stride, int64_t col_stride, const T* x, int64_t H, T* y) {
  if (col_stride == 1) return all_rows_times_vector(A, row_stride, x, H, y);
  switch (panels_of<T>(H)) {
    case 1:
      return columns_times_vector<1>(A, col_stride, x, H, y);
    case 2:
      return columns_times_vector<2>(A, col_stride, x, H, y);
    case 3:
      return columns_times_vector<3>(A, col_stride, x, H, y);
    default:
      return long_columns_times_vector(A, col_stride, x, H, y);
  }
}

// Two states per batch row (before and after the step), and a matrix in the dtype of the sums where A's is narrower.
template <typename E>
constexpr bool kWidens = sizeof(E) < sizeof(Compute<E>);

template <typename E>
WEFT_INLINE int64_t row_size(const LinearScan& s) {
  constexpr int64_t kLanes = Simd<Compute<E>>::kLanes, kMultiple = kLanes < 4 ? 4 : kLanes;
  return ceil_div(s.H, kMultiple) * kMultiple;
}

template <typename E>
int64_t scratch_bytes(const LinearScan& s, int64_t rows) {
  return (2 * rows + (kWidens<E> ? s.H : 0)) * row_size<E>(s) * int64_t(sizeof(Compute<E>)) + WEFT_VECTOR_BYTES;
}

template <typename E>
void dense(const LinearScan& s, int64_t row0, int64_t row1, void* scratch) {
  using T = Compute<E>;
  const Pointers<E> p(s);
  const int64_t H = s.H, size = row_size<E>(s), rows = row1 - row0;
  T* before = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(scratch) | (WEFT_VECTOR_BYTES - 1)) + 1);
  T *after = before + rows * size, *const wide = after + rows * size;
  for (int64_t r = 0; r < rows; ++r) load_start(s, p, row0 + r, 0, H, before + r * size);
  const bool by_rows = s.A_col == 1;
  const int64_t line = by_rows ? s.A_row : s.A_col;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = row0 + r;
      T* const y = after + r * size;
      widen(p.b + t * s.b_t + row * s.b_b, y, H);
      if (t > 0 || p.x0 != nullptr) {
        const E* const A = p.A + t * s.A_t + row * s.A_b;
        if constexpr (kWidens<E>) {
          // A shared matrix was widened for the first row already.
          if (r == 0 || s.A_b != 0) {
            for (int64_t i = 0; i < H; ++i) widen(A + i * line, wide + i * size, H);
          }
          matrix_times_vector(wide, by_rows ? size : 1, by_rows ? 1 : size, before + r * size, H, y);
        } else {
          matrix_times_vector(A, s.A_row, s.A_col, before + r * size, H, y);
        }
      }
      narrow(y, p.out + t * s.out_t + row * s.out_b, H);
    }
    T* const other = before;
    before = after, after = other;
  }
}

}  // namespace

const scan::LinearScanKernels linear_scan_kernels = {
    {scratch_bytes<Half>, scratch_bytes<BFloat16>, scratch_bytes<float>, scratch_bytes<double>},
    {dense<Half>, dense<BFloat16>, dense<float>, dense<double>},
    {diagonal<Half>, diagonal<BFloat16>, diagonal<float>, diagonal<double>}};

}  // namespace weft::cpu::WEFT_ISA
