// CPU kernels of linear_scan: sequential in t, vectorised within a step, threads over batch and channels.
//
// A step reads A[t] once and does two operations per element, so from main memory it is bound by that read; from cache
// by the product, for which the loops below keep several independent sums. The state stays in a buffer in L1 and, for
// fp16 and bf16, in fp32. The bodies are inlined into one copy for AVX2 with FMA and one for the baseline instruction
// set, chosen when they run.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "scan/linear_scan.h"

#define WEFT_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__)
#define WEFT_HAS_AVX2_COPY 1
#define WEFT_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace weft::scan {
namespace {

template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A range of work: steps of all t for batch rows [row0, row1) and channels [channel0, channel1).
struct Range {
  int64_t row0, row1, channel0, channel1;
};

template <typename T>
struct Pointers {
  explicit Pointers(const LinearScan& s)
      : A(static_cast<const T*>(s.A)),
        b(static_cast<const T*>(s.b)),
        x0(static_cast<const T*>(s.x0)),
        out(static_cast<T*>(s.out)) {}
  const T *A, *b, *x0;
  T* out;
};

// state[j] = x0[row][j], or 0
template <typename T, typename Acc>
WEFT_INLINE void load_start(const LinearScan& s, const Pointers<T>& p, int64_t row, int64_t begin, int64_t count,
                            Acc* state) {
  for (int64_t j = 0; j < count; ++j) state[j] = p.x0 ? static_cast<Acc>(p.x0[row * s.x0_b + begin + j]) : Acc(0);
}

template <typename T>
WEFT_INLINE void diagonal_body(const LinearScan& s, const Range& range) {
  using Acc = Accumulate<T>;
  const Pointers<T> p(s);
  // Blocks of channels whose state stays in L1 and whose rows are long enough for the hardware prefetchers.
  constexpr int64_t kBlock = 2048;
  Acc state[kBlock];
  for (int64_t row = range.row0; row < range.row1; ++row) {
    for (int64_t begin = range.channel0; begin < range.channel1; begin += kBlock) {
      const int64_t count = std::min(kBlock, range.channel1 - begin);
      load_start(s, p, row, begin, count, state);
      for (int64_t t = 0; t < s.T; ++t) {
        const T* A = p.A + t * s.A_t + row * s.A_b + begin;
        const T* b = p.b + t * s.b_t + row * s.b_b + begin;
        T* out = p.out + t * s.out_t + row * s.out_b + begin;
        if (t == 0 && !p.x0) {
          for (int64_t j = 0; j < count; ++j) state[j] = static_cast<Acc>(b[j]);
          std::copy(b, b + count, out);
          continue;
        }
#pragma GCC ivdep
        for (int64_t j = 0; j < count; ++j) {
          state[j] = static_cast<Acc>(A[j]) * state[j] + static_cast<Acc>(b[j]);
          out[j] = static_cast<T>(state[j]);
        }
      }
    }
  }
}

template <typename Acc, int kBytes>
struct Lanes {
  typedef Acc Vector __attribute__((vector_size(kBytes)));
  static constexpr int64_t kCount = kBytes / sizeof(Acc);
  // By reference: returned by value, a wide vector would cross the baseline calling convention.
  static WEFT_INLINE void load(const Acc* from, Vector& v) { std::memcpy(&v, from, kBytes); }
};

// y += A x for kRows rows of a row-major A: one vector of partial sums per row, summed at the end in a fixed order.
template <int kRows, typename Acc>
WEFT_INLINE void rows_times_vector(const Acc* A, int64_t stride, const Acc* x, int64_t H, Acc* y) {
  using Wide = Lanes<Acc, 32>;
  using Narrow = Lanes<Acc, 16>;
  typename Wide::Vector wide[kRows] = {};
  typename Narrow::Vector narrow[kRows] = {};
  Acc rest[kRows] = {};
  int64_t j = 0;
  for (; j + Wide::kCount <= H; j += Wide::kCount) {
    typename Wide::Vector v, a;
    Wide::load(x + j, v);
    for (int r = 0; r < kRows; ++r) {
      Wide::load(A + r * stride + j, a);
      wide[r] += a * v;
    }
  }
  if (j + Narrow::kCount <= H) {
    typename Narrow::Vector v, a;
    Narrow::load(x + j, v);
    for (int r = 0; r < kRows; ++r) {
      Narrow::load(A + r * stride + j, a);
      narrow[r] += a * v;
    }
    j += Narrow::kCount;
  }
  for (; j < H; ++j) {
    for (int r = 0; r < kRows; ++r) rest[r] += A[r * stride + j] * x[j];
  }
  for (int r = 0; r < kRows; ++r) {
    typename Narrow::Vector halves[2];
    std::memcpy(halves, &wide[r], sizeof(halves));
    const typename Narrow::Vector sum = halves[0] + halves[1] + narrow[r];
    Acc total = rest[r];
    for (int k = 0; k < Narrow::kCount; ++k) total += sum[k];
    y[r] += total;
  }
}

// y += A x with A by rows (column stride 1) or by columns (row stride 1).
template <typename Acc>
WEFT_INLINE void matrix_times_vector(const Acc* A, int64_t row_stride, int64_t col_stride, const Acc* x, int64_t H,
                                     Acc* y) {
  if (col_stride == 1) {
    int64_t i = 0;
    for (; i + 4 <= H; i += 4) rows_times_vector<4>(A + i * row_stride, row_stride, x, H, y + i);
    for (; i < H; ++i) rows_times_vector<1>(A + i * row_stride, row_stride, x, H, y + i);
    return;
  }
  int64_t j = 0;
  for (; j + 4 <= H; j += 4) {
    const Acc *a0 = A + j * col_stride, *a1 = a0 + col_stride, *a2 = a1 + col_stride, *a3 = a2 + col_stride;
    const Acc x0 = x[j], x1 = x[j + 1], x2 = x[j + 2], x3 = x[j + 3];
#pragma GCC ivdep
    for (int64_t i = 0; i < H; ++i) y[i] += (a0[i] * x0 + a1[i] * x1) + (a2[i] * x2 + a3[i] * x3);
  }
  for (; j < H; ++j) {
    const Acc *a = A + j * col_stride, xj = x[j];
#pragma GCC ivdep
    for (int64_t i = 0; i < H; ++i) y[i] += a[i] * xj;
  }
}

template <typename T>
WEFT_INLINE void dense_body(const LinearScan& s, const Range& range) {
  using Acc = Accumulate<T>;
  const Pointers<T> p(s);
  const int64_t H = s.H, rows = range.row1 - range.row0;
  // Two states per batch row (before and after the step), and a matrix in the accumulation dtype where A's is narrower.
  constexpr bool widen = !std::is_same_v<T, Acc>;
  std::vector<Acc> buffer(2 * rows * H + (widen ? H * H : 0));
  Acc *before = buffer.data(), *after = before + rows * H, *wide = after + rows * H;
  for (int64_t r = 0; r < rows; ++r) load_start(s, p, range.row0 + r, 0, H, before + r * H);
  const bool by_rows = s.A_col == 1;
  const int64_t line = by_rows ? s.A_row : s.A_col;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = range.row0 + r;
      const T* b = p.b + t * s.b_t + row * s.b_b;
      T* out = p.out + t * s.out_t + row * s.out_b;
      Acc* y = after + r * H;
      for (int64_t i = 0; i < H; ++i) y[i] = static_cast<Acc>(b[i]);
      if (t > 0 || p.x0) {
        const T* A = p.A + t * s.A_t + row * s.A_b;
        if constexpr (widen) {
          // A shared matrix was widened for the first row already.
          if (r == 0 || s.A_b != 0) {
            for (int64_t i = 0; i < H; ++i) {
              for (int64_t j = 0; j < H; ++j) wide[i * H + j] = static_cast<Acc>(A[i * line + j]);
            }
          }
          matrix_times_vector(wide, by_rows ? H : 1, by_rows ? 1 : H, before + r * H, H, y);
        } else {
          matrix_times_vector(A, s.A_row, s.A_col, before + r * H, H, y);
        }
      }
      for (int64_t i = 0; i < H; ++i) out[i] = static_cast<T>(y[i]);
    }
    std::swap(before, after);
  }
}

