// The CPU kernels of linear_scan_readout: included once per instruction set, like common/cpu/simd-inl.h, whose rule on
// the standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "scan/readout/cpu/linear_scan_readout_kernels.h"

namespace weft::cpu::WEFT_ISA {
namespace {

using scan::Field;
using scan::kReadOutBlock;
using scan::ReadOut;
using scan::ReadOutGradients;
using scan::Result;

// An element as it lies in memory, E, and numbers of type T, kParts of them for one element.
template <typename E_, bool kComplex>
struct Kind {
  using E = E_;
  using T = typename Element<E>::Compute;
  static constexpr int kParts = kComplex ? 2 : 1;
};

// Rows of N elements in the dtype of the state.
template <typename K>
struct Row {
  using E = typename K::E;
  using T = typename K::T;
  static constexpr int kParts = K::kParts;

  // The row at `at`, widened into `room` where it is a half type.
  static WEFT_INLINE const T* wide(const void* base, int64_t at, int64_t N, T* room) {
    const E* const from = static_cast<const E*>(base) + at * kParts;
    if constexpr (sizeof(E) == sizeof(T)) {
      return reinterpret_cast<const T*>(from);
    } else {
      constexpr int64_t kLanes = Simd<T>::kLanes;
      for (int64_t j = 0; j < N; j += kLanes) {
        const int64_t n = N - j < kLanes ? N - j : kLanes;
        Simd<T>::store(room + j, Element<E>::load(from + j, n), n);
      }
      return room;
    }
  }
  static WEFT_INLINE void narrow(const T* from, void* base, int64_t at, int64_t N) {
    E* const to = static_cast<E*>(base) + at * kParts;
    if constexpr (sizeof(E) == sizeof(T)) {
      for (int64_t j = 0; j < N * kParts; ++j) to[j] = from[j];
    } else {
      constexpr int64_t kLanes = Simd<T>::kLanes;
      for (int64_t j = 0; j < N; j += kLanes) {
        const int64_t n = N - j < kLanes ? N - j : kLanes;
        Element<E>::store(to + j, Simd<T>::load(from + j, n), n);
      }
    }
  }
};

// x = a x + b and the sum of c x, over a row; kFull: b has a number for every n.
template <typename K, bool kFirst, bool kSums, bool kFull, typename T>
WEFT_INLINE void step(const T* __restrict a, const T* __restrict b, const T* __restrict c, T* __restrict x, int64_t N,
                      T* sum) {
  const T one_re = b[0], one_im = b[K::kParts - 1];
  if constexpr (K::kParts == 1) {
    T re = 0;
#pragma omp simd reduction(+ : re)
    for (int64_t n = 0; n < N; ++n) {
      const T enters = kFull ? b[n] : one_re;
      const T next = kFirst ? enters : a[n] * x[n] + enters;
      x[n] = next;
      if (kSums) re += c[n] * next;
    }
    if (kSums) sum[0] = re;
  } else {
    T re = 0, im = 0;
#pragma omp simd reduction(+ : re, im)
    for (int64_t n = 0; n < N; ++n) {
      T next_re = kFull ? b[2 * n] : one_re, next_im = kFull ? b[2 * n + 1] : one_im;
      if (!kFirst) {
        const T was_re = x[2 * n], was_im = x[2 * n + 1];
        next_re += a[2 * n] * was_re - a[2 * n + 1] * was_im;
        next_im += a[2 * n] * was_im + a[2 * n + 1] * was_re;
      }
      x[2 * n] = next_re, x[2 * n + 1] = next_im;
      if (kSums) {
        re += c[2 * n] * next_re - c[2 * n + 1] * next_im;
        im += c[2 * n] * next_im + c[2 * n + 1] * next_re;
      }
    }
    if (kSums) sum[0] = re, sum[1] = im;
  }
}

// Scratch: rows of state, some of them in fp64.
template <typename K>
int64_t row_numbers(const ReadOut& s) {
  return (s.N * K::kParts + 15) / 16 * 16;
}
template <typename K>
int64_t scratch_bytes(const ReadOut& s) {
  using T = typename K::T;
  const int64_t rows = kReadOutBlock * (scan::segment_steps(s.dtype) + 4) + 8;
  return row_numbers<K>(s) * (rows * int64_t(sizeof(T)) + 2 * kReadOutBlock * int64_t(sizeof(double))) + 128;
}
template <typename P>
WEFT_INLINE P* aligned(void* at) {
  return reinterpret_cast<P*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
}

template <typename K>
WEFT_INLINE void start(const ReadOut& s, int64_t row, int64_t h, typename K::T* x) {
  using R = Row<K>;
  if (s.x0.at == nullptr) return fill_zero(x, s.N * K::kParts);
  const auto* from = R::wide(s.x0.at, row * s.x0.b + h * s.x0.h, s.N, x);
  for (int64_t j = 0; j < s.N * K::kParts; ++j) x[j] = from[j];
}

// Field `f` of a channel at a step.
WEFT_INLINE int64_t place(const Field& f, int64_t t, int64_t row, int64_t h) {
  return t * f.t + row * f.b + h * f.h;
}

template <typename K>
void forward(const ReadOut& s, int64_t row, int64_t begin, int64_t end, void* scratch) {
  using R = Row<K>;
  using T = typename K::T;
  constexpr int kParts = K::kParts;
  const int64_t size = row_numbers<K>(s), segment = scan::segment_steps(s.dtype);
  T* const states = aligned<T>(scratch);
  T *const room = states + kReadOutBlock * size, *const constants = room + 3 * size;
  const bool constant = s.A.t == 0 && s.c.t == 0;
  for (int64_t h = begin; h < end; ++h) start<K>(s, row, h, states + (h - begin) * size);
  // What is constant is widened once.
  const T *a[kReadOutBlock], *c[kReadOutBlock];
  for (int64_t h = begin; constant && h < end; ++h) {
    a[h - begin] = R::wide(s.A.at, place(s.A, 0, row, h), s.N, constants + 2 * (h - begin) * size);
    c[h - begin] = R::wide(s.c.at, place(s.c, 0, row, h), s.N, constants + (2 * (h - begin) + 1) * size);
  }
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t h = begin; h < end; ++h) {
      T *const x = states + (h - begin) * size, sum[2] = {};
      if (s.starts != nullptr && t % segment == 0) {
        T* const to = static_cast<T*>(s.starts) + ((t / segment * s.B + row) * s.H + h) * s.N * kParts;
        for (int64_t j = 0; j < s.N * kParts; ++j) to[j] = x[j];
      }
      const T* const A = constant ? a[h - begin] : R::wide(s.A.at, place(s.A, t, row, h), s.N, room);
      const T* const C = constant ? c[h - begin] : R::wide(s.c.at, place(s.c, t, row, h), s.N, room + size);
      const T* const b = R::wide(s.b.at, place(s.b, t, row, h), s.full ? s.N : 1, room + 2 * size);
      const auto run = [&]<bool kFirst>() __attribute__((always_inline)) {
        s.full ? step<K, kFirst, true, true>(A, b, C, x, s.N, sum) : step<K, kFirst, true, false>(A, b, C, x, s.N, sum);
      };
      t == 0 && s.x0.at == nullptr ? run.template operator()<true>() : run.template operator()<false>();
      R::narrow(sum, s.y.at, t * s.y.t + row * s.y.b + h, 1);
    }
  }
}

