// What all chunks of a slice do to a state, of the maps that chunk_maps.cuh has of each: their product, as ranks send
// it.
//
// Decomposition: a tree of two levels. A block multiplies the maps of some chunks of a batch row, one after the other;
//   the last of a row's blocks to be through multiplies what these came to. A thread owns some rows of the product in
//   one column, and keeps that column's exponent.
// Shared memory: the product and the map that it is multiplied by, while the next map comes into registers: 16 S^2
// bytes
//   for S states.
// Numbers: a map's are float's, within 2 of each other's columns; products are double's, and row k of one takes the
//   exponent of column k of the next.
#pragma once
#include <cstdint>

#include "scan/linear/cuda/chunk_maps.cuh"
#include "scan/slices/slice_args.h"

namespace weft::scan::warp {
namespace {

constexpr int64_t kExponentOfZero = -(1ll << 40);          // below every other
constexpr int64_t kExponentOfZeros = kExponentOfZero / 2;  // of a column of zeros, which may meet other exponents

// Of the maps of `chunks` chunks, (chunks, rows, Map::kStride).
struct MapProducts {
  const float* maps;
  int64_t map_step, row_step;  // floats, from a chunk to the one after it in the order of the scan, and between rows
  int64_t chunks, rows;        // `rows` have maps of their own
  int H;                       // units of each part
  int64_t groups, group;       // blocks of a row, and chunks of each
  double* parts;               // (rows, groups, n n), n states without padding
  int64_t* exponents;          // (rows, groups, n)
  int* through;                // (rows): blocks that are; zeros before
  int32_t* out;                // (rows, n, n), packed
};

// Groups of about as many chunks as there are groups: no level waits for the other.
inline void cut_into_groups(MapProducts& p) {
  p.group = 1;
  while (p.group * p.group < p.chunks) ++p.group;
  p.groups = (p.chunks + p.group - 1) / p.group;
}

template <typename Map>
struct ProductOfMaps {
  static constexpr int S = Map::kStates, kThreads = 256, kLeast = kThreads / S;  // threads that share a column
  static constexpr int kRows = (S + kLeast - 1) / kLeast;
  static constexpr int kComing = (S * S + kThreads - 1) / kThreads;
  static constexpr int kBytes = (2 * S * S + kThreads + S) * 8;

  const MapProducts& p;
  double *product, *next;
  int64_t *brought, *next_exponents;
  int n, column, group, groups, rows, all;
  double now[kRows], coming[kComing];
  int64_t exponent, coming_exponent;

  __device__ ProductOfMaps(const MapProducts& given, double* shared) : p(given) {
    product = shared, next = shared + S * S;
    brought = reinterpret_cast<int64_t*>(next + S * S), next_exponents = brought + kThreads;
    n = Map::kParts * p.H, all = n * n;
    groups = min(kThreads / n, n);
    column = int(threadIdx.x) % n, group = int(threadIdx.x) / n;
    rows = group < groups ? (n - group + groups - 1) / groups : 0;
  }
  __device__ int row(int r) const { return group + r * groups; }
  // Where a state lies in a map.
  __device__ int padded(int state) const { return Map::kParts == 2 && state >= p.H ? Map::HP + state - p.H : state; }
  static __device__ int64_t exponent_of(double x) {
    int64_t exponent = 0;
    if (is_finite_bits(x)) mantissa_of(x, exponent);
    return exponent;
  }

