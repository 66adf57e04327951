// What the chunked scans of the small recurrences share (dense linear_scan and rnn's backward pass, H <= 32).
//
// A chunk of a linear recurrence is an affine map, x -> P x + v. The columns of P are independent vectors that all pass
// through the same steps, v is one more vector that also receives the inhomogeneity. Columns are kept transposed in
// tiles of 16 (ColumnTiles) and multiplied by each step's matrix on the tensor cores in split TF32;
// carry_through_chunks then takes one vector through all maps.
//
// Products can overflow or underflow where the product with the vector does not. Every column therefore carries a power
// of two (rescaling a column is exact), and carry_through_chunks asks for a chunk to be redone, step by step, where its
// map says less than the steps would.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "common/math.jit.cuh"
#include "scan/cuda/padding.h"

namespace weft::scan::warp {
namespace {

constexpr int kWarp = 32;
// A column is rescaled when its largest entry leaves [2^-40, 2^40], looked at every kRescaleSteps steps.
constexpr int kRescaleSteps = 8;
constexpr float kRescaleLow = 0x1p-40f, kRescaleHigh = 0x1p40f;
// A chunk is redone where the terms of P g are this much larger than P g + v.
constexpr float kCancellation = 16.0f;
// Below this, entries of the column may have been flushed to zero between two looks.
constexpr float kLostBelow = 0x1p-100f;

__device__ __forceinline__ void load4(const float* p, float (&v)[4]) {
  const float4 q = *reinterpret_cast<const float4*>(p);
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}

__device__ __forceinline__ void load4(const double* p, double (&v)[4]) {
  const double2 q = reinterpret_cast<const double2*>(p)[0], r = reinterpret_cast<const double2*>(p)[1];
  v[0] = q.x, v[1] = q.y, v[2] = r.x, v[3] = r.y;
}

// ------------------------------------------------------------------------------------------------- tensor cores
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

// ------------------------------------------------------------------------------------------------- maps of chunks
// A map in memory, for kParts * HP states, padded with zeros: P row by row, v, and of every column of P twice the
// exponent of its power of two, plus one where entries were lost to underflow. (The power itself need not be a float
// where its product with the state is one.)
template <int kParts_, int HP_>
struct MapLayout {
  static constexpr int kParts = kParts_, HP = HP_;
  static constexpr int kStates = kParts * HP;
  static constexpr int kRow = int(map_row(kStates));
  static constexpr int kOffset = kStates * kRow, kExponents = kOffset + kStates;
  static constexpr int kStride = kExponents + kStates;
  static_assert(kStride == map_floats(kStates));
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

