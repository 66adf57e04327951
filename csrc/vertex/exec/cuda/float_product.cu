// Source: six products of bf16 for one of fp32 (Henry, Tang and Heinecke, 2019): three numbers of bf16 sum up to a
// float.
//
// Decomposition: a block has a tile of the result, 64 x 64 by 4 warps or 128 x 128 by 16, each warp 32 x 32; the blocks
// of a cluster share a tile, each has a piece of the inner dimension, and add up what they have in the order of the
// pieces, each some rows of the tile: no atomics, no workspace. Rows come through shared memory, three stages ahead.
// A lane takes four neighbours at once, whichever way a factor lies: of each 16 of the inner dimension those from
// 4 (lane % 4) on are its own, in the same order for both factors. Chunks of 16 bytes are swapped among themselves
// so that eight lanes always read from different banks. Tensor cores cut sums off instead of rounding them, so every
// 32 of the inner dimension leave them.
//
// An infinity has no rest, so it is NaN: what comes out as NaN is summed up again, one by one.
#include "vertex/exec/cuda/float_product.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "common/cuda/ptx.jit.cuh"
#include "common/integers.h"
#include "common/launch.cuh"

namespace weft::vertex {
namespace {

constexpr const char* kName = "vertex_float_product";
constexpr int kDepth = 32, kStages = 4, kWarpTile = 32, kMostPieces = 8;

struct alignas(16) Four {
  float x[4];
};

// Where chunk `chunk` of 16 bytes, of row `row` along the neighbours, is in a stage of kTile x kDepth numbers.
template <bool kByInner, int kTile>
__device__ __forceinline__ int place(int row, int chunk) {
  constexpr int kPitch = kByInner ? kDepth : kTile;
  return row * kPitch + (chunk ^ (kByInner ? row % 2 * 4 : row / 4 % 4 * 2)) * 4;
}

// What a thread asks for of kTile x kDepth numbers at a time: a chunk of 16 bytes of every kStep-th row.
template <bool kByInner, int kTile, int kThreads>
struct Copies {
  static constexpr int kChunks = (kByInner ? kDepth : kTile) / 4, kStep = kThreads / kChunks;
  static constexpr int kCount = kTile * kDepth / 4 / kThreads;
  const float* from;    // of the first row, at the begin of the inner dimension
  long long row, next;  // between its rows, between what it asks for at a time
  int first, chunk;     // its first row and its chunk
  int across;           // numbers that are there across the inner dimension

  __device__ __forceinline__ Copies(const float* data, long long stride, int begin, int numbers)
      : row(kStep * stride),
        next(kByInner ? kDepth : kDepth * stride),
        first(threadIdx.x / kChunks),
        chunk(threadIdx.x % kChunks),
        across(numbers) {
    from = data + (kByInner ? begin * stride : begin) + first * stride + chunk * 4;
  }

  // Those from number `turn` * kDepth of the inner dimension on, of which `inner` are there; the others are zeros.
  __device__ __forceinline__ void ask(int turn, int inner, float* to) const {
    const float* at = from + turn * next;
    const int rows = kByInner ? across : inner, numbers = (kByInner ? inner : across) - chunk * 4;
    const int bytes = numbers <= 0 ? 0 : numbers < 4 ? numbers * 4 : 16;
    // place(first + i * kStep, chunk): rows that are 8 apart have their chunks swapped by 4, or the same way.
    static_assert(kStep % 8 == 0);
    constexpr int kPitch = kByInner ? kDepth : kTile, kSwapped = kByInner ? 0 : kStep / 4 % 4 * 2;
    const int place_of_first = place<kByInner, kTile>(first, chunk),
              other = place<kByInner, kTile>(first, chunk ^ kSwapped);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is = first + i * kStep < rows && bytes > 0;
      copy_async_padded(to + i * kStep * kPitch + (i % 2 == 0 ? place_of_first : other), is ? at : from,
                        is ? bytes : 0);
      at += row;
    }
  }
};

// Four by four numbers of this lane: of 16 of the inner dimension, from `inner` on, its four, of four rows each that
// are kApart apart, or neighbours; [row][inner].
template <bool kByInner, int kTile>
__device__ __forceinline__ void read(const float* stage, int begin, int inner, float (&x)[4][4]) {
  const int lane = threadIdx.x % 32, fourth = lane / 4, in_fourth = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kByInner) {
      const int at = place<true, kTile>(begin + i * 8 + fourth, inner / 4 + in_fourth);
      const Four four = *reinterpret_cast<const Four*>(stage + at);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = four.x[e];
    } else {
      const int at = place<false, kTile>(inner + 4 * in_fourth + i, begin / 4 + fourth);
      const Four four = *reinterpret_cast<const Four*>(stage + at);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e][i] = four.x[e];
    }
  }
}

