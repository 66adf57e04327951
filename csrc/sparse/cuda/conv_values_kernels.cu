// Patterns and values of transposed convolution Jacobians. A warp writes a row, consecutive lanes consecutive elements,
// and finds the tap of each from its place: only the result moves through memory. A block has rows of one input
// channel, whose weights, (out_channels, K), lie in shared memory where they fit. Where an element has one tap, lanes
// hold those of a window and hand them round. The backward pass has a warp per weight.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/conv_values_kernels.h"
#include "sparse/cuda/dispatch.cuh"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr size_t kStaged = 32 * 1024;  // bytes of weights that a block keeps

// a / b for a below 2^24, where float division is exact up to one.
__device__ __forceinline__ int quotient(int a, int b, float reciprocal) {
  int q = int(float(a) * reciprocal);
  q -= q * b > a;
  return q + ((q + 1) * b <= a);
}

// emit(output channel, element of the window, place in the row) for each element of the row that a warp has.
template <typename F>
__device__ __forceinline__ void each_element(const Conv& c, int first, int n, F&& emit) {
  if (n == 0) return;
  const int64_t length = c.out_channels * n;
  if (length < (1 << 24)) {
    const float reciprocal = 1.0f / float(n);
    for (int e = threadIdx.x % 32; e < int(length); e += 32) {
      const int co = quotient(e, n, reciprocal);
      emit(co, first + e - co * n, e);
    }
  } else {
    for (int64_t e = threadIdx.x % 32; e < length; e += 32) emit(e / n, int(first + e % n), e);
  }
}

// A row's part of the tables, and the tap of the element that the lane holds.
struct Window {
  int first, n, tap;
};

__device__ __forceinline__ Window window_of(const Conv& c, int64_t p) {
  Window w{0, 0, 0};
  if (p >= c.positions) return w;
  w.first = c.crow[p], w.n = c.crow[p + 1] - w.first;
  const int lane = threadIdx.x % 32;
  if (c.joins == c.elements && lane < w.n) w.tap = c.taps[w.first + lane];
  return w;
}

template <typename I>
__global__ void __launch_bounds__(kThreads) conv_pattern_kernel(Conv c) {
  I *crow = static_cast<I*>(c.out_crow), *col = static_cast<I*>(c.out);
  const int64_t channels = c.groups * c.in_channels;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    crow[channels * c.positions] = I(channels * c.out_channels * c.elements);
  }
  for (int64_t channel = blockIdx.y; channel < channels; channel += gridDim.y) {
    const int64_t base = channel * c.out_channels * c.elements;
    const int64_t plane = channel / c.in_channels * c.out_channels * c.output_positions;
    for (int64_t p = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; p < c.positions; p += gridDim.x * kWarps) {
      const int first = c.crow[p], n = c.crow[p + 1] - first;
      const int64_t begin = base + c.out_channels * first;
      if (threadIdx.x % 32 == 0) crow[channel * c.positions + p] = I(begin);
      each_element(c, first, n, [&](int64_t co, int w, int64_t e) {
        col[begin + e] = I(plane + co * c.output_positions + c.col[w]);
      });
    }
  }
}

