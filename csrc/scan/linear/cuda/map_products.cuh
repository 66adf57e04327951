// What all chunks of a slice do to a state, of the maps that chunk_maps.cuh has of each: their product, as ranks
// send it.
//
// Decomposition: a tree, cut by the rows of the batch and the device's multiprocessors. A block multiplies the maps of
//   some chunks of a batch row, one after the other; the last of the blocks below a node of the tree to be through
//   multiplies what these came to, up to the root. A thread owns some rows of the product in one column, and keeps
//   that column's exponent.
// Shared memory: the product and the map that it is multiplied by, while the next map comes into registers: 16 S^2
//   bytes for S states.
// Numbers: a map's are float's, within 2 of each other's columns; products are double's, and row k of one takes the
//   exponent of column k of the next.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/linear/cuda/chunk_maps.cuh"
#include "scan/linear/cuda/linear_scan.h"
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
  int64_t arity, nodes;        // of the tree above them; and all its nodes, level by level, the blocks first
  double* parts;               // (rows, nodes, n n), n states without padding
  int64_t* exponents;          // (rows, nodes, n)
  int* through;                // (rows, nodes): of those right below, how many are; zeros before
  int32_t* out;                // (rows, n, n), packed
};

// What a block takes to see that it is the last below its node and to fetch what the others came to, in products; the
// most levels above the blocks; and of blocks, those that a multiprocessor has registers for.
constexpr int64_t kHandOn = 4, kMostLevels = 3, kBlocksAtOnce = 3;

constexpr int64_t power(int64_t base, int64_t exponent) {
  return exponent == 0 ? 1 : base * power(base, exponent - 1);
}

// The tree with the shortest way from the leaves to the root, whose blocks run at once.
inline void cut_into_levels(MapProducts& p) {
  p.group = p.chunks, p.arity = 2;
  const int64_t blocks = kBlocksAtOnce * device_limits().sm_count;
  int64_t least = p.chunks - 1;
  for (int64_t group = std::max<int64_t>(1, ceil_div(p.chunks * p.rows, blocks)); group - 1 < least; ++group) {
    const int64_t groups = ceil_div(p.chunks, group);
    for (int64_t levels = 1; levels <= kMostLevels; ++levels) {
      int64_t arity = levels == 1 ? groups : 2;
      while (levels > 1 && power(arity, levels) < groups) ++arity;
      const int64_t way = group - 1 + levels * (arity - 1 + kHandOn);
      if (way < least) least = way, p.group = group, p.arity = arity;
    }
  }
  p.groups = ceil_div(p.chunks, p.group);
  p.nodes = 1;
  for (int64_t count = p.groups; count > 1; count = ceil_div(count, p.arity)) p.nodes += count;
}

