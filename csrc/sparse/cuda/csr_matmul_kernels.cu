// Products of CSR matrices whose pattern is planned, and their gradients.
//
// gather    a thread has a few elements of the product, or one for a few samples, for which it reads the list once. Of
//           a large batch and a left operand that it shares, y is first laid out with its samples side by side, in the
//           part of the result that is written last: else each sample's number is in another line, and lines are what
//           L1 counts. Bound by the bytes, those of the lists among them.
//           Where rows share few lists of several products an element, these stay in L1 and L2, and only x, y and the
//           result cross the memory: a block has two rows that follow each other, and a thread the same element of
//           both, so that what waits for an index waits once (four rows take 62 registers a thread, or spill). Of the
//           large batch a warp has 32 elements of a row and its block eight such rows: those of a 3x3 convolution,
//           eight positions side by side, read 10 positions of y a line for 24 products. Where there is no list at all,
//           numbers are multiplied four at a time.
// axpy      a warp has a row, whose sums lie in registers, kColumns columns at a time. It reads a's elements 32 at a
//           time, a lane each, and hands them round; then rows of b, lanes next to each other.
// accumulate  a warp has a row and a window of kColumns of its columns, whose sums lie in shared memory. Each lane
//           looks up the window's part of another row of b; then the warp adds the parts one after the other. Within a
//           row columns differ, so that no two lanes add to one sum, and a warp waits for nobody.
// expand    a block has a piece of the product, one row or a few short ones, for as many samples as 16 bytes hold. It
//           writes the piece's scalar products into shared memory, those of an element side by side, by planned places
//           of two bytes; then each thread sums its elements' own. Of a segment, what one element of a brings, lanes
//           read b's numbers next to each other; all that waits for nothing but the piece's number is read at once:
//           b's numbers and places, and before the barrier where the first elements begin. Bound by the 10 bytes a
//           product and 6 an element, of which a result's 4 go to memory; y and most lists come from L2.
// left, right   lanes share an element of a, or of b, and look each product's element up in the sorted row of the
//           product.
//
// No atomics: every sum has a fixed order.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_matmul_kernels.h"
#include "sparse/cuda/dispatch.cuh"
#include "sparse/plan.h"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSamples = 4;           // of one thread
constexpr int kElements = 2;          // of a thread that has one sample; more products of each wait for each other
constexpr int kGathers = 4;           // the same where an element is one product
constexpr int kWide = 16;             // samples whose numbers lie side by side
constexpr int kWorthwhile = 1 << 15;  // numbers of the result a multiprocessor, from which y is laid out for them
constexpr int kRows = 2;              // that share lists, of a thread that has one sample
constexpr int kRowThreads = 512;      // of a row, at most
constexpr int kColumns = 128;         // of a warp's row, four a lane
constexpr int kWindow = 4 * 1024;     // bytes of a warp's sums
constexpr int kSegmentLanes = 8;      // that share a segment, two products each at a time
constexpr int kBegins = 4;            // elements of a thread whose products' beginnings it reads at a time
constexpr unsigned kFull = 0xffffffffu;

template <typename I>
__device__ __forceinline__ const I* ints(const void* p) {
  return static_cast<const I*>(p);
}

// The first of [begin, end) in order whose number is not below `value`.
template <typename I>
__device__ __forceinline__ int64_t lower_bound(const I* numbers, int64_t begin, int64_t end, int64_t value) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (numbers[middle] < value) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The row of element e: crow[row] <= e < crow[row + 1].
template <typename I>
__device__ __forceinline__ int64_t row_of(const I* crow, int64_t rows, int64_t e) {
  return lower_bound(crow, 0, rows + 1, e + 1) - 1;
}

// A thread has kElements elements of the product, for kTile samples: what it reads of one does not wait for another. Of
// the first sample it leaves out blocks whose elements are all among the first `done`.
template <typename I, typename T, int kTile, int kElements>
__global__ void __launch_bounds__(kThreads) gather_kernel(CsrMatmul m, int64_t done) {
  const int64_t own = int64_t(blockIdx.x) * (kThreads * kElements) + threadIdx.x;
  if (kTile == 1 && blockIdx.y == 0 && int64_t(blockIdx.x + 1) * (kThreads * kElements) <= done) return;
  const I *starts = ints<I>(m.starts), *left = ints<I>(m.left), *right = ints<I>(m.right);
  I begin[kElements], end[kElements], most = 0;
#pragma unroll
  for (int p = 0; p < kElements; ++p) {
    const int64_t e = own + p * kThreads;
    const bool real = e < m.gather_elements;
    begin[p] = !starts ? I(e) : real ? starts[e] : I(0);
    end[p] = !starts ? I(e + real) : real ? starts[e + 1] : I(0);
    if (end[p] - begin[p] > most) most = end[p] - begin[p];
  }
  for (int64_t first = int64_t(blockIdx.y) * kTile; first < m.batch; first += int64_t(gridDim.y) * kTile) {
    const T* x = static_cast<const T*>(m.x) + first * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + first * m.y_batch;
    const int64_t count = m.batch - first;
    acc_t<T> sum[kElements][kTile] = {};
    for (I step = 0; step < most; ++step) {
      // Loads of one kind together, so that none waits for another's.
      bool real[kElements];
      I r[kElements], l[kElements];
#pragma unroll
      for (int p = 0; p < kElements; ++p) l[p] = begin[p] + step, real[p] = l[p] < end[p];
#pragma unroll
      for (int p = 0; p < kElements; ++p) r[p] = !right ? l[p] : real[p] ? right[l[p]] : I(0);
      if (left) {
#pragma unroll
        for (int p = 0; p < kElements; ++p) l[p] = real[p] ? left[l[p]] : I(0);
      }
      T factor[kElements][kTile], number[kElements][kTile];
#pragma unroll
      for (int p = 0; p < kElements; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) factor[p][t] = x[t * m.x_batch + l[p]];
        }
      }
#pragma unroll
      for (int p = 0; p < kElements; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) number[p][t] = y[t * m.y_batch + r[p]];
        }
      }
