// What the kernels of planned products of CSR matrices share: how threads look things up in a pattern.
#pragma once
#include "common/element.cuh"
#include "common/integers.h"
#include "sparse/csr_matmul_args.h"

namespace weft::sparse {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSamples = 4;    // of one thread
constexpr int kColumns = 128;  // of a warp's row, four a lane
constexpr unsigned kFull = 0xffffffffu;

template <typename I>
__device__ __forceinline__ const I* ints(const void* p) {
  return static_cast<const I*>(p);
}

// The first of a block's kTile samples, which blockIdx.y counts, and blockIdx.z where they are more; maybe none.
template <int kTile>
__device__ __forceinline__ int64_t first_sample() {
  return (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * kTile;
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

}  // namespace
}  // namespace weft::sparse
