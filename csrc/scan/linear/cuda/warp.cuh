// Kernels of the dense linear_scan for H <= 32, x[t] = A[t] x[t-1] + b[t].
//
// T is cut into chunks of L steps (see chunk_maps.cuh):
//
//   1. products: one warp per (chunk, batch) multiplies the chunk's map, P and v, by A[t] on the tensor cores in split
//      TF32, of which the half types need two products of three; where fp32 without them is faster, see
//      warp_columns.cuh. H^2 (H + 1) FMA per step; A is read once.
//   2. boundaries: one warp per batch row takes x through the maps, 0.13 to 0.27 us per chunk.
//   3. replay: one warp per (chunk, batch) runs the recurrence itself from the state at its chunk's start, lane i owns
//      element i, x is exchanged through shared memory. A is read a second time.
//
// With one chunk, the replay is all there is: the sequential recurrence, 0.13 us per step (H 8) to 0.26 (H 32), and 0.5
// (H 31) where lines do not begin at multiples of 16 bytes. A[t] and b[t] arrive by asynchronous copies, three steps
// before their use: a warp has about 5 KB in flight, a multiprocessor 80 to 160. Floor: two reads of A (one read where
// one chunk is enough).
#pragma once
#include <algorithm>
#include <type_traits>

#include "common/element.cuh"
#include "common/launch.cuh"
#include "scan/linear/cuda/step_ring.cuh"
#include "scan/linear/cuda/warp.h"
#include "scan/linear/cuda/warp_chunks.cuh"
#include "scan/linear/cuda/warp_columns.cuh"

