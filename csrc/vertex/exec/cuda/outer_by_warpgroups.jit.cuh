// A tile of the gradient of a matrix by warpgroups, on compute capability 9.0. Each has a quarter of the rows, 16 at a
// time and 64 further on the next, in memory of its own, as six products of numbers of bf16, three of which add up to
// one of fp32.
//
// Cost: 390 clocks of a multiprocessor's tensor cores for 64 x 64 by 32 rows, 530 of its shared memory, which the left
// factor's way through registers relieves, and 190 instructions of each warp for 64 x 64 by 64 rows. While one
// warpgroup waits, or splits numbers, others multiply.
#pragma once

#include "common/cuda/warpgroup.jit.cuh"
#include "vertex/exec/cuda/outer_rows.jit.cuh"

namespace {

using weft::u32;

constexpr int kDepth = 16, kStages = 3, kSide = kDepth * kPitch, kOctet = kTile * 16, kPlane = 2 * kOctet;
static_assert(kRowParts * (kStages * 2 * kSide * 4 + 3 * kPlane) <= kOuterSharedBytes);
static_assert(kPersistentThreads == kRowParts * 128 && kTile == 64);

struct alignas(8) TwoFloats {
  float x[2];
};

// Leaves the quarters' sums in `shared`, one tile after the other in rows of kPartialPitch, where all threads see them.
template <int kLeft, int kRight>
__device__ __forceinline__ void sum_tile(const float* lefts, long long left_stride, int top, const float* rights,
                                         long long right_stride, int begin, int count, float* shared) {
  const int part = threadIdx.x / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const int eighth = lane / 4, in_fourth = lane % 4;
  constexpr int kApart = kRowParts * kDepth;
  Rows<kLeft, 128, kDepth, kApart> of_left(lefts + part * kDepth * left_stride, left_stride, top);
  Rows<kRight, 128, kDepth, kApart> of_right(rights + part * kDepth * right_stride, right_stride, begin);
  float* const stages = shared + part * kStages * 2 * kSide;
  const u32 planes = weft::shared_address(shared + kRowParts * kStages * 2 * kSide) + part * 3 * kPlane;
  const int chunks = (count - part * kDepth + kApart - 1) / kApart;  // below 1: none
  const auto ask = [&](int chunk) {
    if (chunk < chunks) {
      float* const to = stages + chunk % kStages * 2 * kSide;
      const int left = count - part * kDepth - chunk * kApart;
      of_left.ask(left, to);
      of_right.ask(left, to + kSide);
    }
    weft::copy_commit();
  };
  for (int chunk = 0; chunk < kStages - 1; ++chunk) ask(chunk);
  float d[32] = {}, sums[32] = {};
  constexpr int kInside = 4;  // chunks that the tensor cores add up: they cut sums off instead of rounding them
  for (int chunk = 0; chunk < chunks; ++chunk) {
    weft::copy_wait<kStages - 2>();
    weft::warpgroup_barrier();
    ask(chunk + kStages - 1);
    const float* const stage = stages + chunk % kStages * 2 * kSide;
    // The factors have the rows in the order 0, 4, 1, 5, 2, 6, 3, 7, then 8, 12 and so on: so lanes read in different
    // banks. A lane has neighbouring columns of the left one.
    u32 a[3][4], b[3][4];
    float x[4][2], y[8];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const auto two =
          *reinterpret_cast<const TwoFloats*>(stage + (k * 4 + in_fourth) * kPitch + warp * 16 + eighth * 2);
      x[k][0] = two.x[0], x[k][1] = two.x[1];
    }
    const int column = thread % kTile, octet = thread / kTile;
#pragma unroll
    for (int k = 0; k < 8; ++k) y[k] = stage[kSide + (octet * 8 + k) * kPitch + column];
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[plane][i] = weft::take_bf16(x[i / 2 * 2][i % 2], x[i / 2 * 2 + 1][i % 2]);
        b[plane][i] = weft::take_bf16(y[i], y[i + 4]);
      }
      weft::store_shared(planes + plane * kPlane + octet * kOctet + column * 16,
                         {b[plane][0], b[plane][1], b[plane][2], b[plane][3]});
    }
    weft::fence_copy_engine();  // what the thread has put there is seen by the tensor cores
    weft::warpgroup_barrier();
    constexpr int kTerms = 6, kLefts[kTerms] = {2, 0, 1, 1, 0, 0}, kRights[kTerms] = {0, 2, 1, 0, 1, 0};
    weft::warpgroup_begin();
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {  // the small ones first
      weft::warpgroup_mma_bf16(d, a[kLefts[term]], weft::warpgroup_factor(planes + kRights[term] * kPlane, kOctet, 128),
                               term > 0 || chunk % kInside > 0);
    }
    weft::warpgroup_commit();
    weft::warpgroup_wait(d);
    if (chunk % kInside == kInside - 1 || chunk + 1 == chunks) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sums[i] += d[i];
    }
  }
  weft::copy_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int row = warp * 16 + eighth * 2 + i / 2 % 2, of = i / 4 * 8 + in_fourth * 2;
    *reinterpret_cast<TwoFloats*>(shared + (part * kTile + row) * kPartialPitch + of) = {{sums[i], sums[i + 1]}};
  }
  __syncthreads();
}

}  // namespace
