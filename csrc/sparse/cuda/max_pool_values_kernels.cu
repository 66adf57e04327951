// Values of max-pooling's transposed Jacobians. A thread has an element, and finds its window's largest again: its
// neighbours read the same numbers, which L1 holds. Input and result move through memory once.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/dispatch.cuh"
#include "sparse/cuda/max_pool_values_kernels.h"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) max_pool_values_kernel(MaxPool m) {
  const int64_t total = m.planes * m.elements, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t plane = i / m.elements, e = i - plane * m.elements;
    const T* in = static_cast<const T*>(m.in) + plane * m.height * m.width;
    const bool picked = pick(m, m.col[e], [&](int at) { return to_state(in[at]); }) == m.row[e];
    static_cast<T*>(m.out)[i] = from_state<T>(State<T>(picked));
  }
}

}  // namespace

void max_pool_values_cuda(const MaxPool& m, cudaStream_t stream) {
  with_element<__half, __nv_bfloat16>(m.dtype, [&](auto* t) {
    const int64_t blocks = std::min<int64_t>(ceil_div(m.planes * m.elements, kThreads), 1 << 20);
    launch("max_pool_values", max_pool_values_kernel<std::remove_pointer_t<decltype(t)>>, Grid(blocks), kThreads, 0,
           stream, m);
  });
}

}  // namespace weft::sparse