#pragma unroll
      for (int p = 0; p < kElements; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) sum[p][t] += to_acc(factor[p][t]) * to_acc(number[p][t]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < kElements; ++p) {
      const int64_t e = own + p * kThreads;
      if (e >= m.gather_elements) break;
      const int64_t place = m.gather ? int64_t(ints<I>(m.gather)[e]) : e;
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        if (t < count) static_cast<T*>(m.out)[(first + t) * m.c_nnz + place] = from_acc<T>(sum[p][t]);
      }
    }
  }
}

// Four numbers that are read or written at once.
template <typename T>
struct alignas(sizeof(T) >= 4 ? 16 : 4 * sizeof(T)) Four {
  T v[4];
};

// In as few instructions as there are, which a struct's own assignment does not promise; not to be read soon.
template <typename T>
__device__ __forceinline__ void store(T* to, const Four<T>& four) {
  using Words = std::conditional_t<sizeof(four) == sizeof(uint2), uint2, uint4>;
  const Words* from = reinterpret_cast<const Words*>(&four);
#pragma unroll
  for (int i = 0; i < int(sizeof(four) / sizeof(Words)); ++i) __stcs(reinterpret_cast<Words*>(to) + i, from[i]);
}

// Products of one element each, in order: four of a thread. blockIdx.y counts samples.
template <typename T>
__global__ void __launch_bounds__(kThreads) elementwise_kernel(CsrMatmul m) {
  const int64_t own = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4;
  for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
    const T* x = static_cast<const T*>(m.x) + b * m.x_batch + own;
    const T* y = static_cast<const T*>(m.y) + b * m.y_batch + own;
    T* out = static_cast<T*>(m.out) + b * m.c_nnz + own;
    const uintptr_t places =
        reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(out);
    if (own + 4 <= m.c_nnz && places % alignof(Four<T>) == 0) {
      const Four<T> f = *reinterpret_cast<const Four<T>*>(x), g = *reinterpret_cast<const Four<T>*>(y);
      Four<T> found;
#pragma unroll
      for (int p = 0; p < 4; ++p) found.v[p] = from_acc<T>(to_acc(f.v[p]) * to_acc(g.v[p]));
      store(out, found);
    } else {
      for (int p = 0; p < 4 && own + p < m.c_nnz; ++p) out[p] = from_acc<T>(to_acc(x[p]) * to_acc(y[p]));
    }
  }
}

// y with the numbers of kWide samples side by side, (groups of samples, n, kWide); zeros for samples that there are
// not. blockIdx.y counts groups.
template <typename T>
__global__ void __launch_bounds__(kThreads) interleave_kernel(const T* y, T* out, int64_t n, int64_t batch) {
  static __shared__ T tile[kWide][kThreads / 4 + 1];
  constexpr int kPart = kThreads / 4;
  const int64_t first = int64_t(blockIdx.x) * kPart, sample = int64_t(blockIdx.y) * kWide;
  const int size = int(n - first < kPart ? n - first : kPart);
  for (int t = threadIdx.x / kPart; t < kWide; t += kThreads / kPart) {
    const int i = threadIdx.x % kPart;
    if (i < size) tile[t][i] = sample + t < batch ? y[(sample + t) * n + first + i] : from_acc<T>(acc_t<T>(0));
  }
  __syncthreads();
  out += (int64_t(blockIdx.y) * n + first) * kWide;
  for (int i = threadIdx.x; i < size * kWide; i += kThreads) out[i] = tile[i % kWide][i / kWide];
}

