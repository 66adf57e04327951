// Products of the chunks of the dense linear_scan (see warp.cuh) in fp32 without tensor cores, for H = 20
// and steps whose A[t] and b[t] are each one aligned piece of memory.
//
// A warp multiplies four chunks: eight lanes each, of which each holds three of a chunk's 21 columns, P and v, in
// registers. A[t] and b[t] lie in shared memory, four steps of each chunk, and each lane reads all of A[t]. A step is
// 1200 FMA and 105 reads of 16 bytes per lane: 1.16 us with one warp on a scheduler, 2.25 with two; the tensor cores
// take 1.35 us for four chunks, because every element of A has to be split. Four columns by six lanes leave room for
// one warp, two by eleven and one by 21 read A more often than memory shared by a multiprocessor gives it, and two
// steps at a time no longer fit the cache of instructions: all are slower.
#pragma once
#include "common/cuda/ptx.jit.cuh"
#include "scan/linear/cuda/chunk_maps.cuh"
#include "scan/linear/cuda/warp.h"

namespace weft::scan {
namespace {

using namespace warp;

struct ColumnShape {
  static constexpr int kHidden = kColumnsHidden, kColumns = 3, kLanes = 8, kChunks = kWarp / kLanes;
  static_assert(kColumns * kLanes > kHidden && kChunks == kColumnsPairs);
  static constexpr int kStages = 4, kWarps = 4;
  static constexpr int kStep = kHidden * kHidden + kHidden;  // A[t] and b[t]; chunks begin four banks apart
  static constexpr int kPieces = kStep / 4, kStage = kChunks * kStep;
  static constexpr int kElements = kStages * kStage + kHidden;  // per warp; zeros at the end
  static constexpr int kBytes = kWarps * kElements * int(sizeof(float));
};

// next += A p, of which next has the offset. Two rows at a time: four took no less time.
template <bool kTransposed, int H, int C>
__device__ __forceinline__ void multiply_columns(const float* A, const float (&p)[H][C], float (&next)[H][C]) {
  constexpr int kRows = 2;
  if constexpr (kTransposed) {
#pragma unroll
    for (int k = 0; k < H; ++k)
#pragma unroll
      for (int i = 0; i < H; i += 4) {
        float a[4];
        load4(A + k * H + i, a);
#pragma unroll
        for (int ii = 0; ii < 4; ++ii)
#pragma unroll
          for (int c = 0; c < C; ++c) next[i + ii][c] = fmaf(a[ii], p[k][c], next[i + ii][c]);
      }
  } else {
#pragma unroll
    for (int i = 0; i < H; i += kRows)
#pragma unroll
      for (int k = 0; k < H; k += 4) {
        float a[kRows][4];
#pragma unroll
        for (int r = 0; r < kRows; ++r) load4(A + (i + r) * H + k, a[r]);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < C; ++c) next[i + r][c] = fmaf(a[r][kk], p[k + kk][c], next[i + r][c]);
      }
  }
}

// The maps of chunks kChunks * warp and those that follow it, numbered as (chunk, batch), by one warp.
template <bool kTransposed>
__device__ __forceinline__ void multiply_chunks(const LinearScan& scan, const WarpPlan& plan, float* maps, int64_t warp,
                                                float* shared) {
  using S = ColumnShape;
  constexpr int H = S::kHidden, C = S::kColumns;
  using Map = MapLayout<1, H>;
  const int lane = threadIdx.x % kWarp, group = lane / S::kLanes, l = lane % S::kLanes, column = l * C;
  const int64_t maps_wanted = (plan.chunks - !plan.whole) * scan.B, own = warp * S::kChunks + group;
  if (warp * S::kChunks >= maps_wanted) return;
  const int64_t id = min(own, maps_wanted - 1), chunk = id / scan.B, batch = id % scan.B;  // the last may be repeated
  const int64_t first = chunk * plan.length;
  const int length = int(plan.length), steps = int(min(plan.length, scan.T - first));  // fewer of a slice's last chunk

  float* const zeros = shared + S::kStages * S::kStage;
  if (lane < H) zeros[lane] = 0.0f;
  const float* A = static_cast<const float*>(scan.A) + first * scan.A_t + batch * scan.A_b + l * 4;
  const float* b = static_cast<const float*>(scan.b) + first * scan.b_t + batch * scan.b_b;
  int ahead = 0, to_stage = 0, from_stage = 0;
  auto after = [](int stage) { return stage == (S::kStages - 1) * S::kStage ? 0 : stage + S::kStage; };
  auto fetch = [&] {
    if (ahead < steps) {
      float* const to = shared + to_stage + group * S::kStep + l * 4;
#pragma unroll
      for (int piece = 0; piece < S::kPieces; piece += S::kLanes) {
        const int of_b = piece + l - H * H / 4;  // the piece of b, which lies behind A's
        if (of_b >= H / 4) continue;
        copy_async<16>(to + piece * 4, of_b >= 0 ? b + of_b * 4 : A + piece * 4);
      }
      A += scan.A_t, b += scan.b_t;
    }
    copy_commit();
    ++ahead;
    to_stage = after(to_stage);
  };
  auto wait = [&] {
    copy_wait<S::kStages - 2>();
    __syncwarp();
    const float* step = shared + from_stage + group * S::kStep;
    from_stage = after(from_stage);
    return step;
  };
  for (int d = 0; d < S::kStages - 1; ++d) fetch();

  float p[H][C];
  {
    // The first step makes P = A and v = b. Without x0 it does not look at A.
    const float* A0 = wait();
    const bool from_nothing = first == 0 && !scan.x0 && !plan.whole;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
      for (int i = 0; i < H; ++i) {
        const int k = column + c;
        p[i][c] = 0.0f;
        if (k == H) p[i][c] = A0[H * H + i];
        if (k < H && !from_nothing) p[i][c] = A0[kTransposed ? k * H + i : i * H + k];
      }
    fetch();
  }
  int exponent[C] = {};
  unsigned lost = 0;  // a bit per column
  auto rescale = [&](bool last) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      float largest = 0.0f, factor;
#pragma unroll
      for (int i = 0; i < H; ++i) largest = fmaxf(largest, fabsf(p[i][c]));
      if (column + c >= H) continue;
      if (largest < kLostBelow) lost |= 1u << c;
      if (is_rescaled(largest, last, exponent[c], factor)) {
#pragma unroll
        for (int i = 0; i < H; ++i) p[i][c] *= factor;
      }
    }
  };

