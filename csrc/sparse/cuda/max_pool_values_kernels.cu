// Values of max-pooling's transposed Jacobians. A thread has a window: input and result move through memory once, and
// neighbours have neighbouring windows.
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
  // In 32 bits, in which division is several times faster.
  const unsigned windows = unsigned(m.output_height) * unsigned(m.output_width);
  const unsigned total = unsigned(m.planes) * windows, step = gridDim.x * kThreads;
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < total; i += step) {
    const unsigned plane = i / windows;
    const T* in = static_cast<const T*>(m.in) + int64_t(plane) * m.height * m.width;
    T* out = static_cast<T*>(m.out) + plane * m.elements;
    const auto read = [&](int at) { return to_acc(in[at]); };
    const auto write = [&](int e, bool picked) { out[e] = from_acc<T>(acc_t<T>(picked)); };
    pool(m, int(i - plane * windows), read, write);
  }
}

}  // namespace

void max_pool_values_cuda(const MaxPool& m, cudaStream_t stream) {
  with_element<__half, __nv_bfloat16>(m.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t windows = int64_t(m.output_height) * m.output_width;
    // As many channels at a time as 32 bits count the windows of, one step beyond the last included.
    const int64_t most = std::max<int64_t>(1, (int64_t(1) << 31) / std::max<int64_t>(windows, 1));
    for (int64_t first = 0; first < m.planes; first += most) {
      MaxPool part = m;
      part.planes = std::min(most, m.planes - first);
      part.in = static_cast<const T*>(m.in) + first * m.height * m.width;
      part.out = static_cast<T*>(m.out) + first * m.elements;
      const int64_t blocks = std::min<int64_t>(ceil_div(part.planes * windows, kThreads), 1 << 20);
      launch("max_pool_values", max_pool_values_kernel<T>, Grid(blocks), kThreads, 0, stream, part);
    }
  });
}

}  // namespace weft::sparse