// A product of each of four elements, for the four samples of a lane: sum[t][p] += x[from[p]] y[place[p]] of sample t,
// where `numbers` is y with kWide samples side by side. Loads of one kind together, so that none waits for another's.
template <typename I, typename T>
__device__ __forceinline__ void add_products(const T* x, const I (&from)[4], const Four<T>* numbers,
                                             const I (&place)[4], const bool (&real)[4], acc_t<T> (&sum)[4][4]) {
  T factor[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (real[p]) factor[p] = x[from[p]];
  }
  Four<T> four[4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (real[p]) four[p] = numbers[int64_t(place[p]) * (kWide / 4)];
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (real[p]) sum[t][p] += to_acc(factor[p]) * to_acc(four[p].v[t]);
    }
  }
}

// Numbers of the result below `limit`, for a left operand that the batch shares; y as interleave_kernel writes it.
// Four lanes share four elements that follow each other, for kWide samples, four of each lane: they read a product's
// numbers in one place, instead of a line for each sample, and eight such groups write whole lines.
template <typename I, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2 : 3)
    gather_interleaved_kernel(CsrMatmul m, const T* y, int64_t limit) {
  constexpr int kLanes = kWide / 4;
  const int quarter = threadIdx.x % kLanes;
  const int64_t own = (int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes) * 4;
  if (own >= m.gather_elements) return;
  const I *starts = ints<I>(m.starts), *left = ints<I>(m.left), *right = ints<I>(m.right);
  const T* x = static_cast<const T*>(m.x);
  const Four<T>* numbers = reinterpret_cast<const Four<T>*>(y + blockIdx.y * m.b_nnz * kWide) + quarter;
  I bound[5], most = 0;
#pragma unroll
  for (int p = 0; p < 5; ++p) {
    const int64_t e = own + p < m.gather_elements ? own + p : m.gather_elements;
    bound[p] = starts ? starts[e] : I(e);
    if (p > 0 && bound[p] - bound[p - 1] > most) most = bound[p] - bound[p - 1];
  }
  acc_t<T> sum[4][4] = {};  // samples, elements
  for (I step = 0; step < most; ++step) {
    // Loads of one kind together, so that none waits for another's.
    bool real[4];
    I place[4], from[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) from[p] = bound[p] + step, real[p] = from[p] < bound[p + 1];
#pragma unroll
    for (int p = 0; p < 4; ++p) place[p] = !right ? from[p] : real[p] ? right[from[p]] : I(0);
    if (left) {
#pragma unroll
      for (int p = 0; p < 4; ++p) from[p] = real[p] ? left[from[p]] : I(0);
    }
    add_products(x, from, numbers, place, real, sum);
  }
  T* out = static_cast<T*>(m.out);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int64_t sample = int64_t(blockIdx.y) * kWide + 4 * quarter + t, at = sample * m.c_nnz + own;
    if (sample >= m.batch) return;
    Four<T> four;
#pragma unroll
    for (int p = 0; p < 4; ++p) four.v[p] = from_acc<T>(sum[t][p]);
    if (m.c_nnz % 4 == 0 && at + 4 <= limit) {
      store(out + at, four);
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        if (own + p < m.gather_elements && at + p < limit) out[at + p] = four.v[p];
      }
    }
  }
}

// A gathered row whose list others share.
template <typename I>
struct GatherRow {
  I place, n, a_first, where, base;  // place, n: its elements of the product
  __device__ __forceinline__ GatherRow(const CsrMatmul& m, int64_t r) : place(0), n(0), a_first(0), where(0), base(0) {
    if (r >= m.gather_rows) return;
    const int64_t i = m.gather ? int64_t(ints<I>(m.gather)[r]) : r;
    place = ints<I>(m.c_crow)[i], n = ints<I>(m.c_crow)[i + 1] - place;
    a_first = ints<I>(m.a_crow)[i];
    where = ints<I>(m.shared_lists)[r];
    base = ints<I>(m.shared_lists)[m.gather_rows + r];
  }
};

