// CSR times dense. With one column, 1 to 32 lanes share a row, as many as its average length keeps busy, and hold the
// sums of a few samples at a time: a column index, and a value that the batch shares, are read once for all of them.
// With more columns a thread has one element of the result, neighbours neighbouring columns. Nothing is kept between
// threads but the lanes' sums, which shuffles add in a fixed order. All are bound by the bytes of values and indices.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/csr_mm_kernels.h"
#include "sparse/cuda/dispatch.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256;
constexpr int kSamples = 4;  // of one thread

template <typename I, typename T, int kLanes, int kTile>
__global__ void __launch_bounds__(kThreads) csr_mv_kernel(CsrMm p) {
  using Acc = acc_t<T>;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col),
          *index = static_cast<const I*>(p.index);
  const T *values = static_cast<const T*>(p.values), *x = static_cast<const T*>(p.x);
  const int lane = threadIdx.x % kLanes;
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  // Lanes of a row beyond the last stay for the shuffles.
  const int64_t begin = row < p.rows ? crow[row] : 0, end = row < p.rows ? crow[row + 1] : 0;
  for (int64_t first = int64_t(blockIdx.y) * kTile; first < p.batch; first += int64_t(gridDim.y) * kTile) {
    const int64_t count = p.batch - first;
    Acc sum[kTile] = {};
    for (int64_t e = begin + lane; e < end; e += kLanes) {
      const int64_t j = col[e], at = index ? int64_t(index[e]) : e;
      Acc v = values && !p.values_batch ? to_acc(values[at]) : Acc(1);
#pragma unroll
      for (int s = 0; s < kTile; ++s) {
        if (s < count) {
          if (p.values_batch) v = to_acc(values[(first + s) * p.values_batch + at]);
          sum[s] += v * to_acc(x[(first + s) * p.x_batch + j]);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kTile; ++s) {
#pragma unroll
      for (int other = kLanes / 2; other > 0; other /= 2) sum[s] += __shfl_xor_sync(0xffffffffu, sum[s], other);
      if (lane == 0 && row < p.rows && s < count) {
        static_cast<T*>(p.out)[(first + s) * p.rows + row] = from_acc<T>(sum[s]);
      }
    }
  }
}

template <typename I, typename T>
__global__ void __launch_bounds__(kThreads) csr_mm_kernel(CsrMm p) {
  using Acc = acc_t<T>;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col),
          *index = static_cast<const I*>(p.index);
  const int64_t total = p.batch * p.rows * p.k;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += int64_t(gridDim.x) * kThreads) {
    const int64_t c = i % p.k, row = i / p.k % p.rows, b = i / p.k / p.rows;
    const T* values = p.values ? static_cast<const T*>(p.values) + b * p.values_batch : nullptr;
    const T* x = static_cast<const T*>(p.x) + b * p.x_batch + c;
    Acc sum = 0;
    const int64_t end = crow[row + 1];
    for (int64_t e = crow[row]; e < end; ++e) {
      const Acc v = values ? to_acc(values[index ? int64_t(index[e]) : e]) : Acc(1);
      sum += v * to_acc(x[int64_t(col[e]) * p.k]);
    }
    static_cast<T*>(p.out)[i] = from_acc<T>(sum);
  }
}

// kLanes threads share a row, each with every kLanes-th of its elements. blockIdx.y counts results of the batch.
template <typename I, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) csr_sampled_mm_kernel(CsrSampledMm p) {
  using Acc = acc_t<T>;
  const I *crow = static_cast<const I*>(p.crow), *col = static_cast<const I*>(p.col);
  const T *left = static_cast<const T*>(p.left), *right = static_cast<const T*>(p.right);
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  if (row >= p.rows) return;
  const int64_t end = crow[row + 1], sets = p.shared ? 1 : p.batch, summed = p.shared ? p.batch : 1;
  for (int64_t set = blockIdx.y; set < sets; set += gridDim.y) {
    for (int64_t e = crow[row] + threadIdx.x % kLanes; e < end; e += kLanes) {
      Acc sum = 0;
      for (int64_t b = set; b < set + summed; ++b) {
        const T* l = left + b * p.left_batch + row * p.k;
        const T* r = right + b * p.right_batch + int64_t(col[e]) * p.k;
        for (int64_t c = 0; c < p.k; ++c) sum += to_acc(l[c]) * to_acc(r[c]);
      }
      static_cast<T*>(p.out)[set * p.nnz + e] = from_acc<T>(sum);
    }
  }
}

// Lanes that an average row of so many elements keeps busy.
int lanes_of(int64_t nnz, int64_t rows) {
  int lanes = 1;
  while (lanes < 32 && int64_t(lanes) * 2 * rows <= nnz) lanes *= 2;
  return lanes;
}

template <typename I, typename T, int kLanes>
void launch_mv(const CsrMm& p, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.rows * kLanes, kThreads);
  const auto samples = [&](int64_t tile) { return std::min<int64_t>(ceil_div(p.batch, tile), 65535); };
  if (p.batch == 1) {
    launch("csr_mv", csr_mv_kernel<I, T, kLanes, 1>, Grid(blocks, 1), kThreads, 0, stream, p);
  } else {
    launch("csr_mv", csr_mv_kernel<I, T, kLanes, kSamples>, Grid(blocks, samples(kSamples)), kThreads, 0, stream, p);
  }
}

}  // namespace

void csr_mm_cuda(const CsrMm& p, cudaStream_t stream) {
  dispatch(p.wide, p.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    if (p.k == 1) {
      with_lanes(lanes_of(p.nnz, p.rows), [&](auto lanes) { launch_mv<I, T, decltype(lanes)::value>(p, stream); });
    } else {
      const int64_t blocks = std::min<int64_t>(ceil_div(p.batch * p.rows * p.k, kThreads), 1 << 20);
      launch("csr_mm", csr_mm_kernel<I, T>, Grid(blocks), kThreads, 0, stream, p);
    }
  });
}

void csr_sampled_mm_cuda(const CsrSampledMm& p, cudaStream_t stream) {
  dispatch(p.wide, p.dtype, [&](auto* i, auto* t) {
    using I = std::remove_pointer_t<decltype(i)>;
    using T = std::remove_pointer_t<decltype(t)>;
    with_lanes(lanes_of(p.nnz, p.rows), [&](auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      const Grid grid(ceil_div(p.rows * kLanes, kThreads), p.shared ? 1 : std::min<int64_t>(p.batch, 65535));
      launch("csr_sampled_mm", csr_sampled_mm_kernel<I, T, kLanes>, grid, kThreads, 0, stream, p);
    });
  });
}

}  // namespace weft::sparse
