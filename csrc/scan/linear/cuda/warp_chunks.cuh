// Chunks of the small recurrences (dense linear_scan and rnn's backward pass, H <= 32) on the tensor cores.
//
// The columns of a chunk's map (see chunk_maps.cuh) are independent vectors that all pass through the same steps, v is
// one more vector that also receives the inhomogeneity. Columns are kept transposed in tiles of 16 (ColumnTiles) and
// multiplied by each step's matrix in split TF32.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "common/math.jit.cuh"
#include "scan/linear/cuda/chunk_maps.cuh"

namespace weft::scan::warp {
namespace {

// How HP units lie in blocks of 8 positions. Half a block at the end is padded, or spread over the even positions: then
// every lane holds one unit of it, and the products over it are half as deep.
template <int HP, bool kSpread>
struct Blocks {
  static constexpr int kCount = (HP + 7) / 8, kPadded = 8 * kCount, kLast = 8 * (kCount - 1);
  static constexpr bool kHalfAtEnd = kSpread && HP % 8 == 4;
  static_assert(HP % 4 == 0);
  static constexpr bool is_half(int block) { return kHalfAtEnd && block == kCount - 1; }
  static constexpr int halves(int block) { return is_half(block) ? 1 : 2; }  // units of a block that a lane holds
  // The unit at a position, HP where there is none.
  static constexpr int unit(int position) {
    if (!kHalfAtEnd || position < kLast) return position < HP ? position : HP;
    return position % 2 == 0 ? kLast + (position - kLast) / 2 : HP;
  }
  static constexpr int position(int unit) { return kHalfAtEnd && unit >= kLast ? 2 * unit - kLast : unit; }
};

// rows * right for tiles of 16 rows and one row of blocks of `right` at a time: al bh + ah bl in `small`, ah bh in
// `large`. The tensor core cuts its sums off instead of rounding them: with the small products apart, few sums are cut
// where it counts, and the two chains of products run side by side. kExact: `right` has no low part. kFlushes: flush()
// is used.
template <int kTiles, typename B, bool kFlushes = false, bool kExact = false>
struct SplitSum {
  static constexpr int NB = B::kCount;
  float small[kTiles][NB][4] = {}, large[kTiles][NB][4] = {}, rounded[kFlushes ? kTiles : 1][NB][4] = {};

  __device__ __forceinline__ void add(int kb, const float (&rows)[kTiles][4], const unsigned (&high)[NB][2],
                                      const unsigned (&low)[NB][2]) {
    const bool half_deep = B::is_half(kb);
    auto multiply = [&](float(&d)[4], const unsigned(&a)[4], const unsigned(&b)[2]) {
      if (half_deep) {
        mma_half_tf32(d, a, b);
      } else {
        mma_tf32(d, a, b);
      }
    };
    unsigned ah[kTiles][4], al[kTiles][4];
    // Operand registers: (row, 2 j), (row + 8, 2 j), (row, 2 j + 1), (row + 8, 2 j + 1).
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int half = 0; half < B::halves(kb); ++half)
#pragma unroll
        for (int u = 0; u < 2; ++u) split_tf32(rows[t][2 * u + half], ah[t][2 * half + u], al[t][2 * half + u]);
#pragma unroll
    for (int nb = 0; nb < NB; ++nb)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply(large[t][nb], ah[t], high[nb]);
        multiply(small[t][nb], al[t], high[nb]);
      }
    if constexpr (!kExact) {
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) multiply(small[t][nb], ah[t], low[nb]);
    }
  }

  // Takes the large products out of the tensor core's sum, for chains so long that even few cut sums show.
  __device__ __forceinline__ void flush() {
    static_assert(kFlushes);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rounded[t][nb][i] += large[t][nb][i];
          large[t][nb][i] = 0.0f;
        }
  }

  __device__ __forceinline__ float at(int t, int nb, int i) const {
    const float sum = large[t][nb][i] + small[t][nb][i];
    if constexpr (kFlushes) return rounded[t][nb][i] + sum;
    return sum;
  }
};

// kTiles tiles of 16 columns, transposed: row 16 t + 8 u + lane / 4 is a column, its elements at positions (see Blocks)
// 8 kb + 2 (lane % 4) + half are in part[p][t][kb][2 u + half]. That is the accumulator of m16n8k8, and also its left
// operand: the accumulator's columns 2 j and 2 j + 1 are with the lane that holds k = j and j + 4 of the operand, and k
// may be numbered at will as long as the right operand agrees.
template <int kParts, int kTiles, int HP, typename B>
struct ColumnTiles {
  static constexpr int NB = B::kCount;
  float part[kParts][kTiles][NB][4];
  int exponent[kTiles][2];
  unsigned lost = 0, offsets = 0;  // a bit per (t, u)

  __device__ __forceinline__ bool is_offset(int t, int u) const { return offsets >> (2 * t + u) & 1; }

  // The identity's column; column kParts * HP is v and starts as zero.
  __device__ __forceinline__ void start(int t, int u, int column) {
    exponent[t][u] = 0;
    if (column == kParts * HP) offsets |= 1u << (2 * t + u);
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int kb = 0; kb < NB; ++kb)
#pragma unroll
        for (int half = 0; half < B::halves(kb); ++half) {
          const int k = B::unit(kb * 8 + 2 * (int(threadIdx.x) % 4) + half);
          part[p][t][kb][2 * u + half] = k < HP && column == p * HP + k ? 1.0f : 0.0f;
        }
  }

  __device__ __forceinline__ void rescale(bool last) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float largest = 0.0f;
#pragma unroll
        for (int p = 0; p < kParts; ++p)
#pragma unroll
          for (int kb = 0; kb < NB; ++kb)
#pragma unroll
            for (int half = 0; half < B::halves(kb); ++half)
              largest = fmaxf(largest, fabsf(part[p][t][kb][2 * u + half]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        if (is_offset(t, u)) continue;
        if (largest < kLostBelow) lost |= 1u << (2 * t + u);
        float factor;
        if (is_rescaled(largest, last, exponent[t][u], factor)) {
#pragma unroll
          for (int p = 0; p < kParts; ++p)
#pragma unroll
            for (int kb = 0; kb < NB; ++kb)
#pragma unroll
              for (int half = 0; half < B::halves(kb); ++half) part[p][t][kb][2 * u + half] *= factor;
        }
      }
  }

  __device__ __forceinline__ void store(int t, int u, int column, float* map) const {
    using Map = MapLayout<kParts, HP>;
    const int j = threadIdx.x % 4;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int kb = 0; kb < NB; ++kb) {
        const int k = B::unit(kb * 8 + 2 * j);
        if (k == HP) continue;
        const bool is_v = column == Map::kStates;
        float* to = map + (is_v ? Map::kOffset + p * HP + k : (p * HP + k) * Map::kRow + column);
        to[0] = part[p][t][kb][2 * u];
        if (!B::is_half(kb)) to[is_v ? 1 : Map::kRow] = part[p][t][kb][2 * u + 1];
      }
    if (j == 0 && column < Map::kStates)
      map[Map::kExponents + column] = stored_exponent(exponent[t][u], lost >> (2 * t + u) & 1);
  }
};

}  // namespace
}  // namespace weft::scan::warp