namespace weft::scan {

namespace {

using namespace warp;

// Every H that is padded to HP is larger.
template <int HP>
constexpr int kSurelyInside = (HP - 1) / 8 * 8;

// kStride is for aligned lines, kTogether for others: whether those that lie one behind the other are copied as one.
// That takes fewer pieces, but more conflicts and care of whoever reads, and pays where most of a step is its copies.
template <typename T, int HP, int kStride, bool kTogether, bool kAligned>
using FourSteps =
    StepRing<T, std::conditional_t<kAligned, AlignedLines<T, HP, kStride>, AnyLines<T, HP, kTogether>>, 4>;

// ------------------------------------------------------------------------------------------------------ 3. replay
// Aligned lines of an odd number of 16 bytes: a lane per line reads 16 bytes without conflict.
template <typename T, int HP, bool kAligned>
using ReplayRing = FourSteps<T, HP, (HP * int(sizeof(T)) / 16 | 1) * 16 / int(sizeof(T)), (HP > 8), kAligned>;

template <typename T, int HP, bool kTransposed, bool kAligned, bool kWrite>
__device__ __forceinline__ void replay_steps(const LinearScan& scan, int64_t batch, int64_t first, int steps,
                                             bool has_x0, acc_t<T>& x, char* shared) {
  using Ring = ReplayRing<T, HP, kAligned>;
  const int lane = threadIdx.x % kWarp, unit = min(lane, int(scan.H) - 1);
  const bool own = lane == unit;  // a spare lane repeats the last unit, but stores nothing
  Ring ring(scan, reinterpret_cast<T*>(shared), batch, first, steps);
  acc_t<T>* exchange = reinterpret_cast<acc_t<T>*>(shared + Ring::kBytes);
  for (int k = lane; k < 2 * HP; k += kWarp) exchange[k] = acc_t<T>(0);
  ring.start();
  T* out = static_cast<T*>(const_cast<void*>(static_cast<const void*>(scan.out))) + first * scan.out_t +
           batch * scan.out_b + unit;
  const bool from_nothing = first == 0 && !has_x0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (own) exchange[unit] = x;
    const auto read = ring.wait(step);  // its barrier also shows x
    acc_t<T> sum[4] = {};
    if (!(from_nothing && step == 0)) {
      alignas(T) Line<T, HP> row;
      if constexpr (!kTransposed) read.load(unit, row);
#pragma unroll
      for (int k = 0; k < HP; k += 4) {
        acc_t<T> v[4];
        load4(exchange + k, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool inside = k + i < kSurelyInside<HP> || read.inside(k + i, unit);
          const T a = kTransposed ? *read.at(k + i, unit) : reinterpret_cast<const T*>(row)[k + i];
          sum[i] += (inside ? to_acc(a) : acc_t<T>(0)) * v[i];
        }
      }
    }
    x = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + to_acc(read.b[unit]);
    ring.fetch();  // into the stage of the step before
    if (kWrite) {
      if (own) *out = from_acc<T>(x);
      out += scan.out_t;
    }
    exchange = reinterpret_cast<acc_t<T>*>(shared + Ring::kBytes) + (step & 1 ? 0 : HP);
  }
  copy_wait<0>();
  __syncwarp();
}

template <typename T, int HP, bool kAligned>
constexpr int kReplayBytes = ReplayRing<T, HP, kAligned>::kBytes + 2 * HP* int(sizeof(acc_t<T>));

template <typename T, int HP, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(128)
    replay_kernel(LinearScan scan, WarpPlan plan, const float* starts, const int32_t* came) {
  const int warp = threadIdx.x / kWarp;
  const int64_t id = int64_t(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (id >= plan.chunks * scan.B) return;
  const int64_t chunk = id / scan.B, batch = id % scan.B;
  const int unit = min(int(threadIdx.x) % kWarp, int(scan.H) - 1);
  // Of a slice, whether there is an x0 may be known to the device alone.
  const bool has_x0 = scan.x0 && (!came || *came != 0);
  acc_t<T> x = acc_t<T>(0);
  if (chunk > 0) {
    x = starts[id * HP + unit];
  } else if (has_x0) {
    x = to_acc(static_cast<const T*>(scan.x0)[batch * scan.x0_b + unit]);
  }
  const int64_t first = chunk * plan.length;
  replay_steps<T, HP, kTransposed, kAligned, true>(
      scan, batch, first, int(min(plan.length, scan.T - first)), has_x0, x,
      reinterpret_cast<char*>(dynamic_shared_memory()) + warp * kReplayBytes<T, HP, kAligned>);
}

// -------------------------------------------------------------------------------------------------- 2. boundaries
template <typename T, int HP, bool kTransposed, bool kAligned>
__device__ __noinline__ float redo_chunk(const LinearScan& scan, int64_t batch, int64_t first, int steps, bool has_x0,
                                         float x, char* shared) {
  replay_steps<T, HP, kTransposed, kAligned, false>(scan, batch, first, steps, has_x0, x, shared);
  return x;
}

template <typename T, int HP, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(kWarp)
    boundary_kernel(LinearScan scan, WarpPlan plan, const float* maps, float* starts) {
  using Map = MapLayout<1, HP>;
  float* const shared = reinterpret_cast<float*>(dynamic_shared_memory());
  const int64_t batch = blockIdx.x;
  const int H = int(scan.H), unit = min(int(threadIdx.x), H - 1);
  float x = scan.x0 ? to_acc(static_cast<const T*>(scan.x0)[batch * scan.x0_b + unit]) : 0.0f, none = 0.0f;
  carry_through_chunks<Map, false>(int(plan.chunks - 1), maps + batch * Map::kStride, scan.B * Map::kStride,
                                   starts + batch * HP, scan.B * HP, H, x, none, shared, [&](int done) {
                                     x = redo_chunk<T, HP, kTransposed, kAligned>(
                                         scan, batch, done * plan.length, int(plan.length), scan.x0 != nullptr, x,
                                         reinterpret_cast<char*>(shared + kBoundaryElements<Map>));
                                   });
}

// ---------------------------------------------------------------------------------------------------- 1. products
// Aligned lines of 8 (4-byte) or 4 (2-byte elements) times an odd number of banks: the lanes of a fragment, pairs of
// elements at 8 lines by 4 places, meet no conflict.
template <typename T, int HP, bool kAligned>
using ProductRing = FourSteps<T, HP,
                              HP == 8    ? 8
                              : HP == 32 ? 40
                                         : 24,
                              HP == 20, kAligned>;

template <typename T, int HP, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(kWarp, 4 * products_at_once(HP))
    product_kernel(LinearScan scan, WarpPlan plan, float* maps) {
  using Ring = ProductRing<T, HP, kAligned>;
  using B = Blocks<HP, true>;
  constexpr int NB = B::kCount, kTiles = HP / 16 + 1;  // HP + 1 columns in tiles of 16
  static_assert(kSurelyInside<HP> == 8 * (NB - 1));
  constexpr bool kExact = sizeof(T) == 2;  // the half types have no more than TF32's 11 significant bits
  alignas(16) __shared__ T shared[Ring::kBytes / sizeof(T)];
  const int lane = threadIdx.x, quad = lane / 4, j = lane % 4;
  const int64_t chunk = int64_t(blockIdx.x) / scan.B, batch = int64_t(blockIdx.x) % scan.B;
  const int64_t first = chunk * plan.length;
  const int steps = int(min(plan.length, scan.T - first));
  Ring ring(scan, shared, batch, first, steps);
  ring.start();

  ColumnTiles<1, kTiles, HP, B> tiles;
  auto column_of = [&](int t, int u) { return 16 * t + 8 * u + quad; };
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int u = 0; u < 2; ++u) tiles.start(t, u, column_of(t, u));
  auto& p = tiles.part[0];
  int start = 0;
  if (first == 0 && !scan.x0) {
    // The first step without x0 does not look at A: P and v forget what they were. Of a slice, P is A.
    const auto read = ring.wait(0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i % 2 >= B::halves(nb)) continue;
          const int n = B::unit(nb * 8 + 2 * j + i % 2), column = column_of(t, i / 2);
          if (tiles.is_offset(t, i / 2)) {
            p[t][nb][i] = to_acc(read.b[n]);
          } else {
            const bool takes = plan.whole && n < HP && column < HP && read.inside(n, column);
            p[t][nb][i] = takes ? to_acc(*(kTransposed ? read.at(column, n) : read.at(n, column))) : 0.0f;
          }
        }
    ring.fetch();
    if (steps == 1) tiles.rescale(true);
    start = 1;
  }

#pragma unroll 1
  for (int step = start; step < steps; ++step) {
    const auto read = ring.wait(step);
    SplitSum<kTiles, B, false, kExact> sum;
    // A row of blocks of the right operand, A^T: element (k, n) is A[n][k].
#pragma unroll
    for (int kb = 0; kb < NB; ++kb) {
      unsigned high[NB][2], low[NB][2];
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) {
        const int n = B::unit(nb * 8 + quad);
#pragma unroll
        for (int half = 0; half < B::halves(kb); ++half) {
          const int k = B::unit(kb * 8 + 2 * j + half);
          const T* at = kTransposed ? read.at(k, n) : read.at(n, k);
          const bool inside = (nb < NB - 1 && kb < NB - 1) || read.inside(n, k);
          const float a = (!B::is_half(nb) || n < HP) && inside ? to_acc(*at) : 0.0f;
          if constexpr (kExact) {
            high[nb][half] = __float_as_uint(a);
          } else {
            split_tf32(a, high[nb][half], low[nb][half]);
          }
        }
      }
      float rows[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[t][i] = p[t][kb][i];
      sum.add(kb, rows, high, low);
    }
    const T* b = read.b;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int nb = 0; nb < NB; ++nb)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i % 2 >= B::halves(nb)) continue;
          float next = sum.at(t, nb, i);
          // v is column HP, in the last tile.
          if (t == kTiles - 1 && tiles.is_offset(t, i / 2)) next += to_acc(b[B::unit(nb * 8 + 2 * j + i % 2)]);
          p[t][nb][i] = next;
        }
    ring.fetch();
    if (step % kRescaleSteps == kRescaleSteps - 1 || step == steps - 1) tiles.rescale(step == steps - 1);
  }
  copy_wait<0>();
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int u = 0; u < 2; ++u)
      if (column_of(t, u) <= HP)
        tiles.store(t, u, column_of(t, u), maps + int64_t(blockIdx.x) * MapLayout<1, HP>::kStride);
}

