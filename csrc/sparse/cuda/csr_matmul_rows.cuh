// Rows of a planned product.
//
// axpy      a warp has a row, whose sums lie in registers, kColumns columns at a time. It reads a's elements 32 at a
//           time, a lane each, and hands them round; then rows of b, lanes next to each other.
// short axpy  where most rows of a have an element or two and few columns, kShortLanes lanes have a row: all rows wait
//           at once for what they look up, instead of one after the other.
// accumulate  a warp has a row and a window of kColumns of its columns, whose sums lie in shared memory. Each lane
//           looks up the window's part of another row of b; then the warp adds the parts one after the other. Within a
//           row columns differ, so that no two lanes add to one sum, and a warp waits for nobody.
//           A row of few columns is summed by groups of lanes, as many as have room for its columns: each group takes
//           other rows of b, and has sums of its own, which are added up in order in the end.
#pragma once
#include "sparse/cuda/csr_matmul_lookup.cuh"

namespace weft::sparse {
namespace {

constexpr int kWindow = 4 * 1024;  // bytes of a warp's sums

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

constexpr int kShortLanes = 8;  // of a row, each with kShortOwn columns at a time
constexpr int kShortOwn = 4;

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) short_axpy_kernel(CsrMatmul m) {
  const int64_t r = int64_t(blockIdx.x) * (kThreads / kShortLanes) + threadIdx.x / kShortLanes;
  if (r >= m.axpy_rows) return;
  const I *a_col = ints<I>(m.a_col), *b_crow = ints<I>(m.b_crow);
  const int64_t i = ints<I>(m.axpy)[r], begin = ints<I>(m.a_crow)[i], end = ints<I>(m.a_crow)[i + 1];
  const int64_t place = ints<I>(m.c_crow)[i], n = ints<I>(m.c_crow)[i + 1] - place;
  for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
    const T* x = static_cast<const T*>(m.x) + b * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + b * m.y_batch;
    T* out = static_cast<T*>(m.out) + b * m.c_nnz + place;
    for (int64_t own = threadIdx.x % kShortLanes; own < n; own += kShortLanes * kShortOwn) {
      acc_t<T> sum[kShortOwn] = {};
      for (int64_t e = begin; e < end; ++e) {
        const T* row = y + b_crow[a_col[e]] + own;
        const acc_t<T> factor = to_acc(x[e]);
#pragma unroll
        for (int c = 0; c < kShortOwn; ++c) {
          if (own + c * kShortLanes < n) sum[c] += factor * to_acc(row[c * kShortLanes]);
        }
      }
#pragma unroll
      for (int c = 0; c < kShortOwn; ++c) {
        if (own + c * kShortLanes < n) out[own + c * kShortLanes] = from_acc<T>(sum[c]);
      }
    }
  }
}

constexpr int kTurns = 4;  // rows of b that a group of lanes reads at a time

// Row r of those that accumulate, whose columns are fewer than 32 from the first to the last, for one sample. Sums are
// a warp's, 32 numbers.
template <typename I, typename T>
__device__ __forceinline__ void accumulate_narrow(const CsrMatmul& m, int64_t a_begin, int64_t a_end, int64_t c_begin,
                                                  int64_t c_end, const T* x, const T* y, T* out, acc_t<T>* sums) {
  const I *b_crow = ints<I>(m.b_crow), *b_col = ints<I>(m.b_col), *c_col = ints<I>(m.c_col);
  const I low = c_col[c_begin];
  const int span = int(c_col[c_end - 1] - low) + 1, room = span <= 8 ? 8 : span <= 16 ? 16 : 32;
  const int lane = threadIdx.x % 32, own = lane % room, groups = 32 / room;
  sums[lane] = 0;
  __syncwarp();
  for (int64_t from = a_begin; from < a_end; from += kTurns * groups) {
    I column[kTurns];
    acc_t<T> product[kTurns];
    bool real[kTurns];
#pragma unroll
    for (int k = 0; k < kTurns; ++k) {
      const int64_t e = from + k * groups + lane / room;
      real[k] = false;
      if (e < a_end) {
        const I j = ints<I>(m.a_col)[e], begin = b_crow[j];
        real[k] = I(own) < b_crow[j + 1] - begin;  // without a sum that the largest patterns have no numbers for
        if (real[k]) column[k] = b_col[begin + I(own)], product[k] = to_acc(x[e]) * to_acc(y[begin + I(own)]);
      }
    }
#pragma unroll
    for (int k = 0; k < kTurns; ++k) {
      if (real[k]) sums[lane - own + int(column[k] - low)] += product[k];
      __syncwarp();  // the next row of b may have another lane's column
    }
  }
  for (int64_t s = c_begin + lane; s < c_end; s += 32) {
    acc_t<T> sum = 0;
    for (int g = 0; g < groups; ++g) sum += sums[g * room + int(c_col[s] - low)];
    out[s] = from_acc<T>(sum);
  }
  __syncwarp();  // the sums are read before the next sample's are set to zero
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
  if (last - c_col[c_begin] < 32) {
    if (blockIdx.z > 0) return;
    for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
      accumulate_narrow<I, T>(m, a_begin, a_end, c_begin, c_end, static_cast<const T*>(m.x) + b * m.x_batch,
                              static_cast<const T*>(m.y) + b * m.y_batch, static_cast<T*>(m.out) + b * m.c_nnz, sums);
    }
    return;
  }
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

}  // namespace
}  // namespace weft::sparse