// One step of lambda and the products with the states; adds to few_A and few_c, and gives the sum of lambda over n.
template <typename K, bool kLast, bool kFirst, typename T>
WEFT_INLINE void step_back(const T* __restrict a, const T* __restrict c, const T* __restrict gradient,
                           const T* __restrict x, const T* __restrict before, T* __restrict lambda,
                           T* __restrict product_A, T* __restrict product_c, int64_t N, T* sum) {
  if constexpr (K::kParts == 1) {
    const T g = gradient[0];
    T all = 0;
#pragma omp simd reduction(+ : all)
    for (int64_t n = 0; n < N; ++n) {
      const T next = kLast ? c[n] * g : a[n] * lambda[n] + c[n] * g;
      lambda[n] = next;
      all += next;
      product_A[n] = kFirst ? T(0) : next * before[n];
      product_c[n] = g * x[n];
    }
    sum[0] = all;
  } else {
    const T g_re = gradient[0], g_im = gradient[1];
    T all_re = 0, all_im = 0;
#pragma omp simd reduction(+ : all_re, all_im)
    for (int64_t n = 0; n < N; ++n) {
      // Of conjugates.
      T re = c[2 * n] * g_re + c[2 * n + 1] * g_im, im = c[2 * n] * g_im - c[2 * n + 1] * g_re;
      if (!kLast) {
        const T was_re = lambda[2 * n], was_im = lambda[2 * n + 1];
        re += a[2 * n] * was_re + a[2 * n + 1] * was_im;
        im += a[2 * n] * was_im - a[2 * n + 1] * was_re;
      }
      lambda[2 * n] = re, lambda[2 * n + 1] = im;
      all_re += re, all_im += im;
      const T b_re = before[2 * n], b_im = before[2 * n + 1], x_re = x[2 * n], x_im = x[2 * n + 1];
      product_A[2 * n] = kFirst ? T(0) : re * b_re + im * b_im;
      product_A[2 * n + 1] = kFirst ? T(0) : im * b_re - re * b_im;
      product_c[2 * n] = g_re * x_re + g_im * x_im;
      product_c[2 * n + 1] = g_im * x_re - g_re * x_im;
    }
    sum[0] = all_re, sum[1] = all_im;
  }
}

