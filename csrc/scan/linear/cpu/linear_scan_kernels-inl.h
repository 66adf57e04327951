// The CPU kernels of linear_scan: included once per instruction set, like common/cpu/simd-inl.h, whose rule on the
// standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "scan/linear/cpu/linear_scan_kernels.h"

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

// Brings the line of p, which need not exist, into L2, to be read or (1) written: of parts of rows, and of rows that
// run backwards, the hardware foresees none beyond a page. What calls nothing else must be inlined by force: to the
// compiler it has no effect, and a call of it is left out.
template <int kWritten>
WEFT_INLINE void prefetch(const void* p) {
  __builtin_prefetch(p, kWritten, 2);
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

// Calls whole(j) for the groups of `count` elements, a cache line's at a time, before which it calls line(j), and
// rest(j, n) for the vectors of what is left, which are in the order of memory.
template <typename E, typename Line, typename Whole, typename Rest>
WEFT_INLINE void each_group(int64_t count, Line line, Whole whole, Rest rest) {
  constexpr int64_t kLine = 64 / sizeof(E), kGroup = Element<E>::kVectors * Simd<Compute<E>>::kLanes;
  static_assert(kLine % kGroup == 0);
  int64_t j = 0;
  for (; j + kLine <= count; j += kLine) {
    line(j);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLine; i += kGroup) whole(j + i);
  }
  each_vector<Compute<E>>(count - j, [&](int64_t i, int64_t n) { rest(j + i, n); });
}
// How many of the elements are in groups.
template <typename E>
WEFT_INLINE int64_t grouped(int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(E);
  return count / kLine * kLine;
}

// The states of a part's channels before its first step, from x0 or from `from`, and after its last, which `to` gets.
template <typename E>
WEFT_INLINE void load_state(const LinearScan& s, const Pointers<E>& p, const scan::Part& part, int64_t begin,
                            int64_t count, const Compute<E>* from, Compute<E>* state) {
  if (part.first == 0) {
    load_start(s, p, part.row, begin, count, state);
  } else {
    for (int64_t j = 0; j < count; ++j) state[j] = from[begin - part.begin + j];
  }
  reorder<E, true>(state, grouped<E>(count));
}
template <typename E>
WEFT_INLINE void save_state(const scan::Part& part, int64_t begin, int64_t count, Compute<E>* state, Compute<E>* to) {
  reorder<E, false>(state, grouped<E>(count));
  if (to == nullptr) return;
  for (int64_t j = 0; j < count; ++j) to[begin - part.begin + j] = state[j];
}

// lambda or x of a group after a step, in `state` and in `x`. kFirst: a step without A.
template <typename E, bool kFirst>
WEFT_INLINE void next_group(const E* A, const E* b, Compute<E>* state,
                            typename Simd<Compute<E>>::Vec (&x)[Element<E>::kVectors]) {
  using S = Simd<Compute<E>>;
  Element<E>::load_group(b, x);
  if constexpr (!kFirst) {
    typename S::Vec a[Element<E>::kVectors];
    Element<E>::load_group(A, a);
#pragma GCC unroll 2
    for (int v = 0; v < Element<E>::kVectors; ++v) x[v] = a[v] * S::load(state + v * S::kLanes) + x[v];
  }
#pragma GCC unroll 2
  for (int v = 0; v < Element<E>::kVectors; ++v) S::store(state + v * S::kLanes, x[v]);
}
template <typename E, bool kFirst>
WEFT_INLINE typename Simd<Compute<E>>::Vec next_vector(const E* A, const E* b, Compute<E>* state, int64_t n) {
  using S = Simd<Compute<E>>;
  auto x = Element<E>::load(b, n);
  if constexpr (!kFirst) x = Element<E>::load(A, n) * S::load(state) + x;
  S::store(state, x);
  return x;
}