// A block has kOwn rows, or a part of them, which blockIdx.z counts; a thread some element of each, for kTile samples,
// which blockIdx.y counts. Of the first sample it leaves out what is among the first `done` elements.
template <typename I, typename T, int kTile, int kOwn>
__global__ void __launch_bounds__(kRowThreads, sizeof(T) == 8 || sizeof(I) == 8 ? 1 : 3)
    shared_lists_kernel(CsrMatmul m, int64_t done) {
  const I *starts = ints<I>(m.starts), *left = ints<I>(m.left), *right = ints<I>(m.right);
  I place[kOwn], n[kOwn], a_first[kOwn], where[kOwn], base[kOwn], longest = 0;
#pragma unroll
  for (int p = 0; p < kOwn; ++p) {
    const GatherRow<I> row(m, int64_t(blockIdx.x) * kOwn + p);
    place[p] = row.place, n[p] = row.n, a_first[p] = row.a_first, where[p] = row.where, base[p] = row.base;
    if (n[p] > longest) longest = n[p];
  }
  for (int64_t first = int64_t(blockIdx.y) * kTile; first < m.batch; first += int64_t(gridDim.y) * kTile) {
    const T* x = static_cast<const T*>(m.x) + first * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + first * m.y_batch;
    T* out = static_cast<T*>(m.out) + first * m.c_nnz;
    const int64_t count = m.batch - first, skipped = first == 0 ? done : 0;
    for (I e = I(blockIdx.z * blockDim.x + threadIdx.x); e < longest; e += I(gridDim.z * blockDim.x)) {
      I from[kOwn], steps[kOwn], most = 0;
#pragma unroll
      for (int p = 0; p < kOwn; ++p) {
        const bool real = e < n[p] && place[p] + e >= skipped;
        from[p] = real ? starts[where[p] + e] : I(0);
        steps[p] = real ? starts[where[p] + e + 1] - from[p] : I(0);
        if (steps[p] > most) most = steps[p];
      }
      acc_t<T> sum[kOwn][kTile] = {};
      for (I step = 0; step < most; ++step) {
        // Loads of one kind together, so that none waits for another's.
        I r[kOwn], l[kOwn];
#pragma unroll
        for (int p = 0; p < kOwn; ++p) {
          const bool real = step < steps[p];
          r[p] = real ? base[p] + right[from[p] + step] : I(0);
          l[p] = a_first[p] + (real ? left[from[p] + step] : I(0));
        }
        T factor[kOwn][kTile], number[kOwn][kTile];
#pragma unroll
        for (int p = 0; p < kOwn; ++p) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            if (step < steps[p] && t < count) factor[p][t] = x[t * m.x_batch + l[p]];
          }
        }
#pragma unroll
        for (int p = 0; p < kOwn; ++p) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            if (step < steps[p] && t < count) number[p][t] = y[t * m.y_batch + r[p]];
          }
        }
#pragma unroll
        for (int p = 0; p < kOwn; ++p) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            if (step < steps[p] && t < count) sum[p][t] += to_acc(factor[p][t]) * to_acc(number[p][t]);
          }
        }
      }
#pragma unroll
      for (int p = 0; p < kOwn; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (steps[p] > 0 && t < count) out[t * m.c_nnz + place[p] + e] = from_acc<T>(sum[p][t]);
        }
      }
    }
  }
}

// As gather_interleaved_kernel, where rows share lists: a warp has 32 elements of a row, and a block eight rows.
// blockIdx.y counts parts of a row, blockIdx.z groups of samples.
template <typename I, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 || sizeof(I) == 8 ? 2 : 3)
    shared_lists_interleaved_kernel(CsrMatmul m, const T* y, int64_t limit) {
  constexpr int kLanes = kWide / 4;
  const int lane = threadIdx.x % 32, quarter = lane % kLanes;
  const GatherRow<I> row(m, int64_t(blockIdx.x) * kWarps + threadIdx.x / 32);
  const I *starts = ints<I>(m.starts), *left = ints<I>(m.left), *right = ints<I>(m.right);
  const T* x = static_cast<const T*>(m.x) + row.a_first;
  const Four<T>* numbers = reinterpret_cast<const Four<T>*>(y + blockIdx.z * m.b_nnz * kWide) + quarter;
  T* out = static_cast<T*>(m.out);
  for (I own = I(blockIdx.y) * 32 + lane / kLanes * 4; own < row.n; own += I(gridDim.y) * 32) {
    I bound[5], most = 0;
#pragma unroll
    for (int p = 0; p < 5; ++p) {
      const I e = own + p < row.n ? own + p : row.n;
      bound[p] = starts[row.where + e];
      if (p > 0 && bound[p] - bound[p - 1] > most) most = bound[p] - bound[p - 1];
    }
    acc_t<T> sum[4][4] = {};  // samples, elements
    for (I step = 0; step < most; ++step) {
      bool real[4];
      I place[4], from[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const I s = bound[p] + step;
        real[p] = s < bound[p + 1];
        place[p] = real[p] ? row.base + right[s] : I(0);
        from[p] = real[p] ? left[s] : I(0);
      }
      add_products(x, from, numbers, place, real, sum);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int64_t sample = int64_t(blockIdx.z) * kWide + 4 * quarter + t, at = sample * m.c_nnz + row.place + own;
      if (sample >= m.batch) break;
      Four<T> four;
#pragma unroll
      for (int p = 0; p < 4; ++p) four.v[p] = from_acc<T>(sum[t][p]);
      if (at % 4 == 0 && own + 4 <= row.n && at + 4 <= limit) {
        store(out + at, four);
      } else {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          if (own + p < row.n && at + p < limit) out[at + p] = four.v[p];
        }
      }
    }
  }
}

