// Gathered elements of a planned product: each has a list of its scalar products.
//
// A thread has a few elements of the product, or one for a few samples, for which it reads the list once. Of
// a large batch and a left operand that it shares, y is first laid out with its samples side by side, in the
// part of the result that is written last: else each sample's number is in another line, and lines are what
// L1 counts. Bound by the bytes, those of the lists among them.
// Where rows share few lists of several products an element, these stay in L1 and L2, and only x, y and the
// result cross the memory: a block has two rows that follow each other, and a thread the same element of
// both, so that what waits for an index waits once (four rows take 62 registers a thread, or spill). Of the
// large batch a warp has 32 elements of a row and its block eight such rows: those of a 3x3 convolution,
// eight positions side by side, read 10 positions of y a line for 24 products. Where there is no list at all,
// numbers are multiplied four at a time.
#pragma once
#include "sparse/cuda/csr_matmul_lookup.cuh"

namespace weft::sparse {
namespace {

constexpr int kElements = 2;      // of a thread that has one sample, where most elements are one product
constexpr int kGathers = 4;       // the same where all are
constexpr int kSteps = 4;         // products of an element at a time, where elements have several
constexpr int kWide = 16;         // samples whose numbers lie side by side
constexpr int kRows = 2;          // that share lists, of a thread that has one sample
constexpr int kRowThreads = 512;  // of a row, at most

// A thread has kElements elements of the product, for kTile samples, of each kSteps products at a time: what it reads
// of one does not wait for another. Of the first sample it leaves out blocks whose elements are all among the first
// `done`.
template <typename I, typename T, int kTile, int kElements, int kSteps>
__global__ void __launch_bounds__(kThreads) gather_kernel(CsrMatmul m, int64_t done) {
  constexpr int kLoads = kElements * kSteps;  // load p is of element p % kElements
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
    for (I step = 0; step < most; step += kSteps) {
      // Loads of one kind together, so that none waits for another's.
      bool real[kLoads];
      I r[kLoads], l[kLoads];
#pragma unroll
      for (int p = 0; p < kLoads; ++p) {
        real[p] = step + p / kElements < end[p % kElements] - begin[p % kElements];
        l[p] = real[p] ? begin[p % kElements] + step + p / kElements : I(0);
      }
#pragma unroll
      for (int p = 0; p < kLoads; ++p) r[p] = !right ? l[p] : real[p] ? right[l[p]] : I(0);
      if (left) {
#pragma unroll
        for (int p = 0; p < kLoads; ++p) l[p] = real[p] ? left[l[p]] : I(0);
      }
      T factor[kLoads][kTile], number[kLoads][kTile];
#pragma unroll
      for (int p = 0; p < kLoads; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) factor[p][t] = x[t * m.x_batch + l[p]];
        }
      }
#pragma unroll
      for (int p = 0; p < kLoads; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) number[p][t] = y[t * m.y_batch + r[p]];
        }
      }
#pragma unroll
      for (int p = 0; p < kLoads; ++p) {
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (real[p] && t < count) sum[p % kElements][t] += to_acc(factor[p][t]) * to_acc(number[p][t]);
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

// Where the products of four elements begin and end, of `n` elements from `own` on, by start(element). The most of one.
template <typename I, typename Place, typename Start>
__device__ __forceinline__ I bounds_of_four(I (&bound)[5], Place own, Place n, Start&& start) {
  I most = 0;
#pragma unroll
  for (int p = 0; p < 5; ++p) {
    bound[p] = start(own + p < n ? Place(own + p) : n);
    if (p > 0 && bound[p] - bound[p - 1] > most) most = bound[p] - bound[p - 1];
  }
  return most;
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
  I bound[5];
  const I most = bounds_of_four(bound, own, m.gather_elements, [&](int64_t e) { return starts ? starts[e] : I(e); });
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
    I bound[5];
    const I most = bounds_of_four(bound, own, row.n, [&](I e) { return starts[row.where + e]; });
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

}  // namespace
}  // namespace weft::sparse