template <typename E>
void diagonal(const LinearScan& s, const scan::Part& part, void* states) {
  using T = Compute<E>;
  using S = Simd<T>;
  const Pointers<E> p(s);
  // Blocks of channels whose state stays in L1.
  constexpr int64_t kBlock = 2048;
  alignas(64) T state[kBlock];
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = smaller(kBlock, part.end - begin);
    const bool follows = s.b_t == count;  // whole rows, one behind the other
    load_state(s, p, part, begin, count, static_cast<const T*>(states), state);
    for (int64_t t = part.first; t < part.last; ++t) {
      const E* const A = p.A + t * s.A_t + part.row * s.A_b + begin;
      const E* const b = p.b + t * s.b_t + part.row * s.b_b + begin;
      E* const out = p.out == nullptr ? nullptr : p.out + t * s.out_t + part.row * s.out_b + begin;
      const auto step = [&]<bool kFirst, bool kStores>() __attribute__((always_inline)) {
        each_group<E>(
            count,
            [&](int64_t j) __attribute__((always_inline)) {
              if (follows) return;
              prefetch<0>(A + j + 2 * s.A_t);
              prefetch<0>(b + j + 2 * s.b_t);
              if (kStores) prefetch<1>(out + j + 2 * s.out_t);
            },
            [&](int64_t j) {
              typename S::Vec x[Element<E>::kVectors];
              next_group<E, kFirst>(A + j, b + j, state + j, x);
              if (kStores) Element<E>::store_group(out + j, x);
            },
            [&](int64_t j, int64_t n) {
              const auto x = next_vector<E, kFirst>(A + j, b + j, state + j, n);
              if (kStores) Element<E>::store(out + j, x, n);
            });
      };
      const bool first = t == 0 && p.x0 == nullptr;
      if (out == nullptr) {
        first ? step.template operator()<true, false>() : step.template operator()<false, false>();
      } else {
        first ? step.template operator()<true, true>() : step.template operator()<false, true>();
      }
    }
    save_state<E>(part, begin, count, state, static_cast<T*>(states));
  }
}

enum class GradientOfA { none, each, summed };