// blockIdx.z counts parts of a row.
template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) axpy_kernel(CsrMatmul m) {
  using Acc = acc_t<T>;
  constexpr int kOwn = kColumns / 32;  // columns of a lane
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= m.axpy_rows) return;  // with all of its warp
  const int lane = threadIdx.x % 32;
  const int64_t i = ints<I>(m.axpy)[r], begin = ints<I>(m.a_crow)[i], end = ints<I>(m.a_crow)[i + 1];
  const int64_t place = ints<I>(m.c_crow)[i], n = ints<I>(m.c_crow)[i + 1] - place;
  for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
    const T* x = static_cast<const T*>(m.x) + b * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + b * m.y_batch;
    T* out = static_cast<T*>(m.out) + b * m.c_nnz + place;
    for (int64_t first = int64_t(blockIdx.z) * kColumns; first < n; first += int64_t(gridDim.z) * kColumns) {
      const int64_t own = first + lane, left = n - own;
      Acc sum[kOwn] = {};
      for (int64_t from = begin; from < end; from += 32) {
        const int count = int(end - from < 32 ? end - from : 32);
        I start = 0;
        Acc factor = 0;
        if (lane < count) {
          start = ints<I>(m.b_crow)[ints<I>(m.a_col)[from + lane]];
          factor = to_acc(x[from + lane]);
        }
#pragma unroll 4
        for (int k = 0; k < count; ++k) {
          const T* row = y + __shfl_sync(kFull, start, k) + own;
          const Acc f = __shfl_sync(kFull, factor, k);
#pragma unroll
          for (int c = 0; c < kOwn; ++c) {
            if (32 * c < left) sum[c] += f * to_acc(row[32 * c]);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        if (32 * c < left) out[own + 32 * c] = from_acc<T>(sum[c]);
      }
    }
  }
}

// blockIdx.z counts windows of a row.
template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) accumulate_kernel(CsrMatmul m) {
  using Acc = acc_t<T>;
  constexpr int kWidth = kWindow / sizeof(Acc);
  static __shared__ Acc windows[kWarps][kWidth];
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (r >= m.accumulate_rows) return;  // with all of its warp
  const int lane = threadIdx.x % 32;
  Acc* sums = windows[threadIdx.x / 32];
  const I *b_crow = ints<I>(m.b_crow), *b_col = ints<I>(m.b_col), *c_col = ints<I>(m.c_col);
  const int64_t i = ints<I>(m.accumulate)[r], a_begin = ints<I>(m.a_crow)[i], a_end = ints<I>(m.a_crow)[i + 1];
  const int64_t c_begin = ints<I>(m.c_crow)[i], c_end = ints<I>(m.c_crow)[i + 1], last = c_col[c_end - 1];
  for (int64_t low = c_col[c_begin] + int64_t(blockIdx.z) * kWidth; low <= last; low += int64_t(gridDim.z) * kWidth) {
    const int64_t high = low + kWidth;
    const int64_t begin = lower_bound(c_col, c_begin, c_end, low), end = lower_bound(c_col, begin, c_end, high);
    if (begin == end) continue;
    for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
      const T* x = static_cast<const T*>(m.x) + b * m.x_batch;
      const T* y = static_cast<const T*>(m.y) + b * m.y_batch;
      T* out = static_cast<T*>(m.out) + b * m.c_nnz;
      for (int64_t s = begin + lane; s < end; s += 32) sums[c_col[s] - low] = 0;
      __syncwarp();
      for (int64_t from = a_begin; from < a_end; from += 32) {
        const int count = int(a_end - from < 32 ? a_end - from : 32);
        int64_t first = 0, stop = 0;
        Acc factor = 0;
        if (lane < count) {
          const int64_t j = ints<I>(m.a_col)[from + lane];
          first = lower_bound(b_col, int64_t(b_crow[j]), int64_t(b_crow[j + 1]), low);
          stop = lower_bound(b_col, first, int64_t(b_crow[j + 1]), high);
          factor = to_acc(x[from + lane]);
        }
        // The first numbers of a part are read while the part before it is added.
        int64_t f = __shfl_sync(kFull, first, 0) + lane, f_end = __shfl_sync(kFull, stop, 0);
        bool real = f < f_end;
        I column = real ? b_col[f] : I(0);
        T number = real ? y[f] : T();
        for (int k = 0; k < count; ++k) {
          const int following = k + 1 < count ? k + 1 : k;
          const int64_t g = __shfl_sync(kFull, first, following) + lane, g_end = __shfl_sync(kFull, stop, following);
          const bool more = k + 1 < count && g < g_end;
          const I next_column = more ? b_col[g] : I(0);
          const T next_number = more ? y[g] : T();
          const Acc v = __shfl_sync(kFull, factor, k);
          if (real) sums[column - low] += v * to_acc(number);
          for (f += 32; f < f_end; f += 32) sums[b_col[f] - low] += v * to_acc(y[f]);
          __syncwarp();
          f = g, f_end = g_end, real = more, column = next_column, number = next_number;
        }
      }
      for (int64_t s = begin + lane; s < end; s += 32) out[s] = from_acc<T>(sums[c_col[s] - low]);
      __syncwarp();  // the sums are read before the next sample's are set to zero
    }
  }
}