// Where a tree works and writes, of matrices of n.
inline void prepare(MapProducts& p, int64_t n, int32_t* out, const Workspace& workspace, cudaStream_t stream) {
  cut_into_levels(p);
  const int64_t nodes = p.rows * p.nodes;
  p.parts = static_cast<double*>(workspace(size_t(8 * nodes * (n * n + n + 1))));
  p.exponents = reinterpret_cast<int64_t*>(p.parts + nodes * n * n);
  p.through = reinterpret_cast<int*>(p.exponents + nodes * n);
  p.out = out;
  cuda_check(cudaMemsetAsync(p.through, 0, nodes * sizeof(int), stream), "map products");
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
  double now[kRows], coming[kComing];  // `coming`: of a part
  float coming_map[kComing];
  int place[kComing];  // in a map, of what this thread brings
  int64_t exponent;
  int64_t coming_exponent;  // as maps store it: twice the exponent, and one more where the column has lost entries

  __device__ ProductOfMaps(const MapProducts& given, double* shared) : p(given) {
    product = shared, next = shared + S * S;
    brought = reinterpret_cast<int64_t*>(next + S * S), next_exponents = brought + kThreads;
    n = Map::kParts * p.H, all = n * n;
    groups = min(kThreads / n, n);
    column = int(threadIdx.x) % n, group = int(threadIdx.x) / n;
    rows = group < groups ? (n - group + groups - 1) / groups : 0;
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      place[e] = padded(at / n) * Map::kRow + padded(at % n);
    }
  }
  __device__ int row(int r) const {
    return group + r * groups;
  }
  // Where a state lies in a map.
  __device__ int padded(int state) const {
    return Map::kParts == 2 && state >= p.H ? Map::HP + state - p.H : state;
  }
  static __device__ int64_t exponent_of(double x) {
    int64_t exponent = 0;
    if (is_finite_bits(x)) mantissa_of(x, exponent);
    return exponent;
  }

  // Asks for a chunk's map, or for what a node came to. Nothing here looks at what comes, so that it is on its way
  // during a product.
  __device__ void ask_map(int64_t batch_row, int64_t chunk) {
    const float* const map = p.maps + chunk * p.map_step + batch_row * p.row_step;
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      if (int(threadIdx.x) + e * kThreads < all) coming_map[e] = map[place[e]];
    }
    if (int(threadIdx.x) < n) coming_exponent = __float_as_int(map[Map::kExponents + padded(int(threadIdx.x))]);
  }
  __device__ void ask_part(int64_t node) {
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      if (at < all) coming[e] = load_through(p.parts + node * all + at);
    }
    if (int(threadIdx.x) < n) coming_exponent = 2 * load_through(p.exponents + node * n + int(threadIdx.x));
  }
  // What other blocks have written, past the cache of this multiprocessor.
  template <typename T>
  static __device__ T load_through(const T* from) {
    return *static_cast<const volatile T*>(from);
  }

  // What was asked for, into shared memory, exponents as they came.
  template <typename T>
  __device__ void take(const T (&asked)[kComing]) {
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kComing; ++e) {
      const int at = int(threadIdx.x) + e * kThreads;
      if (at < all) next[at] = double(asked[e]);
    }
    if (int(threadIdx.x) < n) next_exponents[threadIdx.x] = coming_exponent;
    __syncthreads();
  }

  // Of a column of what was taken.
  __device__ int64_t next_exponent(int of) const {
    const int64_t stored = next_exponents[of];
    // Nothing of a column of zeros may hide others. One that has lost nothing is none.
    bool zeros = stored & 1;
    for (int i = 0; zeros && i < n; ++i) zeros = next[i * n + of] == 0;
    return zeros ? kExponentOfZeros : stored >> 1;
  }

  __device__ void begin() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) now[r] = r < rows ? next[row(r) * n + column] : 0;
    exponent = rows > 0 ? next_exponent(column) : 0;
  }

  // What was taken, times what there is.
  __device__ void multiply() {
    int64_t own[kRows], largest = kExponentOfZero;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      own[r] = kExponentOfZero;
      if (r >= rows || now[r] == 0) continue;
      own[r] = next_exponent(row(r));
      largest = max(largest, exponent_of(now[r]) + own[r]);
    }
    brought[threadIdx.x] = largest;
    __syncthreads();
#pragma unroll 4
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

  // Of the factors from `first` to `last`.
  template <typename T, typename Ask>
  __device__ __forceinline__ void multiply_all(int64_t first, int64_t last, const T (&asked)[kComing], const Ask& ask) {
    ask(first);
    take(asked);
    begin();
    if (first + 1 < last) ask(first + 1);
    for (int64_t k = first + 1; k < last; ++k) {
      take(asked);
      if (k + 1 < last) ask(k + 1);
      multiply();
    }
  }

  __device__ void put(int64_t node) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) p.parts[node * all + row(r) * n + column] = now[r];
    }
    if (rows > 0 && group == 0) p.exponents[node * n + column] = exponent;
  }

  // Whether all others below a node have put what they came to.
  __device__ bool is_last(int64_t node, int64_t below) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) brought[0] = atomicAdd(p.through + node, 1);
    __syncthreads();
    const bool last = brought[0] == below - 1;
    __threadfence();
    return last;
  }

  // All blocks of a row, numbered from 0, by whole blocks of kThreads.
  __device__ void run(int64_t block) {
    const int64_t batch_row = block / p.groups, tree = batch_row * p.nodes;
    int64_t own = block % p.groups;
    const int64_t begin = own * p.group;
    multiply_all(begin, min(begin + p.group, p.chunks), coming_map, [&](int64_t chunk) { ask_map(batch_row, chunk); });
    // The nodes of a level lie from `level` on.
    for (int64_t level = tree, count = p.groups; count > 1; level += count, count = ceil_div(count, p.arity)) {
      put(level + own);
      own /= p.arity;
      const int64_t first = own * p.arity, last = min(first + p.arity, count);
      if (!is_last(level + count + own, last - first)) return;
      multiply_all(first, last, coming, [&](int64_t node) { ask_part(level + node); });
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) p.out[batch_row * all + row(r) * n + column] = pack_product<float>(Scaled{now[r], exponent});
    }
  }
};

}  // namespace
}  // namespace weft::scan::warp