template <typename E, GradientOfA kKind>
void gradients(const scan::DiagonalGradients& g, const scan::Part& part, void* states, double* all_sums) {
  using T = Compute<E>;
  using S = Simd<T>;
  constexpr int kVectors = Element<E>::kVectors;
  const LinearScan& s = g.scan;
  const Pointers<E> p(s);
  const E* const all_x = static_cast<const E*>(g.x);
  // Sums of a few steps in the dtype of the state, sums of those in fp64.
  constexpr int64_t kBlock = 2048, kSteps = 64;
  alignas(64) T state[kBlock], few[kBlock];
  double sums[kBlock];
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = smaller(kBlock, part.end - begin);
    load_state(s, p, part, begin, count, static_cast<const T*>(states), state);
    if constexpr (kKind == GradientOfA::summed) {
      fill_zero(few, kBlock);
      fill_zero(sums, count);
    }
    for (int64_t t = part.first; t < part.last; ++t) {
      const E* const A = p.A + t * s.A_t + part.row * s.A_b + begin;
      const E* const b = p.b + t * s.b_t + part.row * s.b_b + begin;
      E* const out = p.out == nullptr ? nullptr : p.out + t * s.out_t + part.row * s.out_b + begin;
      const E* x = nullptr;
      E* grad_A = nullptr;
      if constexpr (kKind != GradientOfA::none) {
        x = t + 1 < s.T ? all_x + t * g.x_t + part.row * g.x_b + begin
            : g.x0      ? static_cast<const E*>(g.x0) + part.row * g.x0_b + begin
                        : nullptr;
      }
      if constexpr (kKind == GradientOfA::each) {
        grad_A = static_cast<E*>(g.grad_A) + t * g.grad_A_t + part.row * g.grad_A_b + begin;
      }
      const auto step = [&]<bool kFirst>() __attribute__((always_inline)) {
        each_group<E>(
            count,
            [&](int64_t j) __attribute__((always_inline)) {
              prefetch<0>(A + j + s.A_t);
              prefetch<0>(b + j + s.b_t);
              if (out != nullptr) prefetch<1>(out + j + s.out_t);
              if (kKind != GradientOfA::none && x != nullptr) prefetch<0>(x + j + g.x_t);
              if constexpr (kKind == GradientOfA::each) prefetch<1>(grad_A + j + g.grad_A_t);
            },
            [&](int64_t j) {
              typename S::Vec lambda[kVectors], product[kVectors] = {};
              next_group<E, kFirst>(A + j, b + j, state + j, lambda);
              if (out != nullptr) Element<E>::store_group(out + j, lambda);
              if constexpr (kKind == GradientOfA::none) return;
              if (x != nullptr) {
                Element<E>::load_group(x + j, product);
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                  if constexpr (kKind == GradientOfA::each) product[v] = lambda[v] * product[v];
                  T* const sum = few + j + v * S::kLanes;
                  if constexpr (kKind == GradientOfA::summed) S::store(sum, S::load(sum) + lambda[v] * product[v]);
                }
              }
              if constexpr (kKind == GradientOfA::each) Element<E>::store_group(grad_A + j, product);
            },
            [&](int64_t j, int64_t n) {
              const auto lambda = next_vector<E, kFirst>(A + j, b + j, state + j, n);
              if (out != nullptr) Element<E>::store(out + j, lambda, n);
              if constexpr (kKind == GradientOfA::each) {
                Element<E>::store(grad_A + j, x != nullptr ? lambda * Element<E>::load(x + j, n) : typename S::Vec{},
                                  n);
              } else if constexpr (kKind == GradientOfA::summed) {
                if (x != nullptr) S::store(few + j, S::load(few + j) + lambda * Element<E>::load(x + j, n));
              }
            });
      };
      t == 0 ? step.template operator()<true>() : step.template operator()<false>();
      if constexpr (kKind == GradientOfA::summed) {
        if ((t - part.first) % kSteps == kSteps - 1 || t + 1 == part.last) {
          reorder<E, false>(few, grouped<E>(count));
          for (int64_t j = 0; j < count; ++j) sums[j] += few[j];
          fill_zero(few, count);
        }
      }
    }
    if constexpr (kKind == GradientOfA::summed) {
      for (int64_t j = 0; j < count; ++j) all_sums[part.row * s.H + begin + j] = sums[j];
    }
    save_state<E>(part, begin, count, state, static_cast<T*>(states));
    if (g.grad_x0 == nullptr || part.last < s.T) continue;
    const E* const A = p.A + s.T * s.A_t + part.row * s.A_b + begin;
    const int64_t at = part.row * s.H + begin;
    each_vector<T>(count, [&](int64_t j, int64_t n) {
      const auto product = Element<E>::load(A + j, n) * S::load(state + j);
      if (g.wide_x0) {
        S::store(static_cast<T*>(g.grad_x0) + at + j, product, n);
      } else {
        Element<E>::store(static_cast<E*>(g.grad_x0) + at + j, product, n);
      }
    });
  }
}

template <typename E>
void all_gradients(const scan::DiagonalGradients& g, const scan::Part& part, void* states, double* sums) {
  if (g.grad_A == nullptr) return gradients<E, GradientOfA::none>(g, part, states, sums);
  if (g.summed) return gradients<E, GradientOfA::summed>(g, part, states, sums);
  gradients<E, GradientOfA::each>(g, part, states, sums);
}

// The same of complex numbers, pairs (re, im), in one part in time: plain loops, which the compiler vectorises with
// shuffles, as the memory bounds what is not in cache.
template <typename R>
WEFT_INLINE void load_complex_start(const void* x0, int64_t at, int64_t count, R* state) {
  const R* const from = static_cast<const R*>(x0) + 2 * at;
  for (int64_t j = 0; j < 2 * count; ++j) state[j] = x0 == nullptr ? R(0) : from[j];
}