#pragma unroll 1
  for (int step = 1; step < length; ++step) {
    const float* At = wait();
    if (step < steps) {
      float next[H][C] = {};
      // v is column H: the lane that holds it reads b, the others zeros.
      constexpr int kOffset = H % C;
      const float* offset = column + kOffset == H ? At + H * H : zeros;
#pragma unroll
      for (int i = 0; i < H; i += 4) {
        float v[4];
        load4(offset + i, v);
#pragma unroll
        for (int k = 0; k < 4; ++k) next[i + k][kOffset] = v[k];
      }
      multiply_columns<kTransposed>(At, p, next);
#pragma unroll
      for (int i = 0; i < H; ++i)
#pragma unroll
        for (int c = 0; c < C; ++c) p[i][c] = next[i][c];
    }
    fetch();  // into the stage of the step before
    if (step % kRescaleSteps == kRescaleSteps - 1) rescale(false);
  }
  copy_wait<0>();
  rescale(true);

  if (own != id) return;
  float* const map = maps + id * Map::kStride;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const int k = column + c;
    if (k > H) continue;
#pragma unroll
    for (int i = 0; i < H; ++i) map[k == H ? Map::kOffset + i : i * Map::kRow + k] = p[i][c];
    if (k < H) map[Map::kExponents + k] = stored_exponent(exponent[c], lost >> c & 1);
  }
}

}  // namespace
}  // namespace weft::scan