template <typename T, bool kShared>
__global__ void __launch_bounds__(kThreads) conv_values_kernel(Conv c) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* staged = reinterpret_cast<T*>(memory);
  const T* weight = static_cast<const T*>(c.in);
  T* out = static_cast<T*>(c.out);
  const int64_t channels = c.groups * c.in_channels, step = c.in_channels * c.kernel;
  for (int64_t channel = blockIdx.y; channel < channels; channel += gridDim.y) {
    const int64_t group = channel / c.in_channels, ci = channel % c.in_channels;
    const T* own = weight + (group * c.out_channels * c.in_channels + ci) * c.kernel;
    // Read before the weights are there, and before the rows before are written.
    Window next = window_of(c, int64_t(blockIdx.x) * kWarps + threadIdx.x / 32);
    if constexpr (kShared) {
      __syncthreads();  // the weights of the channel before are no longer read
      for (int i = threadIdx.x; i < c.out_channels * c.kernel; i += kThreads) {
        staged[i] = own[i / int(c.kernel) * step + i % int(c.kernel)];
      }
      __syncthreads();
    }
    for (int64_t p = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; p < c.positions; p += gridDim.x * kWarps) {
      const Window own_window = next;
      const int first = own_window.first, n = own_window.n;
      next = window_of(c, p + gridDim.x * kWarps);
      T* row = out + channel * c.out_channels * c.elements + c.out_channels * first;
      if (c.joins == c.elements && n > 0 && n <= 32 && c.out_channels * n < (1 << 23)) {
        const int length = int(c.out_channels) * n, taps = int(c.kernel);
        const float reciprocal = 1.0f / float(n);
#pragma unroll 4
        for (int from = 0; from < length; from += 32) {
          const int e = from + int(threadIdx.x % 32), co = quotient(e, n, reciprocal);
          const int tap = __shfl_sync(0xffffffffu, own_window.tap, e - co * n);
          if (e < length) row[e] = kShared ? staged[co * taps + tap] : own[co * step + tap];
        }
        continue;
      }
      each_element(c, first, n, [&](int64_t co, int w, int64_t e) {
        const T* taps = kShared ? staged + co * c.kernel : own + co * step;
        const int from = c.tap_crow[w], to = c.tap_crow[w + 1];
        if (to - from == 1) {  // bit for bit, whatever it is
          row[e] = taps[c.taps[from]];
          return;
        }
        acc_t<T> sum = 0;
        for (int s = from; s < to; ++s) sum += to_acc(taps[c.taps[s]]);
        row[e] = from_acc<T>(sum);
      });
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) conv_values_backward_kernel(Conv c) {
  const T* grad = static_cast<const T*>(c.in);
  const int64_t weights = c.groups * c.out_channels * c.in_channels * c.kernel;
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; i < weights; i += int64_t(gridDim.x) * kWarps) {
    const int64_t tap = i % c.kernel, ci = i / c.kernel % c.in_channels, channel = i / c.kernel / c.in_channels;
    const int64_t group = channel / c.out_channels, co = channel % c.out_channels;
    const T* g = grad + (group * c.in_channels + ci) * c.out_channels * c.elements;
    acc_t<T> sum = 0;
    for (int s = c.tap_crow_t[tap] + lane; s < c.tap_crow_t[tap + 1]; s += 32) {
      const int w = c.taps_t[s], first = c.crow[c.row[w]], n = c.crow[c.row[w] + 1] - first;
      sum += to_acc(g[c.out_channels * first + co * n + w - first]);
    }
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    if (lane == 0) static_cast<T*>(c.out)[i] = from_acc<T>(sum);
  }
}

// Blocks per channel: at least one, and some eight per multiprocessor in all, so that staging weights is little work.
Grid grid_of(const Conv& c) {
  const int64_t channels = c.groups * c.in_channels, blocks = 8 * int64_t(device_limits().sm_count);
  const int64_t y = std::min<int64_t>(channels, 65535);
  return Grid(std::max<int64_t>(1, std::min(ceil_div(c.positions, kWarps), ceil_div(blocks, std::max<int64_t>(y, 1)))),
              std::max<int64_t>(y, 1));
}

}  // namespace

void conv_pattern_cuda(const Conv& c, cudaStream_t stream) {
  with_index(c.wide, [&](auto* i) {
    using I = std::remove_pointer_t<decltype(i)>;
    launch("conv_pattern", conv_pattern_kernel<I>, grid_of(c), kThreads, 0, stream, c);
  });
}

void conv_values_cuda(const Conv& c, cudaStream_t stream) {
  with_element<__half, __nv_bfloat16>(c.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const size_t bytes = size_t(c.out_channels) * c.kernel * sizeof(T);
    if (bytes <= kStaged) {
      launch("conv_values", conv_values_kernel<T, true>, grid_of(c), kThreads, bytes, stream, c);
    } else {
      launch("conv_values", conv_values_kernel<T, false>, grid_of(c), kThreads, 0, stream, c);
    }
  });
}

void conv_values_backward_cuda(const Conv& c, cudaStream_t stream) {
  with_element<__half, __nv_bfloat16>(c.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t weights = c.groups * c.out_channels * c.in_channels * c.kernel;
    const Grid grid(std::min<int64_t>(ceil_div(weights, kWarps), 1 << 20));
    launch("conv_values_backward", conv_values_backward_kernel<T>, grid, kThreads, 0, stream, c);
  });
}

}  // namespace weft::sparse
