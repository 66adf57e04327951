// Products of CSR matrices whose pattern is planned, and their gradients.
//
// listed   a thread has an element of the product for a few samples, for which it reads the list once: bound by the
// bytes. copied   a warp has a row, a multiple of a row of b. found    a block has a row, whose sums lie in shared
// memory, one per column of a window of columns. It adds the rows of b
//          one after the other; within a row columns differ, so that no two threads add to one sum.
// left, right   lanes share an element of a, or of b, and look each product's element up in the sorted row of the
// product.
//
// No atomics: every sum has a fixed order.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_matmul_kernels.h"
#include "sparse/cuda/dispatch.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSamples = 4;         // of one thread
constexpr int kWindow = 32 * 1024;  // bytes of sums

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

template <typename I, typename T, int kTile>
__global__ void __launch_bounds__(kThreads) listed_kernel(CsrMatmul m) {
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= m.c_nnz) return;
  const I *starts = ints<I>(m.starts), *left = ints<I>(m.left), *right = ints<I>(m.right);
  const int64_t begin = starts ? starts[e] : e, end = starts ? int64_t(starts[e + 1]) : e + 1;
  for (int64_t first = int64_t(blockIdx.y) * kTile; first < m.batch; first += int64_t(gridDim.y) * kTile) {
    const T* x = static_cast<const T*>(m.x) + first * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + first * m.y_batch;
    const int64_t count = m.batch - first;
    State<T> sum[kTile] = {};
    for (int64_t s = begin; s < end; ++s) {
      const int64_t l = left ? int64_t(left[s]) : s, r = right[s];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        if (t < count) sum[t] += to_state(x[t * m.x_batch + l]) * to_state(y[t * m.y_batch + r]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      if (t < count) static_cast<T*>(m.out)[(first + t) * m.c_nnz + e] = from_state<T>(sum[t]);
    }
  }
}

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) copied_kernel(CsrMatmul m) {
  const int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (i >= m.rows) return;
  const int64_t e = ints<I>(m.a_crow)[i], first = ints<I>(m.c_crow)[i], n = ints<I>(m.c_crow)[i + 1] - first;
  if (n == 0) return;
  const int64_t from = ints<I>(m.b_crow)[ints<I>(m.a_col)[e]];
  for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
    const State<T> factor = to_state(static_cast<const T*>(m.x)[b * m.x_batch + e]);
    const T* row = static_cast<const T*>(m.y) + b * m.y_batch + from;
    T* out = static_cast<T*>(m.out) + b * m.c_nnz + first;
    for (int64_t t = threadIdx.x % 32; t < n; t += 32) out[t] = from_state<T>(factor * to_state(row[t]));
  }
}

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) found_kernel(CsrMatmul m) {
  using Acc = State<T>;
  constexpr int kColumns = kWindow / sizeof(Acc);
  __shared__ Acc sums[kColumns];
  const I *a_crow = ints<I>(m.a_crow), *a_col = ints<I>(m.a_col), *b_crow = ints<I>(m.b_crow),
          *b_col = ints<I>(m.b_col), *c_col = ints<I>(m.c_col);
  const int64_t i = blockIdx.x, begin = ints<I>(m.c_crow)[i], end = ints<I>(m.c_crow)[i + 1];
  if (begin == end) return;
  for (int64_t b = blockIdx.y; b < m.batch; b += gridDim.y) {
    const T* x = static_cast<const T*>(m.x) + b * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + b * m.y_batch;
    T* out = static_cast<T*>(m.out) + b * m.c_nnz;
    // Windows begin at the first column that is still to be written.
    for (int64_t next = begin; next < end;) {
      const int64_t low = c_col[next], high = low + kColumns, stop = lower_bound(c_col, next, end, high);
      for (int64_t s = next + threadIdx.x; s < stop; s += kThreads) sums[c_col[s] - low] = 0;
      __syncthreads();
      for (int64_t e = a_crow[i]; e < a_crow[i + 1]; ++e) {
        const int64_t first = b_crow[a_col[e]], last = b_crow[a_col[e] + 1];
        const Acc factor = to_state(x[e]);
        for (int64_t f = lower_bound(b_col, first, last, low) + threadIdx.x; f < last && b_col[f] < high;
             f += kThreads) {
          sums[b_col[f] - low] += factor * to_state(y[f]);
        }
        __syncthreads();
      }
      for (int64_t s = next + threadIdx.x; s < stop; s += kThreads) out[s] = from_state<T>(sums[c_col[s] - low]);
      __syncthreads();
      next = stop;
    }
  }
}

// out[e] = sum over k of y[j, k] g[i, k], element e of a in row i and column j.
template <typename I, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) left_kernel(CsrMatmul m) {
  using Acc = State<T>;
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
        sum += to_state(static_cast<const T*>(m.y)[b * m.y_batch + f]) *
               to_state(static_cast<const T*>(m.g)[b * m.g_batch + at]);
      }
    }
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (real && lane == 0) static_cast<T*>(m.out)[set * m.a_nnz + e] = from_state<T>(sum);
  }
}

// out[f] = sum over i of x[i, j] g[i, k], element f of b in row j and column k.
template <typename I, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) right_kernel(CsrMatmul m) {
  using Acc = State<T>;
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
        sum += to_state(static_cast<const T*>(m.x)[b * m.x_batch + e]) *
               to_state(static_cast<const T*>(m.g)[b * m.g_batch + at]);
      }
    }
    for (int other = kLanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (real && lane == 0) static_cast<T*>(m.out)[set * m.b_nnz + f] = from_state<T>(sum);
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
void matmul(const CsrMatmul& m, cudaStream_t stream) {
  if (m.kind == Kind::listed) {
    const int64_t blocks = ceil_div(m.c_nnz, kThreads);
    if (m.batch == 1) {
      launch("csr_matmul_listed", listed_kernel<I, T, 1>, Grid(blocks), kThreads, 0, stream, m);
    } else {
      launch("csr_matmul_listed", listed_kernel<I, T, kSamples>, Grid(blocks, most(ceil_div(m.batch, kSamples))),
             kThreads, 0, stream, m);
    }
  } else if (m.kind == Kind::copied) {
    launch("csr_matmul_copied", copied_kernel<I, T>, Grid(ceil_div(m.rows, kWarps), most(m.batch)), kThreads, 0, stream,
           m);
  } else {
    launch("csr_matmul_found", found_kernel<I, T>, Grid(m.rows, most(m.batch)), kThreads, 0, stream, m);
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