template <typename R>
void complex_diagonal(const LinearScan& s, const scan::Part& part, void*) {
  const Pointers<R> p(s);
  constexpr int64_t kBlock = 1024;
  alignas(64) R state[2 * kBlock];
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = smaller(kBlock, part.end - begin);
    load_complex_start(s.x0, part.row * s.x0_b + begin, count, state);
    for (int64_t t = part.first; t < part.last; ++t) {
      const R* __restrict const A = p.A + 2 * (t * s.A_t + part.row * s.A_b + begin);
      const R* __restrict const b = p.b + 2 * (t * s.b_t + part.row * s.b_b + begin);
      R* __restrict const out = p.out + 2 * (t * s.out_t + part.row * s.out_b + begin);
      if (t == 0 && p.x0 == nullptr) {
        for (int64_t j = 0; j < 2 * count; ++j) out[j] = state[j] = b[j];
        continue;
      }
      for (int64_t j = 0; j < count; ++j) {
        const R a_re = A[2 * j], a_im = A[2 * j + 1], re = state[2 * j], im = state[2 * j + 1];
        const R next_re = a_re * re - a_im * im + b[2 * j], next_im = a_re * im + a_im * re + b[2 * j + 1];
        out[2 * j] = state[2 * j] = next_re;
        out[2 * j + 1] = state[2 * j + 1] = next_im;
      }
    }
  }
}

template <typename R, GradientOfA kKind, bool kStores>
void complex_gradients(const scan::DiagonalGradients& g, const scan::Part& part, double* all_sums) {
  const LinearScan& s = g.scan;
  const Pointers<R> p(s);
  const R* const all_x = static_cast<const R*>(g.x);
  constexpr int64_t kBlock = 1024;
  alignas(64) R state[2 * kBlock];
  double sums[2 * kBlock];
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = smaller(kBlock, part.end - begin);
    fill_zero(state, 2 * count);
    fill_zero(sums, 2 * count);
    for (int64_t t = 0; t < s.T; ++t) {
      const R* __restrict const A = p.A + 2 * (t * s.A_t + part.row * s.A_b + begin);
      const R* __restrict const b = p.b + 2 * (t * s.b_t + part.row * s.b_b + begin);
      R* __restrict const out = kStores ? p.out + 2 * (t * s.out_t + part.row * s.out_b + begin) : nullptr;
      const R* __restrict x = nullptr;
      R* __restrict grad_A = nullptr;
      if constexpr (kKind != GradientOfA::none) {
        x = t + 1 < s.T ? all_x + 2 * (t * g.x_t + part.row * g.x_b + begin)
            : g.x0      ? static_cast<const R*>(g.x0) + 2 * (part.row * g.x0_b + begin)
                        : nullptr;
      }
      if constexpr (kKind == GradientOfA::each) {
        grad_A = static_cast<R*>(g.grad_A) + 2 * (t * g.grad_A_t + part.row * g.grad_A_b + begin);
      }
      const auto step = [&]<bool kFirst, bool kProducts>() __attribute__((always_inline)) {
        for (int64_t j = 0; j < count; ++j) {
          R re = b[2 * j], im = b[2 * j + 1];
          if constexpr (!kFirst) {
            const R a_re = A[2 * j], a_im = -A[2 * j + 1], was_re = state[2 * j], was_im = state[2 * j + 1];
            re = a_re * was_re - a_im * was_im + re, im = a_re * was_im + a_im * was_re + im;
          }
          state[2 * j] = re, state[2 * j + 1] = im;
          if constexpr (kStores) out[2 * j] = re, out[2 * j + 1] = im;
          if constexpr (kKind == GradientOfA::none) continue;
          const R x_re = kProducts ? x[2 * j] : R(0), x_im = kProducts ? -x[2 * j + 1] : R(0);
          const R product_re = kProducts ? re * x_re - im * x_im : R(0);
          const R product_im = kProducts ? re * x_im + im * x_re : R(0);
          if constexpr (kKind == GradientOfA::each) grad_A[2 * j] = product_re, grad_A[2 * j + 1] = product_im;
          if constexpr (kKind == GradientOfA::summed) sums[2 * j] += product_re, sums[2 * j + 1] += product_im;
        }
      };
      if (x != nullptr) {
        t == 0 ? step.template operator()<true, true>() : step.template operator()<false, true>();
      } else {
        t == 0 ? step.template operator()<true, false>() : step.template operator()<false, false>();
      }
    }
    if constexpr (kKind == GradientOfA::summed) {
      for (int64_t j = 0; j < 2 * count; ++j) all_sums[2 * (part.row * s.H + begin) + j] = sums[j];
    }
    if (g.grad_x0 == nullptr) continue;
    const R* const A = p.A + 2 * (s.T * s.A_t + part.row * s.A_b + begin);
    R* const to = static_cast<R*>(g.grad_x0) + 2 * (part.row * s.H + begin);
    for (int64_t j = 0; j < count; ++j) {
      const R a_re = A[2 * j], a_im = -A[2 * j + 1], re = state[2 * j], im = state[2 * j + 1];
      to[2 * j] = a_re * re - a_im * im;
      to[2 * j + 1] = a_re * im + a_im * re;
    }
  }
}

