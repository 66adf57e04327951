// Expanded rows of a planned product, in pieces.
//
// A block has a piece of the product, one row or a few short ones, for as many samples as 16 bytes hold. It
// writes the piece's scalar products into shared memory, those of an element side by side, by planned places
// of two bytes; then each thread sums its elements' own. Of a segment, what one element of a brings, lanes
// read b's numbers next to each other; all that waits for nothing but the piece's number is read at once:
// b's numbers and places, and before the barrier where the first elements begin. Bound by the 10 bytes a
// product and 6 an element, of which a result's 4 go to memory; y and most lists come from L2.
#pragma once
#include "sparse/cuda/csr_matmul_lookup.cuh"
#include "sparse/plan.h"

namespace weft::sparse {
namespace {

constexpr int kSegmentLanes = 8;  // that share a segment, two products each at a time
constexpr int kBegins = 4;        // elements of a thread whose products' beginnings it reads at a time

// Of a thread's samples.
template <typename T, int kTile>
struct alignas(sizeof(acc_t<T>) * kTile) Numbers {
  acc_t<T> v[kTile];
};

// blockIdx.x counts pieces, blockIdx.y samples, kTile of them together; kSegmentLanes lanes share a segment.
template <typename I, typename T, int kTile>
__global__ void __launch_bounds__(kThreads, kTile == 1 ? 6 : 4) expand_kernel(CsrMatmul m) {
  constexpr int kLanes = kSegmentLanes;
  static __shared__ Numbers<T, kTile> products[kPieceProducts];
  static __shared__ Numbers<T, kTile> factors[kPieceSegments];  // of a, one a segment
  static __shared__ I rights[kPieceSegments];
  static __shared__ int16_t begins[kPieceSegments + 1];
  const I* piece = ints<I>(m.pieces) + 3 * int64_t(blockIdx.x);
  const I first_element = piece[0], first_segment = piece[1];
  const int16_t* list = m.lists + piece[2];
  const int segments = list[0], elements = list[1];
  const int16_t *list_begins = list + 2, *starts = list_begins + segments + 1, *places = starts + elements + 1;
  const I *left = ints<I>(m.segments) + first_segment, *right = left + m.segment_count;
  for (int64_t sample = int64_t(blockIdx.y) * kTile; sample < m.batch; sample += int64_t(gridDim.y) * kTile) {
    const T* x = static_cast<const T*>(m.x) + sample * m.x_batch;
    const T* y = static_cast<const T*>(m.y) + sample * m.y_batch;
    T* out = static_cast<T*>(m.out) + sample * m.c_nnz + first_element;
    const int64_t count = m.batch - sample;
    for (int s = threadIdx.x; s < segments; s += kThreads) {
      const I l = left[s];
      rights[s] = right[s], begins[s] = list_begins[s];
#pragma unroll
      for (int t = 0; t < kTile; ++t) {
        factors[s].v[t] = t < count ? to_acc(x[t * m.x_batch + l]) : acc_t<T>(0);
      }
    }
    if (threadIdx.x == 0) begins[segments] = list_begins[segments];
    __syncthreads();
    for (int s = threadIdx.x / kLanes; s < segments; s += kThreads / kLanes) {
      const T* numbers = y + rights[s];
      const int end = begins[s + 1];
      const Numbers<T, kTile> factor = factors[s];
      for (int q = begins[s] + int(threadIdx.x) % kLanes; q < end; q += 2 * kLanes) {
        // Loads of two products together, so that none waits for the other's.
        const bool both = q + kLanes < end;
        const int place = places[q], other_place = both ? places[q + kLanes] : 0;
        T own[kTile], other[kTile];
#pragma unroll
        for (int t = 0; t < kTile; ++t) {
          if (t < count) own[t] = numbers[t * m.y_batch + q];
          if (t < count && both) other[t] = numbers[t * m.y_batch + q + kLanes];
        }
        Numbers<T, kTile> found;
#pragma unroll
        for (int t = 0; t < kTile; ++t) found.v[t] = t < count ? factor.v[t] * to_acc(own[t]) : acc_t<T>(0);
        products[place] = found;
        if (!both) continue;
#pragma unroll
        for (int t = 0; t < kTile; ++t) found.v[t] = t < count ? factor.v[t] * to_acc(other[t]) : acc_t<T>(0);
        products[other_place] = found;
      }
    }
    int16_t from[kBegins], to[kBegins];
    const auto read_begins = [&](int first) {
#pragma unroll
      for (int p = 0; p < kBegins; ++p) {
        const int e = first + p * kThreads;
        from[p] = e < elements ? starts[e] : int16_t(0), to[p] = e < elements ? starts[e + 1] : int16_t(0);
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
          if (t < count) __stcs(out + t * m.c_nnz + e, from_acc<T>(sum.v[t]));
        }
      }
    }
    __syncthreads();  // the sums are read before the next samples' products are written
  }
}

}  // namespace
}  // namespace weft::sparse
