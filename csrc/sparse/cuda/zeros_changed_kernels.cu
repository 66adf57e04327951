// Whether weights have other zeros than they had: blocks share out chunks of all weights, whose places travel in the
// kernel's parameters; one that finds a difference writes the flag. Bound by the weights' bytes.
#include <algorithm>

#include "common/integers.h"
#include "common/launch.cuh"
#include "sparse/cuda/zeros_changed_kernels.h"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256, kEach = 8;  // numbers of a thread
constexpr int kParts = 64;                // of a launch
constexpr int kChunk = kThreads * kEach;

struct Zeros {
  StoredZeros parts[kParts];
  int64_t first[kParts + 1];  // chunk of each part; of the one after the last
  int count;
  int* changed;
};
static_assert(sizeof(Zeros) <= 4000);

// A half is zero where its bits are, but for the sign.
__device__ __forceinline__ bool nonzero(unsigned short bits) {
  return (bits & 0x7fff) != 0;
}
__device__ __forceinline__ bool nonzero(float x) {
  return x != 0;
}
__device__ __forceinline__ bool nonzero(double x) {
  return x != 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) zeros_changed_kernel(const __grid_constant__ Zeros z) {
  for (int64_t chunk = blockIdx.x; chunk < z.first[z.count]; chunk += gridDim.x) {
    int p = 0;
    while (chunk >= z.first[p + 1]) ++p;
    const StoredZeros& part = z.parts[p];
    const int64_t begin = (chunk - z.first[p]) * kChunk + threadIdx.x;
    bool different = false;
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const int64_t i = begin + u * kThreads;
      if (i < part.size) different |= nonzero(static_cast<const T*>(part.weight)[i]) != part.stored[i];
    }
    if (different) *z.changed = 1;  // whoever writes, it is the same number
  }
}

}  // namespace

void zeros_changed_cuda(const StoredZeros* parts, int64_t count, int element_size, int* changed, cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kParts) {
    Zeros z{};
    z.count = int(std::min<int64_t>(kParts, count - begin)), z.changed = changed;
    for (int p = 0; p < z.count; ++p) {
      z.parts[p] = parts[begin + p];
      z.first[p + 1] = z.first[p] + ceil_div(z.parts[p].size, kChunk);
    }
    const auto kernel = element_size == 2   ? zeros_changed_kernel<unsigned short>
                        : element_size == 4 ? zeros_changed_kernel<float>
                                            : zeros_changed_kernel<double>;
    launch("zeros_changed", kernel, Grid(std::min<int64_t>(z.first[z.count], 16 * device_limits().sm_count)), kThreads,
           0, stream, z);
  }
}

}  // namespace weft::sparse