template <typename T, bool kDiagonal>
WEFT_INLINE void body(const LinearScan& s, const Range& range) {
  if constexpr (kDiagonal) {
    diagonal_body<T>(s, range);
  } else {
    dense_body<T>(s, range);
  }
}

template <typename T, bool kDiagonal>
void run_baseline(const LinearScan& s, const Range& range) {
  body<T, kDiagonal>(s, range);
}

#ifdef WEFT_HAS_AVX2_COPY
template <typename T, bool kDiagonal>
WEFT_AVX2 void run_avx2(const LinearScan& s, const Range& range) {
  body<T, kDiagonal>(s, range);
}
#endif

template <typename T, bool kDiagonal>
void run(const LinearScan& s, const Range& range) {
#ifdef WEFT_HAS_AVX2_COPY
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2) return run_avx2<T, kDiagonal>(s, range);
#endif
  run_baseline<T, kDiagonal>(s, range);
}

// Below this many operations a thread costs more than it saves.
constexpr int64_t kOperationsPerThread = 1 << 15;

template <typename T>
void scan_dense(const LinearScan& s) {
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * s.H * s.H));
  at::parallel_for(0, s.B, grain, [&](int64_t begin, int64_t end) { run<T, false>(s, {begin, end, 0, s.H}); });
}

template <typename T>
void scan_diagonal(LinearScan s) {
  // Batch rows that lie end to end are one long row.
  if (s.A_b == s.H && s.b_b == s.H && s.out_b == s.H && (!s.x0 || s.x0_b == s.H)) {
    s.H *= s.B;
    s.B = 1;
  }
  // Whole cache lines of channels, so that no two threads write to one.
  constexpr int64_t kLine = 64;
  const int64_t lines = (s.H + kLine - 1) / kLine;
  const int64_t grain = std::max<int64_t>(1, kOperationsPerThread / std::max<int64_t>(1, s.T * std::min(kLine, s.H)));
  at::parallel_for(0, s.B * lines, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / lines, first = begin % lines, count = std::min(end - begin, lines - first);
      run<T, true>(s, {row, row + 1, first * kLine, std::min(s.H, (first + count) * kLine)});
      begin += count;
    }
  });
}

template <typename T>
void scan(const Described& d) {
  if (d.problem.diagonal) {
    scan_diagonal<T>(d.args);
  } else {
    scan_dense<T>(d.args);
  }
}

}  // namespace

void linear_scan_cpu(const Problem& problem, const at::Tensor& out) {
  const Described d = describe(problem, out);
  switch (d.args.dtype) {
    case DType::f16:
      return scan<c10::Half>(d);
    case DType::bf16:
      return scan<c10::BFloat16>(d);
    case DType::f32:
      return scan<float>(d);
    case DType::f64:
      return scan<double>(d);
  }
}

}  // namespace weft::scan
