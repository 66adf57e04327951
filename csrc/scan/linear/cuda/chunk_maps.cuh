// The maps of chunks that the small recurrences share (dense linear_scan and rnn's backward pass, H <= 32), and the way
// of a vector through all of them.
//
// A chunk of a linear recurrence is an affine map, x -> P x + v. Products can overflow or underflow where the product
// with the vector does not. Every column of P therefore carries a power of two (rescaling a column is exact), and
// carry_through_chunks asks for a chunk to be redone, step by step, where its map says less than the steps would.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "common/math.jit.cuh"
#include "scan/linear/cuda/padding.h"

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

// Whether a column with this largest entry is to be rescaled, and by what. `last`: every column is brought to [1, 2),
// so that what overflows later has really overflowed.
__device__ __forceinline__ bool is_rescaled(float largest, bool last, int& exponent, float& factor) {
  const bool outside = largest < kRescaleLow || largest > kRescaleHigh || last;
  if (!outside || !(largest >= 0x1p-126f && largest < 0x1p127f)) return false;
  const int e = binary_exponent(largest);
  factor = __int_as_float((127 - e) << 23);
  exponent += e;
  return true;
}

// A column's exponent in its map, see MapLayout.
__device__ __forceinline__ float stored_exponent(int exponent, bool lost) {
  return __int_as_float(2 * exponent + int(lost));
}

__device__ __forceinline__ void load4(const float* p, float (&v)[4]) {
  const float4 q = *reinterpret_cast<const float4*>(p);
  v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}

__device__ __forceinline__ void load4(const double* p, double (&v)[4]) {
  const double2 q = reinterpret_cast<const double2*>(p)[0], r = reinterpret_cast<const double2*>(p)[1];
  v[0] = q.x, v[1] = q.y, v[2] = r.x, v[3] = r.y;
}

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

// What is stored of a vector's way through the maps.
enum class Way {
  alone,  // it before each map and after the last
  whole,  // it before each map, of all chunks of a slice: what leaves the last is the caller's
  again   // as alone, from elsewhere, until it meets what is stored: from there on all is as it was
};

// One warp takes a vector through `count` maps, x <- P x + v, and stores it. Lane i holds element i (xh), and element
// HP + i (xc) where there are two parts; lanes from H on repeat lane H - 1. Maps arrive four ahead of their use by
// asynchronous copies. redo(n) replaces (xh, xc) by what the steps of the n-th chunk make of them. kSelects: the steps
// may drop what is not finite, where P multiplies it by zero.
template <typename Map, bool kSelects, Way kWay = Way::alone, typename Redo>
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
  [[maybe_unused]] float before_h = NAN, before_c = NAN;  // what is stored, read a map ahead
#pragma unroll 1
  for (int done = 0; done < count; ++done, start += start_step) {
    if constexpr (kWay == Way::again) {
      if (__all_sync(~0u, xh == before_h && (kParts == 1 || xc == before_c))) break;
      if (done + 1 < count) before_h = start[start_step], before_c = kParts == 2 ? start[start_step + HP] : 0.0f;
    }
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
  if (kWay == Way::whole || !own) return;
  start[0] = xh;
  if constexpr (kParts == 2) start[HP] = xc;
}

}  // namespace
}  // namespace weft::scan::warp