template <typename K>
void gradients(const ReadOutGradients& g, int64_t row, int64_t begin, int64_t end, void* scratch) {
  using R = Row<K>;
  using T = typename K::T;
  constexpr int kParts = K::kParts;
  const ReadOut& s = g.scan;
  const int64_t N = s.N, numbers = N * kParts, size = row_numbers<K>(s), segment = scan::segment_steps(s.dtype);
  T* const states = aligned<T>(scratch);  // of a channel's segment, after the state before it
  T* const lambdas = states + (segment + 1) * size;
  T* const room = lambdas + kReadOutBlock * size;
  T *const product_A = room + 3 * size, *const product_c = product_A + size;
  double* const sums = aligned<double>(product_c + size);  // of A, then of c
  fill_zero(lambdas, kReadOutBlock * size);
  for (int64_t j = 0; j < 2 * kReadOutBlock * size; ++j) sums[j] = 0;
  const bool wants_A = g.A.at != nullptr, wants_c = g.c.at != nullptr;
  for (int64_t last = ceil_div(s.T, segment) - 1; last >= 0; --last) {
    const int64_t first = last * segment, stop = smaller(s.T, first + segment);
    for (int64_t h = begin; h < end; ++h) {
      T* const lambda = lambdas + (h - begin) * size;
      double *const sum_A = sums + 2 * (h - begin) * size, *const sum_c = sum_A + size;
      const T* const kept = static_cast<const T*>(s.starts) + ((last * s.B + row) * s.H + h) * numbers;
      for (int64_t j = 0; j < numbers; ++j) states[j] = kept[j];
      for (int64_t t = first; t < stop; ++t) {
        T* const x = states + (t - first + 1) * size;
        for (int64_t j = 0; j < numbers; ++j) x[j] = x[j - size];
        const T* const A = R::wide(s.A.at, place(s.A, t, row, h), N, room);
        const T* const b = R::wide(s.b.at, place(s.b, t, row, h), s.full ? N : 1, room + size);
        T* const none = nullptr;
        const auto run = [&]<bool kFirst>() __attribute__((always_inline)) {
          s.full ? step<K, kFirst, false, true>(A, b, A, x, N, none)
                 : step<K, kFirst, false, false>(A, b, A, x, N, none);
        };
        t == 0 && s.x0.at == nullptr ? run.template operator()<true>() : run.template operator()<false>();
      }
      for (int64_t t = stop - 1; t >= first; --t) {
        const T* const x = states + (t - first + 1) * size;
        T gradient_room[16], sum[2];
        const T* const gradient = R::wide(g.grad.at, place(g.grad, t, row, h), 1, gradient_room);
        const T* const A = R::wide(s.A.at, place(s.A, smaller(t + 1, s.T - 1), row, h), N, room);
        const T* const c = R::wide(s.c.at, place(s.c, t, row, h), N, room + size);
        const auto run = [&]<bool kLast, bool kFirst>() __attribute__((always_inline)) {
          step_back<K, kLast, kFirst>(A, c, gradient, x, x - size, lambda, product_A, product_c, N, sum);
        };
        const bool ends = t + 1 == s.T, begins = t == 0 && s.x0.at == nullptr;
        if (ends) {
          begins ? run.template operator()<true, true>() : run.template operator()<true, false>();
        } else {
          begins ? run.template operator()<false, true>() : run.template operator()<false, false>();
        }
        if (g.b.at != nullptr) {
          const int64_t at = t * g.b.t + row * g.b.b;
          s.full ? R::narrow(lambda, g.b.at, at + h * N, N) : R::narrow(sum, g.b.at, at + h, 1);
        }
        if (wants_A && !g.sum_A) R::narrow(product_A, g.A.at, t * g.A.t + row * g.A.b + h * N, N);
        if (wants_c && !g.sum_c) R::narrow(product_c, g.c.at, t * g.c.t + row * g.c.b + h * N, N);
        if (wants_A && g.sum_A) {
          for (int64_t j = 0; j < numbers; ++j) sum_A[j] += product_A[j];
        }
        if (wants_c && g.sum_c) {
          for (int64_t j = 0; j < numbers; ++j) sum_c[j] += product_c[j];
        }
      }
    }
  }
  for (int64_t h = begin; h < end; ++h) {
    const int64_t at = (row * s.H + h) * numbers;
    const double *const sum_A = sums + 2 * (h - begin) * size, *const sum_c = sum_A + size;
    for (int64_t j = 0; wants_A && g.sum_A && j < numbers; ++j) static_cast<T*>(g.A.at)[at + j] = T(sum_A[j]);
    for (int64_t j = 0; wants_c && g.sum_c && j < numbers; ++j) static_cast<T*>(g.c.at)[at + j] = T(sum_c[j]);
    if (g.x0 == nullptr) continue;
    const T *const A = R::wide(s.A.at, place(s.A, 0, row, h), N, room), *const lambda = lambdas + (h - begin) * size;
    T* const to = static_cast<T*>(g.x0) + at;
    for (int64_t n = 0; n < N; ++n) {
      if constexpr (kParts == 1) {
        to[n] = A[n] * lambda[n];
      } else {
        to[2 * n] = A[2 * n] * lambda[2 * n] + A[2 * n + 1] * lambda[2 * n + 1];
        to[2 * n + 1] = A[2 * n] * lambda[2 * n + 1] - A[2 * n + 1] * lambda[2 * n];
      }
    }
  }
}

}  // namespace

const scan::ReadOutKernels linear_scan_readout_kernels = {
    {scratch_bytes<Kind<Half, false>>, scratch_bytes<Kind<BFloat16, false>>, scratch_bytes<Kind<float, false>>,
     scratch_bytes<Kind<double, false>>, scratch_bytes<Kind<float, true>>, scratch_bytes<Kind<double, true>>},
    {forward<Kind<Half, false>>, forward<Kind<BFloat16, false>>, forward<Kind<float, false>>,
     forward<Kind<double, false>>, forward<Kind<float, true>>, forward<Kind<double, true>>},
    {gradients<Kind<Half, false>>, gradients<Kind<BFloat16, false>>, gradients<Kind<float, false>>,
     gradients<Kind<double, false>>, gradients<Kind<float, true>>, gradients<Kind<double, true>>}};

}  // namespace weft::cpu::WEFT_ISA