  // Asks for a chunk's map, or for what a group came to.
  __device__ void ask_map(int64_t batch_row, int64_t chunk) {
    const float* const map = p.maps + chunk * p.map_step + batch_row * p.row_step;
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      if (at < all) coming[e] = double(map[padded(at / n) * Map::kRow + padded(at % n)]);
    }
    if (int(threadIdx.x) < n) {
      const int bits = __float_as_int(map[Map::kExponents + padded(int(threadIdx.x))]);
      coming_exponent = bits >> 1;
      // Nothing of a column of zeros may hide others. One that has lost nothing is none.
      if (bits & 1) {
        bool zeros = true;
        for (int i = 0; i < n; ++i) zeros = zeros && map[padded(i) * Map::kRow + padded(int(threadIdx.x))] == 0.0f;
        if (zeros) coming_exponent = kExponentOfZeros;
      }
    }
  }
  __device__ void ask_part(int64_t batch_row, int64_t group) {
    const int64_t part = batch_row * p.groups + group;
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      if (at < all) coming[e] = load_through(p.parts + part * all + at);
    }
    if (int(threadIdx.x) < n) coming_exponent = load_through(p.exponents + part * n + int(threadIdx.x));
  }
  // What other blocks have written, past the cache of this multiprocessor.
  template <typename T>
  static __device__ T load_through(const T* from) {
    return *static_cast<const volatile T*>(from);
  }

  // What was asked for, into shared memory.
  __device__ void take() {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      if (at < all) next[at] = coming[e];
    }
    if (int(threadIdx.x) < n) next_exponents[threadIdx.x] = coming_exponent;
    __syncthreads();
  }

  __device__ void begin() {
    take();
#pragma unroll
    for (int r = 0; r < kRows; ++r) now[r] = r < rows ? next[row(r) * n + column] : 0;
    exponent = rows > 0 ? next_exponents[column] : 0;
  }

  // What was taken, times what there is.
  __device__ void multiply() {
    int64_t own[kRows], largest = kExponentOfZero;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      own[r] = kExponentOfZero;
      if (r >= rows || now[r] == 0) continue;
      own[r] = next_exponents[row(r)];
      largest = max(largest, exponent_of(now[r]) + own[r]);
    }
    brought[threadIdx.x] = largest;
    __syncthreads();
    for (int g = 0; rows > 0 && g < groups; ++g) largest = max(largest, brought[g * n + column]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const int64_t by = own[r] - largest;
      product[row(r) * n + column] = now[r] == 0 ? 0 : scalbn(now[r], int(by < -4000 ? -4000 : by));
      now[r] = 0;
    }
    if (largest != kExponentOfZero) exponent += largest;
    __syncthreads();
    if (rows == 0) return;
#pragma unroll 4
    for (int k = 0; k < n; ++k) {
      const double x = product[k * n + column];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows) now[r] = fma(next[row(r) * n + k], x, now[r]);
      }
    }
  }

  // All blocks of a row, numbered from 0, by whole blocks of kThreads.
  __device__ void run(int64_t block) {
    const int64_t batch_row = block / p.groups, own = block % p.groups, first = own * p.group;
    const int64_t last = min(first + p.group, p.chunks);
    ask_map(batch_row, first);
    begin();
    if (first + 1 < last) ask_map(batch_row, first + 1);
    for (int64_t chunk = first + 1; chunk < last; ++chunk) {
      take();
      if (chunk + 1 < last) ask_map(batch_row, chunk + 1);
      multiply();
    }
    if (p.groups > 1) {
      const int64_t part = batch_row * p.groups + own;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows) p.parts[part * all + row(r) * n + column] = now[r];
      }
      if (rows > 0 && group == 0) p.exponents[part * n + column] = exponent;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) brought[0] = atomicAdd(p.through + batch_row, 1);
      __syncthreads();
      const bool is_last = brought[0] == p.groups - 1;
      __threadfence();
      if (!is_last) return;
      ask_part(batch_row, 0);
      begin();
      if (p.groups > 1) ask_part(batch_row, 1);
      for (int64_t g = 1; g < p.groups; ++g) {
        take();
        if (g + 1 < p.groups) ask_part(batch_row, g + 1);
        multiply();
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) p.out[batch_row * all + row(r) * n + column] = pack_product<float>(Scaled{now[r], exponent});
    }
  }
};

}  // namespace
}  // namespace weft::scan::warp
