// Expanded rows of a planned product, in pieces.
//
// A block has a piece of the product, one row or a few short ones, for as many samples as 16 bytes hold. It
// writes the piece's scalar products into shared memory, those of an element side by side, by planned words
// of two bytes: where a product goes, and whose it is; then each thread sums its elements' own. Products are
// dealt to threads one by one, whatever the length of a segment, what one element of a brings: lanes read
// b's numbers next to each other. All that waits for nothing but the piece's numbers is read at once: b's
// numbers' words, a's numbers, and before the barrier where the first elements begin. Bound by L2, from which
// each row of a reads its rows of b again, 4 bytes a product and the words' 2, and at one sample by what a
// block waits for one after the other: its piece, its lists, a's numbers, b's.
#pragma once
#include "sparse/cuda/csr_matmul_lookup.cuh"
#include "sparse/plan.h"

namespace weft::sparse {
namespace {

constexpr int kBegins = 4;                              // elements of a thread whose beginnings it reads at a time
constexpr int kDealt = int(kPieceProducts) / kThreads;  // products of a thread
constexpr int kPlaceMask = (1 << kPlaceBits) - 1;

// Of a thread's samples.
template <typename T, int kTile>
struct alignas(sizeof(acc_t<T>) * kTile) Numbers {
  acc_t<T> v[kTile];
};

// Of what a thread knows of a product: its word, above it the segment that it is counted from.
__device__ __forceinline__ int segment_of(unsigned told) {
  return int((told >> 16) + ((told & 0xffff) >> kPlaceBits));
}

// blockIdx.x counts pieces.
template <typename I, typename T, int kTile>
__global__ void __launch_bounds__(kThreads, kTile == 1 && sizeof(I) == 4 ? 6 : 4) expand_kernel(CsrMatmul m) {
  constexpr int kAhead = kDealt / kTile;  // products whose numbers are read before the first is written
  static __shared__ Numbers<T, kTile> products[kPieceProducts];
  static __shared__ Numbers<T, kTile> factors[kPieceSegments];  // of a, one a segment
  static __shared__ I rights[kPieceSegments];
  const I* piece = ints<I>(m.pieces) + kPieceNumbers * int64_t(blockIdx.x);
  const I first_element = piece[0], first_segment = piece[1];
  const int segments = int(piece[3]), elements = int(piece[4]), count = int(piece[5]);
  const auto* bases = reinterpret_cast<const uint16_t*>(m.lists) + piece[2];
  const uint16_t *starts = bases + (count + kBaseOf - 1) / kBaseOf, *words = starts + elements + 1;
  const I *left = ints<I>(m.segments) + first_segment, *right = left + m.segment_count;
  const int64_t sample = first_sample<kTile>();
  if (sample >= m.batch) return;
  const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
  const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
  T* out = static_cast<T*>(m.out) + sample * m.c_nnz + first_element;
  const int64_t samples = m.batch - sample;
  unsigned told[kDealt];
#pragma unroll
  for (int u = 0; u < kDealt; ++u) {
    const int q = int(threadIdx.x) + u * kThreads;
    told[u] = q < count ? words[q] | unsigned(bases[q / kBaseOf]) << 16 : 0u;
  }
  for (int s = threadIdx.x; s < segments; s += kThreads) {
    const I l = left[s];
    rights[s] = right[s];
#pragma unroll
    for (int t = 0; t < kTile; ++t) {
      factors[s].v[t] = t < samples ? to_acc(x[t * m.x_batch + l]) : acc_t<T>(0);
    }
  }
  __syncthreads();
#pragma unroll
  for (int first = 0; first < kDealt; first += kAhead) {
    T number[kAhead][kTile];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int q = int(threadIdx.x) + (first + u) * kThreads;
      const T* numbers = y + (rights[segment_of(told[first + u])] + q);
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        if (q < count && t < samples) number[u][t] = numbers[t * m.y_batch];
      }
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (int(threadIdx.x) + (first + u) * kThreads < count) {
        Numbers<T, kTile> found = factors[segment_of(told[first + u])];
#pragma unroll
        for (int t = 0; t < kTile; ++t) found.v[t] = t < samples ? found.v[t] * to_acc(number[u][t]) : acc_t<T>(0);
        products[told[first + u] & kPlaceMask] = found;
      }
    }
  }
  uint16_t from[kBegins], to[kBegins];
  const auto read_begins = [&](int first) {
#pragma unroll
    for (int p = 0; p < kBegins; ++p) {
      const int e = first + p * kThreads;
      from[p] = e < elements ? starts[e] : uint16_t(0), to[p] = e < elements ? starts[e + 1] : uint16_t(0);
    }
  };
  read_begins(threadIdx.x);
  __syncthreads();
  for (int first = threadIdx.x; first < elements; first += kBegins * kThreads) {
    if (first >= kBegins * kThreads) read_begins(first);
#pragma unroll
    for (int p = 0; p < kBegins; ++p) {
      const int e = first + p * kThreads;
      if (e >= elements) break;
      Numbers<T, kTile> sum = products[from[p]];
      for (int q = from[p] + 1; q < to[p]; ++q) {
        const Numbers<T, kTile> next = products[q];
#pragma unroll
        for (int t = 0; t < kTile; ++t) sum.v[t] += next.v[t];
      }
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        if (t < samples) __stcs(out + t * m.c_nnz + e, from_acc<T>(sum.v[t]));
      }
    }
  }
}

}  // namespace
}  // namespace weft::sparse
