// A tile of the gradient of a matrix by warps: 32 rows at a time, of which a quarter has 8, as three products of TF32.
//
// Cost: about 770 clocks of a multiprocessor's tensor cores for 64 x 64 by 32 rows, and 150 in which all warps wait,
// find their places and split numbers.
#pragma once

#include "jit/four_elements.jit.cuh"
#include "vertex/exec/cuda/outer_rows.jit.cuh"

namespace {

using weft::FourOf;
using weft::u32;

constexpr int kDepth = 32, kStages = 4, kSide = kDepth * kPitch;
static_assert(2 * kSide * kStages * 4 <= kOuterSharedBytes);
static_assert(kTile / 32 * (kTile / 32) * kRowParts * 32 == kPersistentThreads && kDepth == 8 * kRowParts);

// Leaves the quarters' sums in `shared`, one tile after the other in rows of kPartialPitch, where all threads see them.
// Four warps have a quarter of the tile each, and a warp's columns are dealt to the lanes so that four that a lane
// multiplies are neighbours.
template <int kLeft, int kRight>
__device__ __forceinline__ void sum_tile(const float* lefts, long long left_stride, int top, const float* rights,
                                         long long right_stride, int begin, int count, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, fourth = lane / 4, in_fourth = lane % 4;
  const int part = warp % kRowParts, down = warp / kRowParts % (kTile / 32) * 32, across = warp / (kRowParts * 2) * 32;
  const int chunks = (count + kDepth - 1) / kDepth;
  Rows<kLeft, kPersistentThreads, kDepth, kDepth> of_left(lefts, left_stride, top);
  Rows<kRight, kPersistentThreads, kDepth, kDepth> of_right(rights, right_stride, begin);
  const auto ask = [&](int chunk) {
    if (chunk < chunks) {
      float* const to = shared + chunk % kStages * 2 * kSide;
      of_left.ask(count - chunk * kDepth, to);
      of_right.ask(count - chunk * kDepth, to + kSide);
    }
    weft::copy_commit();
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) ask(chunk);
  float sums[2][4][4] = {}, d[2][4][4] = {};
  // Tensor cores cut sums off instead of rounding them, so that they leave them in time.
  const auto add_up = [&] {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& of = d[i / 16][i / 4 % 4][i % 4];
      sums[i / 16][i / 4 % 4][i % 4] += of;
      of = 0.0f;
    }
  };
  for (int chunk = 0; chunk < chunks; ++chunk) {
    weft::copy_wait<kStages - 2>();
    __syncthreads();
    ask(chunk + kStages - 1);
    const float* const stage = shared + chunk % kStages * 2 * kSide + (part * 8 + in_fourth) * kPitch;
    u32 a_high[2][4], a_low[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto x = *reinterpret_cast<const FourOf<float>*>(stage + k * 4 * kPitch + down + fourth * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        weft::split_tf32(x.x[e], a_high[e / 2][k * 2 + e % 2], a_low[e / 2][k * 2 + e % 2]);
      }
    }
    u32 b_high[4][2], b_low[4][2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto x = *reinterpret_cast<const FourOf<float>*>(stage + kSide + k * 4 * kPitch + across + fourth * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) weft::split_tf32(x.x[e], b_high[e][k], b_low[e][k]);
    }
    // The small products first, and between two to the same sum all others.
#pragma unroll
    for (int term = 0; term < 3; ++term) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          weft::mma_tf32(d[m][n], term == 0 ? a_low[m] : a_high[m], term == 1 ? b_low[n] : b_high[n]);
        }
      }
    }
    if (chunk % 8 == 7) add_up();
  }
  add_up();
  weft::copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = down + fourth * 4 + m * 2 + i / 2, column = across + (in_fourth * 2 + i % 2) * 4;
      *reinterpret_cast<FourOf<float>*>(shared + (part * kTile + row) * kPartialPitch +
                                        column) = {{sums[m][0][i], sums[m][1][i], sums[m][2][i], sums[m][3][i]}};
    }
  }
  __syncthreads();
}

}  // namespace