template <bool kTransposed>
__global__ void __launch_bounds__(ColumnShape::kWarps* kWarp, kColumnsAtOnce)
    column_kernel(LinearScan scan, WarpPlan plan, float* maps) {
  using S = ColumnShape;
  const int warp = threadIdx.x / kWarp;
  multiply_chunks<kTransposed>(scan, plan, maps, int64_t(blockIdx.x) * S::kWarps + warp,
                               reinterpret_cast<float*>(dynamic_shared_memory()) + warp * S::kElements);
}

// ------------------------------------------------------------------------------------------------------- launchers
template <typename T, int HP, bool kTransposed, bool kAligned>
void run_products(const LinearScan& scan, const WarpPlan& plan, float* maps, cudaStream_t stream) {
  const int64_t pairs = (plan.chunks - !plan.whole) * scan.B;
  if constexpr (std::is_same_v<T, float> && HP == kColumnsHidden && kAligned) {
    if (plan.columns) {
      constexpr int64_t kPairs = int64_t(ColumnShape::kWarps) * kColumnsPairs;
      return launch("linear_scan_columns", column_kernel<kTransposed>, (pairs + kPairs - 1) / kPairs,
                    dim3(ColumnShape::kWarps * kWarp), ColumnShape::kBytes, stream, scan, plan, maps);
    }
  }
  launch("linear_scan_products", product_kernel<T, HP, kTransposed, kAligned>, pairs, dim3(kWarp), 0, stream, scan,
         plan, maps);
}