// Of a thread's samples.
template <typename T, int kTile>
struct alignas(sizeof(acc_t<T>) * kTile) Numbers {
  acc_t<T> v[kTile];
};

// blockIdx.x counts pieces, blockIdx.y samples, kTile of them together; kSegmentLanes lanes share a segment.
template <typename I, typename T, int kTile>
__global__ void __launch_bounds__(kThreads, kTile == 1 ? 6 : 4) expand_kernel(CsrMatmul m) {
  constexpr int kLanes = kSegmentLanes;
  static __shared__ Numbers<T, kTile> products[kPieceProducts];
  static __shared__ Numbers<T, kTile> factors[kPieceSegments];  // of a, one a segment
  static __shared__ I rights[kPieceSegments];
  static __shared__ int16_t begins[kPieceSegments + 1];
  const I* piece = ints<I>(m.pieces) + 3 * int64_t(blockIdx.x);
  const I first_element = piece[0], first_segment = piece[1];
  const int16_t* list = m.lists + piece[2];
  const int segments = list[0], elements = list[1];
  const int16_t *list_begins = list + 2, *starts = list_begins + segments + 1, *places = starts + elements + 1;
  const I *left = ints<I>(m.segments) + first_segment, *right = left + m.segment_count;
  for (int64_t sample = int64_t(blockIdx.y) * kTile; sample < m.batch; sample += int64_t(gridDim.y) * kTile) {
    const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
    T* out = static_cast<T*>(m.out) + sample * m.c_nnz + first_element;
    const int64_t count = m.batch - sample;
    for (int s = threadIdx.x; s < segments; s += kThreads) {
      const I l = left[s];
      rights[s] = right[s], begins[s] = list_begins[s];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        factors[s].v[t] = t < count ? to_acc(x[t * m.x_batch + l]) : acc_t<T>(0);
      }
    }
    if (threadIdx.x == 0) begins[segments] = list_begins[segments];
    __syncthreads();
    for (int s = threadIdx.x / kLanes; s < segments; s += kThreads / kLanes) {
      const T* numbers = y + rights[s];
      const int end = begins[s + 1];
      const Numbers<T, kTile> factor = factors[s];
      for (int q = begins[s] + int(threadIdx.x) % kLanes; q < end; q += 2 * kLanes) {
        // Loads of two products together, so that none waits for the other's.
        const bool both = q + kLanes < end;
        const int place = places[q], other_place = both ? places[q + kLanes] : 0;
        T own[kTile], other[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (t < count) own[t] = numbers[t * m.y_batch + q];
          if (t < count && both) other[t] = numbers[t * m.y_batch + q + kLanes];
        }
        Numbers<T, kTile> found;
#pragma unroll
        for (int t = 0; t < kTile; ++t) found.v[t] = t < count ? factor.v[t] * to_acc(own[t]) : acc_t<T>(0);
        products[place] = found;
        if (!both) continue;
#pragma unroll
        for (int t = 0; t < kTile; ++t) found.v[t] = t < count ? factor.v[t] * to_acc(other[t]) : acc_t<T>(0);
        products[other_place] = found;
      }
    }
    int16_t from[kBegins], to[kBegins];
    const auto read_begins = [&](int first) {
#pragma unroll
      for (int p = 0; p < kBegins; ++p) {
        const int e = first + p * kThreads;
        from[p] = e < elements ? starts[e] : int16_t(0), to[p] = e < elements ? starts[e + 1] : int16_t(0);
      }
    };
    read_begins(threadIdx.x);
    __syncthreads();
    for (int first = threadIdx.x; first < elements; first += kBegins * kThreads) {
      if (first >= kBegins * kThreads) read_begins(first);
#pragma unroll
      for (int p = 0; p < kBegins; ++p) {
        const int e = first + p * kThreads;
        if (e >= elements) break;
        Numbers<T, kTile> sum = products[from[p]];
        for (int q = from[p] + 1; q < to[p]; ++q) {
          const Numbers<T, kTile> next = products[q];
#pragma unroll
          for (int t = 0; t < kTile; ++t) sum.v[t] += next.v[t];
        }
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (t < count) __stcs(out + t * m.c_nnz + e, from_acc<T>(sum.v[t]));
        }
      }
    }
    __syncthreads();  // the sums are read before the next samples' products are written
  }
}