  // `last`: every column is brought to [1, 2), so that what overflows later has really overflowed.
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
        const bool outside = largest < kRescaleLow || largest > kRescaleHigh || last;
        if (outside && largest >= 0x1p-126f && largest < 0x1p127f) {
          const int e = binary_exponent(largest);
          const float factor = __int_as_float((127 - e) << 23);
          exponent[t][u] += e;
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
      map[Map::kExponents + column] = __int_as_float(2 * exponent[t][u] + int(lost >> (2 * t + u) & 1));
  }
};

constexpr int kBoundaryStages = 4;
template <typename Map>
constexpr int kBoundaryElements = kBoundaryStages* Map::kStride + 2 * Map::kStates;  // of shared memory

// A column's power of two, in three factors. Beyond 2^-279 .. 2^279 no state that is a float gives a product that is
// one.
struct Power {
  float third, rest;
  bool lost;
  __device__ __forceinline__ explicit Power(float stored) {
    const int bits = __float_as_int(stored), exponent = min(max(bits >> 1, -279), 279), part = exponent / 3;
    third = __int_as_float((part + 127) << 23), rest = __int_as_float((exponent - 2 * part + 127) << 23);
    lost = bits & 1;
  }
  __device__ __forceinline__ float operator*(float x) const { return x * third * third * rest; }
};

// One warp takes a vector through `count` maps, x <- P x + v, and stores it before each and after the last. Lane i
// holds element i (xh), and element HP + i (xc) where there are two parts; lanes from H on repeat lane H - 1. Maps
// arrive four ahead of their use by asynchronous copies. redo(n) replaces (xh, xc) by what the steps of the n-th chunk
// make of them. kSelects: the steps may drop what is not finite, where P multiplies it by zero.
template <typename Map, bool kSelects, typename Redo>
__device__ __forceinline__ void carry_through_chunks(int count, const float* from, int64_t map_step, float* start,
                                                     int64_t start_step, int H, float& xh, float& xc, float* shared,
                                                     const Redo& redo) {
  constexpr int kParts = Map::kParts, HP = Map::HP, S = Map::kStates, kStages = kBoundaryStages;
  const int lane = threadIdx.x % kWarp, unit = min(lane, H - 1);
  const bool own = lane == unit;  // a spare lane repeats the last unit, but stores nothing
  float* const stages = shared;
  float* exchange = shared + kStages * Map::kStride;
  for (int k = lane; k < 2 * S; k += kWarp) exchange[k] = 0.0f;  // the padding stays zero

  from += 4 * lane;
  start += unit;
  int fetched = 0;
  auto fetch = [&]() {
    if (fetched < count) {
      float* to = stages + fetched % kStages * Map::kStride + 4 * lane;
#pragma unroll
      for (int k = 0; k < Map::kStride / 4; k += kWarp)
        if (k + lane < Map::kStride / 4) copy_async<16>(to + 4 * k, from + 4 * k);
    }
    copy_commit();
    from += map_step;
    ++fetched;
  };
  for (int d = 0; d < kStages; ++d) fetch();
  copy_wait<kStages - 1>();
  __syncwarp();
  // The powers of part p of the n-th map. They are read a map ahead, so that nothing waits for them.
  auto power_of = [&](int n, int p) {
    return Power(n < count ? stages[n % kStages * Map::kStride + Map::kExponents + p * HP + unit] : 0.0f);
  };
  Power power_h = power_of(0, 0), power_c = power_of(0, kParts - 1);
#pragma unroll 1
  for (int done = 0; done < count; ++done, start += start_step) {
    if (own) {
      start[0] = xh;
      if constexpr (kParts == 2) start[HP] = xc;
    }
    const float* map = stages + done % kStages * Map::kStride;
    const float scaled_h = power_h * xh, scaled_c = kParts == 2 ? power_c * xc : 0.0f;
    if (own) {
      exchange[unit] = scaled_h;
      if constexpr (kParts == 2) exchange[HP + unit] = scaled_c;
    }
    // Non-negative floats order as their bits do, inf and NaN above all.
    auto largest_of = [](float h, float c) {
      return __reduce_max_sync(~0u, max(__float_as_uint(fabsf(h)), __float_as_uint(fabsf(c))));
    };
    const float largest_scaled = __uint_as_float(largest_of(scaled_h, scaled_c));
    float offset[kParts], row[kParts][S];  // read before the barrier that the exchange waits for
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      offset[p] = map[Map::kOffset + p * HP + unit];
#pragma unroll
      for (int k = 0; k < S; k += 4)
        load4(map + (p * HP + unit) * Map::kRow + k, *reinterpret_cast<float(*)[4]>(row[p] + k));
    }
    copy_wait<kStages - 2>();  // the next map
    __syncwarp();
    const Power next_power_h = power_of(done + 1, 0), next_power_c = power_of(done + 1, kParts - 1);
    float next[2] = {};
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      float sum[4] = {offset[p]};
#pragma unroll
      for (int k = 0; k < S; k += 4) {
        float v[4];
        load4(exchange + k, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = fmaf(row[p][k + i], v[i], sum[i]);
      }
      next[p] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }

    // Redo the chunk where the map says less than the steps would: the result is not finite; its terms cancel so far
    // that the error of P, relative to them, shows; or a column lost entries below 2^-100 of its scale that could still
    // be seen. P's entries are below 2, so most chunks need no look at the terms.
    const unsigned largest = largest_of(next[0], next[1]);
    fetch();  // into the stage of this map, which was read before the barrier
    const float bound = kCancellation * __uint_as_float(largest);
    bool doubtful = largest >= 0x7f800000u;
    if (doubtful || !(2.5f * S * largest_scaled <= bound)) {
      auto at_stake = [](float scaled, const Power& power) {
        const float lost = power.lost ? fabsf(scaled) * 0x1p-90f : 0.0f;
        return lost > 0x1p-126f ? lost * (kCancellation * 0x1p23f) : 0.0f;
      };
      float terms = at_stake(scaled_h, power_h);
      if constexpr (kParts == 2) terms = fmaxf(terms, at_stake(scaled_c, power_c));
      float magnitude[2] = {};
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int k = 0; k < S; ++k) magnitude[p] += fabsf(row[p][k] * exchange[k]);
      terms += fmaxf(magnitude[0], magnitude[1]);
      doubtful = doubtful || __uint_as_float(largest_of(terms, 0.0f)) > bound;
    }
    if (doubtful && (kSelects || __all_sync(~0u, isfinite(xh) && isfinite(xc)))) {
      redo(done);
    } else {
      xh = next[0], xc = next[1];
    }
    power_h = next_power_h, power_c = next_power_c;
    exchange = shared + kStages * Map::kStride + (done & 1 ? 0 : S);
  }
  copy_wait<0>();
  if (!own) return;
  start[0] = xh;
  if constexpr (kParts == 2) start[HP] = xc;
}

}  // namespace
}  // namespace weft::scan::warp