template <typename T, int HP, bool kTransposed, bool kAligned>
void run_replay(const LinearScan& scan, const WarpPlan& plan, const float* starts, const int32_t* came,
                cudaStream_t stream) {
  const int64_t warps = plan.chunks * scan.B;
  const int per_block = warps <= 4 * device_limits().sm_count ? 1 : 4;
  launch("linear_scan_replay", replay_kernel<T, HP, kTransposed, kAligned>, (warps + per_block - 1) / per_block,
         dim3(per_block * kWarp), per_block * kReplayBytes<T, HP, kAligned>, stream, scan, plan, starts, came);
}

template <typename T, int HP, bool kTransposed, bool kAligned>
void run(const LinearScan& scan, const WarpPlan& plan, void* workspace, cudaStream_t stream) {
  float *maps = static_cast<float*>(workspace), *starts = nullptr;
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.chunks > 1) {
      using Map = MapLayout<1, HP>;
      starts = maps + (plan.chunks - 1) * scan.B * Map::kStride;
      run_products<T, HP, kTransposed, kAligned>(scan, plan, maps, stream);
      launch("linear_scan_boundaries", boundary_kernel<T, HP, kTransposed, kAligned>, scan.B, dim3(kWarp),
             sizeof(float) * kBoundaryElements<Map> + kReplayBytes<T, HP, kAligned>, stream, scan, plan, maps, starts);
    }
  }
  run_replay<T, HP, kTransposed, kAligned>(scan, plan, starts, nullptr, stream);
}

// Calls what has the template arguments of the scan's kernels: padded H, and how its lines lie.
template <typename T, typename Run>
void with_warp_kernels(const LinearScan& scan, const Run& run) {
  const auto with_hidden = [&]<int HP>() {
    const auto with_lines = [&]<bool kAligned>() {
      if (scan.A_col == 1) {
        run.template operator()<HP, false, kAligned>();
      } else {
        run.template operator()<HP, true, kAligned>();
      }
    };
    if constexpr (HP * sizeof(T) % 16 == 0) {  // else no H that is padded to it has aligned lines
      if (lines_are_aligned(scan)) return with_lines.template operator()<true>();
    }
    with_lines.template operator()<false>();
  };
  switch (padded_hidden(scan.H)) {
    case 8:
      return with_hidden.template operator()<8>();
    case 16:
      return with_hidden.template operator()<16>();
    case 20:
      return with_hidden.template operator()<20>();
    case 24:
      return with_hidden.template operator()<24>();
    default:
      return with_hidden.template operator()<32>();
  }
}

}  // namespace

template <typename T>
void run_linear_scan_warp(const LinearScan& scan, const WarpPlan& plan, void* workspace, cudaStream_t stream) {
  with_warp_kernels<T>(scan, [&]<int HP, bool kTransposed, bool kAligned>() {
    run<T, HP, kTransposed, kAligned>(scan, plan, workspace, stream);
  });
}

}  // namespace weft::scan
