// Rows of a planned product.
//
// axpy      a warp has a row, whose sums lie in registers, kColumns columns at a time. It reads a's elements 32 at a
//           time, a lane each, and hands them round; then rows of b, lanes next to each other.
// short axpy  where most rows of a have an element or two and few columns, kShortLanes lanes have a row: all rows wait
//           at once for what they look up, instead of one after the other.
// accumulate  a warp has a row and a window of kColumns of its columns, whose sums lie in shared memory. Each lane
//           looks up the window's part of another row of b; then the warp adds the parts one after the other. Within a
//           row columns differ, so that no two lanes add to one sum, and a warp waits for nobody.
// narrow    where b has few columns, a warp has a row, whose columns are lanes' own, as often as there is room: each
//           group of lanes takes other elements of a, and its sums are added up in order in the end. Lanes read a's
//           elements in order, and where their rows of b begin and which columns these have; then they hand them round.
//           A lane finds its number of a row of b by counting the columns before its own. Bound by L1, which looks up
//           a line of b for each element of a.
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

// blockIdx.x counts rows, kWarps of them together.
template <typename I, typename T, int kTile>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 2
                                            : kTile == 1   ? 5
                                                           : 4) narrow_kernel(CsrMatmul m) {
  using Acc = acc_t<T>;
  constexpr int kHeld = kTile == 1 ? 2 : 1;      // elements of a that a lane reads at a time
  constexpr int kTogether = kTile == 1 ? 4 : 2;  // numbers of b that it waits for at a time, of each sample
  const int64_t r = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t first = first_sample<kTile>();
  if (r >= m.accumulate_rows || first >= m.batch) return;  // with all of its warp
  const int lane = threadIdx.x % 32;
  const int64_t i = m.accumulate_rows == m.rows ? r : int64_t(ints<I>(m.accumulate)[r]);
  const int64_t begin = ints<I>(m.a_crow)[i], end = ints<I>(m.a_crow)[i + 1];
  const int64_t place = ints<I>(m.c_crow)[i];
  const int n = int(ints<I>(m.c_crow)[i + 1] - place), groups = 32 / n, group = lane / n;
  const int column = int(ints<I>(m.c_col)[place + lane % n]);
  const unsigned own = 1u << column;
  const T* x = static_cast<const T*>(m.x) + first * m.x_batch;
  const T* y = static_cast<const T*>(m.y) + first * m.y_batch;
  const int64_t samples = m.batch - first;
  Acc sum[kTile] = {};
  for (int64_t from = begin; from < end; from += 32 * kHeld) {
    I row[kHeld], starts[kHeld];
    unsigned columns[kHeld];
    Acc factors[kHeld][kTile];
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t e = from + 32 * h + lane;
      row[h] = e < end ? ints<I>(m.a_col)[e] : I(-1);
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        factors[h][t] = e < end && t < samples ? to_acc(x[t * m.x_batch + e]) : Acc(0);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const I* of_row = ints<I>(m.narrow) + 2 * int64_t(row[h]);
      starts[h] = row[h] >= 0 ? of_row[0] : I(0), columns[h] = row[h] >= 0 ? unsigned(of_row[1]) : 0u;
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int64_t left = end - from - 32 * h;
      const int count = int(left < 32 ? left : 32);
      for (int k = 0; k < count; k += kTogether * groups) {
        bool real[kTogether];
        Acc factor[kTogether][kTile];
        T number[kTogether][kTile];
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
          const int e = k + u * groups + group;  // lanes beyond the last group take what nobody reads
          const unsigned of_row = __shfl_sync(kFull, columns[h], e & 31);
          const T* numbers = y + (__shfl_sync(kFull, starts[h], e & 31) + I(__popc(of_row & (own - 1))));
          real[u] = e < count && (of_row & own) != 0;
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            factor[u][t] = __shfl_sync(kFull, factors[h][t], e & 31);
            if (real[u] && t < samples) number[u][t] = numbers[t * m.y_batch];
          }
        }
#pragma unroll
        for (int u = 0; u < kTogether; ++u) {
#pragma unroll
          for (int t = 0; t < kTile; ++t) {
            if (real[u] && t < samples) sum[t] += factor[u][t] * to_acc(number[u][t]);
          }
        }
      }
    }
  }
  T* out = static_cast<T*>(m.out) + first * m.c_nnz + place;
#pragma unroll
  for (int t = 0; t < kTile; ++t) {
    Acc total = sum[t];
    for (int g = 1; g < groups; ++g) total += __shfl_sync(kFull, sum[t], (lane + g * n) & 31);
    if (lane < n && t < samples) out[t * m.c_nnz + lane] = from_acc<T>(total);
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

}  // namespace
}  // namespace weft::sparse