template <bool kLeftByInner, bool kRightByInner>
__device__ __noinline__ float one_by_one(const FloatProduct& p, int row, int column) {
  const long long left = kLeftByInner ? 1 : p.left.stride, right = kRightByInner ? 1 : p.right.stride;
  const float* x = p.left.data + row * (kLeftByInner ? static_cast<long long>(p.left.stride) : 1);
  const float* y = p.right.data + column * (kRightByInner ? static_cast<long long>(p.right.stride) : 1);
  float sum = 0.0f;
  for (long long k = 0; k < p.inner; ++k) sum = fmaf(x[k * left], y[k * right], sum);
  return sum;
}

template <int kWarpsAcross>
constexpr int kSharedBytes = kStages * 2 * kWarpsAcross* kWarpTile* kDepth * 4;

template <int kWarpsAcross, bool kLeftByInner, bool kRightByInner>
__global__ void __launch_bounds__(kWarpsAcross* kWarpsAcross * 32, kWarpsAcross == 2 ? 3 : 1)
    float_product_kernel(const __grid_constant__ FloatProduct p, int pieces) {
  constexpr int kTile = kWarpsAcross * kWarpTile, kThreads = kWarpsAcross * kWarpsAcross * 32, kSide = kTile * kDepth;
  constexpr int kPitch = kTile + 4;  // of the tile of the result
  static_assert(kTile * kPitch * 4 <= kSharedBytes<kWarpsAcross>);
  float* const shared = reinterpret_cast<float*>(dynamic_shared_memory());
  const int piece = blockIdx.x % pieces, tile = blockIdx.x / pieces;
  const int tiles = int((p.columns + kTile - 1) / kTile);
  const int top = tile / tiles * kTile, begin = tile % tiles * kTile;
  const int rows = min(kTile, int(p.rows) - top), columns = min(kTile, int(p.columns) - begin);
  const int all = int(p.inner), chunks = (all + kDepth - 1) / kDepth;
  const int first = int(static_cast<long long>(chunks) * piece / pieces),
            end = int(static_cast<long long>(chunks) * (piece + 1) / pieces);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, fourth = lane / 4, in_fourth = lane % 4;
  const int down = warp / kWarpsAcross * kWarpTile, across = warp % kWarpsAcross * kWarpTile;

  const Copies<kLeftByInner, kTile, kThreads> lefts(p.left.data, p.left.stride, top, rows);
  const Copies<kRightByInner, kTile, kThreads> rights(p.right.data, p.right.stride, begin, columns);
  const auto ask = [&](int chunk) {
    if (chunk < end) {
      float* const to = shared + chunk % kStages * 2 * kSide;
      const int inner = min(kDepth, all - chunk * kDepth);
      lefts.ask(chunk, inner, to);
      rights.ask(chunk, inner, to + kSide);
    }
    copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) ask(first + i);
  float sums[2][4][4] = {};
  for (int chunk = first; chunk < end; ++chunk) {
    copy_wait<kStages - 2>();
    __syncthreads();
    ask(chunk + kStages - 1);
    const float* const stage = shared + chunk % kStages * 2 * kSide;
    float d[2][4][4] = {};
#pragma unroll
    for (int inner = 0; inner < kDepth; inner += 16) {
      // Of the left factor rows 2 t + h of the lane are row fourth + 8 h of fragment t; of the right one columns are
      // column fourth of a fragment each.
      float a[4][4], b[4][4];
      read<kLeftByInner, kTile>(stage, down, inner, a);
      read<kRightByInner, kTile>(stage + kSide, across, inner, b);
      u32 lefts_of[3][2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int t = 0; t < 3; ++t) lefts_of[t][i / 2][i % 2 + 2 * k] = take_bf16(a[i][2 * k], a[i][2 * k + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        u32 rights_of[3][2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
          for (int t = 0; t < 3; ++t) rights_of[t][k] = take_bf16(b[n][2 * k], b[n][2 * k + 1]);
        }
        // The small products first, in turns of two sums.
#pragma unroll
        for (int order = 2; order >= 0; --order) {
#pragma unroll
          for (int t = order; t >= 0; --t) {
#pragma unroll
            for (int m = 0; m < 2; ++m) mma_bf16(d[m][n], lefts_of[t][m], rights_of[order - t]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] += d[m][n][i];
      }
    }
  }
  copy_wait<0>();
  __syncthreads();

#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int which = m * 2 + i / 2, column = in_fourth * 2 + i % 2;
      const int row = down + (kLeftByInner ? which * 8 + fourth : fourth * 4 + which);
      float* const to = shared + row * kPitch + across;
#pragma unroll
      for (int n = 0; n < 4; ++n) to[kRightByInner ? n * 8 + column : column * 4 + n] = sums[m][n][i];
    }
  }
  cluster::barrier();
  const int own = kTile / pieces;  // rows
#pragma unroll 4
  for (int i = threadIdx.x; i < own * kTile; i += kThreads) {
    const int row = piece * own + i / kTile, column = i % kTile;
    if (row >= rows || column >= columns) continue;
    float sum = 0.0f;
    for (int from = 0; from < pieces; ++from) {
      const u32 at = cluster::address_in(u32(from), shared_address(shared + row * kPitch + column));
      sum += __uint_as_float(cluster::load(at));
    }
    if (sum != sum) sum = one_by_one<kLeftByInner, kRightByInner>(p, top + row, begin + column);
    if (p.bias != nullptr) sum += p.bias[begin + column];
    float* const to = p.result + (top + row) * static_cast<long long>(p.stride) + begin + column;
    *to = p.more ? *to + sum : sum;
  }
  cluster::barrier();  // a block does not leave while others read what it has
}

// In how many pieces which tile takes the fewest clocks.
struct Plan {
  int warps_across, pieces;
  int64_t blocks;
};

Plan plan_of(const FloatProduct& p, int processors) {
  Plan best{};
  int64_t fewest = 0;
  for (const int warps : {2, 4}) {
    const int64_t tile = warps * kWarpTile, tiles = ceil_div(p.rows, tile) * ceil_div(p.columns, tile);
    for (int pieces = 1; pieces <= kMostPieces; pieces *= 2) {
      const int64_t chunks = ceil_div(ceil_div(p.inner, kDepth), pieces), rounds = ceil_div(tiles * pieces, processors);
      const int64_t each = warps == 2 ? 900 : 3400, begin = warps == 2 ? 2000 : 4000,
                    meeting = warps == 2 ? 1500 : 4000;
      const int64_t clocks = rounds * (chunks * each + begin + (pieces > 1 ? meeting : 0));
      if (best.pieces == 0 || clocks < fewest) best = {warps, pieces, tiles * pieces}, fewest = clocks;
    }
  }
  return best;
}

using Kernel = void (*)(FloatProduct, int);

Kernel kernel_of(int warps_across, bool left, bool right) {
  const auto of = [&]<int kWarpsAcross>() -> Kernel {
    if (left) {
      return right ? float_product_kernel<kWarpsAcross, true, true> : float_product_kernel<kWarpsAcross, true, false>;
    }
    return right ? float_product_kernel<kWarpsAcross, false, true> : float_product_kernel<kWarpsAcross, false, false>;
  };
  return warps_across == 2 ? of.operator()<2>() : of.operator()<4>();
}

int shared_bytes_of(int warps_across) {
  return warps_across == 2 ? kSharedBytes<2> : kSharedBytes<4>;
}

// Found out once for each device.
bool runs_float_products() {
  enum State : int { kUnknown, kNo, kYes };
  static std::array<std::atomic<int>, 64> known{};
  if (device_limits().compute_capability < 90) return false;
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& state = known[device % 64];
  if (state == kUnknown) {
    bool all = true;
    for (const int warps : {2, 4}) {
      for (const int ways : {0, 1, 2, 3}) {
        const Kernel kernel = kernel_of(warps, ways & 1, ways & 2);
        const int bytes = shared_bytes_of(warps);
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), kName);
        all &= runs_in_clusters(kName, kernel, kMostPieces, warps * warps * 32, bytes);
      }
    }
    state = all ? kYes : kNo;
  }
  return state == kYes;
}

}  // namespace

bool takes_float_product(const FloatProduct& p) {
  const auto aligned = [](const FloatProduct::Factor& f) {
    return reinterpret_cast<uintptr_t>(f.data) % 16 == 0 && f.stride % 4 == 0;
  };
  constexpr int64_t kMost = 1 << 30;
  if (!aligned(p.left) || !aligned(p.right) || std::max({p.rows, p.columns, p.inner}) > kMost) return false;
  return runs_float_products();
}

void launch_float_product(const FloatProduct& p, cudaStream_t stream) {
  const Plan plan = plan_of(p, device_limits().sm_count);
  launch_clusters(kName, kernel_of(plan.warps_across, p.left.by_inner, p.right.by_inner), plan.blocks / plan.pieces,
                  plan.pieces, plan.warps_across * plan.warps_across * 32, shared_bytes_of(plan.warps_across), stream,
                  p, plan.pieces);
}

}  // namespace weft::vertex
