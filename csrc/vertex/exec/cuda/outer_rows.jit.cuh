// Rows of both factors of a tile of the gradient of a matrix, left columns, transposed, @ right columns, as
// outer_by_warpgroups.jit.cuh and outer_by_warps.jit.cuh sum it over rows: with fp32 accuracy on the tensor cores, a
// quarter of the rows by a quarter of the warps each.
#pragma once

#include "common/cuda/ptx.jit.cuh"
#include "vertex/exec/cuda/persistent.jit.cuh"

namespace {

using weft::vertex::kPersistentThreads;

constexpr int kTile = weft::vertex::kOuterTile, kPitch = kTile + 8, kPartialPitch = kTile + 4, kRowParts = 4;
constexpr int kOuterSharedBytes = weft::vertex::outer_shared(WEFT_VERTEX_WARPGROUPS != 0);
static_assert(kRowParts * kTile * kPartialPitch * 4 <= kOuterSharedBytes);

// What a thread of kThreads asks for of kRows rows of kTile columns from `column` on: four neighbours at a time; zeros
// beyond the last row and column. Of rows that are kApart further on at each call.
template <int kWidth, int kThreads, int kRows, int kApart>
struct Rows {
  static constexpr int kAtOnce = kThreads / (kTile / 4), kEach = kRows / kAtOnce;
  static_assert(kEach * kAtOnce == kRows);
  const float* from;
  long long apart;
  int row, place, columns;  // those that are there from its first on

  __device__ __forceinline__ Rows(const float* rows, long long row_apart, int column)
      : apart(row_apart), row(threadIdx.x % kThreads / (kTile / 4)) {
    const int c = threadIdx.x % (kTile / 4) * 4;
    from = rows + row * apart + column + c;
    place = row * kPitch + c;
    columns = kWidth - column - c;
  }
  __device__ __forceinline__ void ask(int count, float* to) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool there = row + i * kAtOnce < count;
      const float* const x = from + i * kAtOnce * apart;
      float* const y = to + place + i * kAtOnce * kPitch;
      if constexpr (kWidth % 4 == 0) {
        weft::copy_async_padded(y, x, there && columns > 0 ? 16 : 0);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = there && e < columns ? x[e] : 0.0f;
      }
    }
    from += kApart * apart;
  }
};

}  // namespace