// out[e] = sum over k of y[j, k] g[i, k], element e of a in row i and column j.
template <typename I, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) left_kernel(CsrMatmul m) {
  using Acc = acc_t<T>;
  const int64_t e = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool real = e < m.a_nnz;  // lanes beyond the last stay for the shuffles
  const int lane = threadIdx.x % kLanes;
  int64_t first = 0, last = 0, begin = 0, end = 0;
  if (real) {
    const int64_t i = row_of(ints<I>(m.a_crow), m.rows, e), j = ints<I>(m.a_col)[e];
    first = ints<I>(m.b_crow)[j], last = ints<I>(m.b_crow)[j + 1];
    begin = ints<I>(m.c_crow)[i], end = ints<I>(m.c_crow)[i + 1];
  }
  const int64_t sets = m.shared ? 1 : m.batch, summed = m.shared ? m.batch : 1;
  for (int64_t set = blockIdx.y; set < sets; set += gridDim.y) {
    Acc sum = 0;
    for (int64_t f = first + lane; f < last; f += kLanes) {
      const int64_t at = lower_bound(ints<I>(m.c_col), begin, end, ints<I>(m.b_col)[f]);
      for (int64_t b = set; b < set + summed; ++b) {
        sum += to_acc(static_cast<const T*>(m.y)[b * m.y_batch + f]) *
               to_acc(static_cast<const T*>(m.g)[b * m.g_batch + at]);
      }
    }
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (real && lane == 0) static_cast<T*>(m.out)[set * m.a_nnz + e] = from_acc<T>(sum);
  }
}

// out[f] = sum over i of x[i, j] g[i, k], element f of b in row j and column k.
template <typename I, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) right_kernel(CsrMatmul m) {
  using Acc = acc_t<T>;
  const int64_t f = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const bool real = f < m.b_nnz;
  const int lane = threadIdx.x % kLanes;
  int64_t first = 0, last = 0, k = 0;
  if (real) {
    const int64_t j = row_of(ints<I>(m.b_crow), m.inner, f);
    first = ints<I>(m.t_crow)[j], last = ints<I>(m.t_crow)[j + 1], k = ints<I>(m.b_col)[f];
  }
  const int64_t sets = m.shared ? 1 : m.batch, summed = m.shared ? m.batch : 1;
  for (int64_t set = blockIdx.y; set < sets; set += gridDim.y) {
    Acc sum = 0;
    for (int64_t s = first + lane; s < last; s += kLanes) {
      const int64_t i = ints<I>(m.t_col)[s], e = ints<I>(m.t_index)[s];
      const int64_t at = lower_bound(ints<I>(m.c_col), ints<I>(m.c_crow)[i], ints<I>(m.c_crow)[i + 1], k);
      for (int64_t b = set; b < set + summed; ++b) {
        sum += to_acc(static_cast<const T*>(m.x)[b * m.x_batch + e]) *
               to_acc(static_cast<const T*>(m.g)[b * m.g_batch + at]);
      }
    }
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (real && lane == 0) static_cast<T*>(m.out)[set * m.b_nnz + f] = from_acc<T>(sum);
  }
}

int64_t most(int64_t n) {
  return std::min<int64_t>(n, 65535);
}

// Lanes for rows of `length` on the average.
int lanes_of(int64_t elements, int64_t rows) {
  return int(std::min<int64_t>(32, elements / std::max<int64_t>(rows, 1)));
}