template <typename R>
void all_complex_gradients(const scan::DiagonalGradients& g, const scan::Part& part, void*, double* sums) {
  const auto run = [&]<GradientOfA kKind>() {
    g.scan.out != nullptr ? complex_gradients<R, kKind, true>(g, part, sums)
                          : complex_gradients<R, kKind, false>(g, part, sums);
  };
  if (g.grad_A == nullptr) return run.template operator()<GradientOfA::none>();
  if (g.summed) return run.template operator()<GradientOfA::summed>();
  run.template operator()<GradientOfA::each>();
}

// The loops over plain arrays are for the compiler to vectorise.
template <typename E>
void totals(const LinearScan& s, const scan::Part& part, const scan::Totals& result) {
  static_assert(sizeof(E) < 8);
  const Pointers<E> p(s);
  constexpr int64_t kBlock = 512;
  alignas(64) float wide_A[kBlock], wide_b[kBlock];
  alignas(64) double product[kBlock], product_bound[kBlock], offset[kBlock], offset_bound[kBlock];
  for (int64_t begin = part.begin; begin < part.end; begin += kBlock) {
    const int64_t count = smaller(kBlock, part.end - begin);
    for (int64_t j = 0; j < count; ++j) {
      product[j] = product_bound[j] = 1;
      offset[j] = offset_bound[j] = 0;
    }
    for (int64_t t = part.first; t < part.last; ++t) {
      // With no x0 the first A is not used, whatever it holds.
      if (t == 0 && p.x0 == nullptr) {
        fill_zero(wide_A, count);
      } else {
        widen(p.A + t * s.A_t + part.row * s.A_b + begin, wide_A, count);
      }
      widen(p.b + t * s.b_t + part.row * s.b_b + begin, wide_b, count);
      for (int64_t j = 0; j < count; ++j) {
        const double a = wide_A[j], b = wide_b[j], size = __builtin_fabs(a);
        const double bound = size * product_bound[j];
        product[j] *= a;
        product_bound[j] = bound < 0x1p-900 ? 0x1p-900 : bound;
        offset[j] = a * offset[j] + b;
        offset_bound[j] = size * offset_bound[j] + __builtin_fabs(b);
      }
    }
    const int64_t at = part.row * s.H + begin;
    for (int64_t j = 0; j < count; ++j) {
      result.product[at + j] = product[j], result.product_bound[at + j] = product_bound[j];
      result.offset[at + j] = offset[j], result.offset_bound[at + j] = offset_bound[j];
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
    {diagonal<Half>, diagonal<BFloat16>, diagonal<float>, diagonal<double>, complex_diagonal<float>,
     complex_diagonal<double>},
    {all_gradients<Half>, all_gradients<BFloat16>, all_gradients<float>, all_gradients<double>,
     all_complex_gradients<float>, all_complex_gradients<double>},
    {totals<Half>, totals<BFloat16>, totals<float>}};

}  // namespace weft::cpu::WEFT_ISA
