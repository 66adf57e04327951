// Gradients of a planned product: lanes share an element of a, or of b, and look each product's element up in the
// sorted row of the product.
#pragma once
#include "sparse/cuda/csr_matmul_lookup.cuh"

namespace weft::sparse {
namespace {

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

}  // namespace
}  // namespace weft::sparse