template <typename I, typename T>
void matmul(CsrMatmul m, cudaStream_t stream) {
  if (m.gather_elements > 0 && !m.starts && !m.left && !m.right) {
    launch("csr_matmul_elementwise", elementwise_kernel<T>, Grid(ceil_div(m.c_nnz, kThreads * 4), most(m.batch)),
           kThreads, 0, stream, m);
  } else if (m.gather_elements > 0 || m.gather_rows > 0) {
    // Of a large product that a left operand shares: y of all samples at the end of the result, as it is wanted; then
    // all numbers before it; then those in its place.
    T* out = static_cast<T*>(m.out);
    const int64_t total = m.batch * m.c_nnz, groups = ceil_div(m.batch, kWide), laid_out = groups * kWide * m.b_nnz;
    const int64_t of_row = ceil_div(m.c_nnz, std::max<int64_t>(m.rows, 1));  // elements, on the average
    int64_t done = 0;
    if (m.x_batch == 0 && m.y_batch != 0 && !m.gather && m.batch >= kWide / 2 && m.batch <= 65535 &&
        total >= kWorthwhile * device_limits().sm_count && laid_out <= total / 4) {
      const uintptr_t end = reinterpret_cast<uintptr_t>(out + total - laid_out);
      T* beside = reinterpret_cast<T*>(end - end % alignof(Four<T>));
      launch("csr_matmul_interleave", interleave_kernel<T>, Grid(ceil_div(m.b_nnz, kThreads / 4), groups), kThreads, 0,
             stream, static_cast<const T*>(m.y), beside, m.b_nnz, m.batch);
      const int64_t limit = beside - out, elements = kThreads / (kWide / 4) * 4;
      if (m.gather_rows > 0) {
        const Grid grid(ceil_div(m.gather_rows, kWarps), most(ceil_div(of_row, 32)), groups);
        launch("csr_matmul_shared_lists_interleaved", shared_lists_interleaved_kernel<I, T>, grid, kThreads, 0, stream,
               m, static_cast<const T*>(beside), limit);
      } else {
        launch("csr_matmul_gather_interleaved", gather_interleaved_kernel<I, T>,
               Grid(ceil_div(m.gather_elements, elements), groups), kThreads, 0, stream, m,
               static_cast<const T*>(beside), limit);
      }
      const int64_t whole = limit / m.c_nnz;  // samples
      m.batch -= whole, m.y = static_cast<const T*>(m.y) + whole * m.y_batch, m.out = out + whole * m.c_nnz;
      done = limit % m.c_nnz;
    }
    const auto blocks = [&](int64_t elements) { return ceil_div(m.gather_elements, kThreads * elements); };
    const auto each = [&](auto elements) {
      constexpr int kOwn = decltype(elements)::value;
      launch("csr_matmul_gather", gather_kernel<I, T, 1, kOwn>, Grid(blocks(kOwn), most(m.batch)), kThreads, 0, stream,
             m, done);
    };
    // Threads for one row, in as many turns as its length takes; blocks share them as far as that fills the device.
    const int turns = int(std::min<int64_t>(ceil_div(of_row, kRowThreads), 64));
    const int threads = int(std::min<int64_t>(ceil_div(ceil_div(of_row, turns), 32) * 32, kRowThreads));
    const auto rows = [&](auto tile, auto own) {
      constexpr int kTile = decltype(tile)::value, kOwn = decltype(own)::value;
      const int64_t blocks = ceil_div(m.gather_rows, kOwn), samples = most(ceil_div(m.batch, kTile));
      const int64_t parts = std::min<int64_t>(turns, ceil_div(4 * device_limits().sm_count, blocks * samples));
      launch("csr_matmul_shared_lists", shared_lists_kernel<I, T, kTile, kOwn>, Grid(blocks, samples, parts), threads,
             0, stream, m, done);
    };
    using One = std::integral_constant<int, 1>;
    const bool single = m.batch == 1 || done > 0;
    if (m.gather_rows > 0) {
      single ? rows(One(), std::integral_constant<int, kRows>()) : rows(std::integral_constant<int, kSamples>(), One());
    } else if (single) {
      m.starts ? each(std::integral_constant<int, kElements>()) : each(std::integral_constant<int, kGathers>());
    } else {
      launch("csr_matmul_gather", gather_kernel<I, T, kSamples, 1>, Grid(blocks(1), most(ceil_div(m.batch, kSamples))),
             kThreads, 0, stream, m, done);
    }
  }
  if (m.piece_count > 0) {
    const auto expand = [&](auto tile) {
      constexpr int kTile = decltype(tile)::value;
      launch("csr_matmul_expand", expand_kernel<I, T, kTile>, Grid(m.piece_count, most(ceil_div(m.batch, kTile))),
             kThreads, 0, stream, m);
    };
    m.batch == 1 ? expand(std::integral_constant<int, 1>())
                 : expand(std::integral_constant<int, 16 / sizeof(acc_t<T>)>());
  }
  // Rows of a few parts are shared among warps as far as that fills the device.
  const auto parts = [&](int64_t rows, int64_t columns) {
    const int64_t blocks = ceil_div(rows, kWarps) * m.batch, wanted = 16 * int64_t(device_limits().sm_count);
    return std::max<int64_t>(1, std::min(ceil_div(columns, kColumns), ceil_div(wanted, blocks)));
  };
  if (m.axpy_rows > 0) {
    const Grid grid(ceil_div(m.axpy_rows, kWarps), most(m.batch), parts(m.axpy_rows, m.c_nnz / m.rows));
    launch("csr_matmul_axpy", axpy_kernel<I, T>, grid, kThreads, 0, stream, m);
  }
  if (m.accumulate_rows > 0) {
    const Grid grid(ceil_div(m.accumulate_rows, kWarps), most(m.batch), parts(m.accumulate_rows, 64 * kColumns));
    launch("csr_matmul_accumulate", accumulate_kernel<I, T>, grid, kThreads, 0, stream, m);
  }
}

}  // namespace

void csr_matmul_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    matmul<std::remove_pointer_t<decltype(i)>, std::remove_pointer_t<decltype(t)>>(m, stream);
  });
}

void csr_matmul_left_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    with_lanes(lanes_of(m.b_nnz, m.inner), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch("csr_matmul_left", left_kernel<I, T, kLanes>,
             Grid(ceil_div(m.a_nnz * kLanes, kThreads), m.shared ? 1 : most(m.batch)), kThreads, 0, stream, m);
    });
  });
}

void csr_matmul_right_cuda(const CsrMatmul& m, cudaStream_t stream) {
  dispatch(m.wide, m.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    with_lanes(lanes_of(m.a_nnz, m.inner), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch("csr_matmul_right", right_kernel<I, T, kLanes>,
             Grid(ceil_div(m.b_nnz * kLanes, kThreads), m.shared ? 1 : most(m.batch)), kThreads, 0, stream, m);
    });
  });
}

}  // namespace weft::sparse
