// The scan of a slice of a sequence whose whole lies on many ranks, H <= 32, in float: that of warp.cuh, cut where
// ranks exchange, so that no pass over the steps is added.
//
//   1. products: as there, of all chunks; the maps stay.
//   2. summary: one warp per batch row takes x through the maps, from what the caller gives, to the end; beside it the
//      maps' product is made (map_products.cuh), where it is asked for. Both are what the rank tells the others.
//   ... the exchange ...
//   3. boundaries: once more from the state that came in, until that no longer shows.
//   4. replay: as there.
#pragma once
#include "scan/linear/cuda/map_products.cuh"
#include "scan/linear/cuda/warp.cuh"

namespace weft::scan {
namespace {

// The steps of a slice that take x through a chunk again.
template <int HP, bool kTransposed, bool kAligned, Way kWay>
__device__ __forceinline__ float through_slice(const LinearScan& scan, const WarpPlan& plan, const float* maps,
                                               float* starts, int64_t batch, bool has_x0, int64_t count,
                                               float* shared) {
  using Map = MapLayout<1, HP>;
  const int H = int(scan.H), unit = min(int(threadIdx.x), H - 1);
  float x = has_x0 ? static_cast<const float*>(scan.x0)[batch * scan.x0_b + unit] : 0.0f, none = 0.0f;
  carry_through_chunks<Map, false, kWay>(int(count), maps + batch * Map::kStride, scan.B * Map::kStride,
                                         starts + batch * HP, scan.B * HP, H, x, none, shared, [&](int done) {
                                           const int64_t first = done * plan.length;
                                           x = redo_chunk<float, HP, kTransposed, kAligned>(
                                               scan, batch, first, int(min(plan.length, scan.T - first)), has_x0, x,
                                               reinterpret_cast<char*>(shared + kBoundaryElements<Map>));
                                         });
  return x;
}

// 2. The first blocks take a batch row each, of one warp; the others multiply maps.
template <int HP, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(ProductOfMaps<MapLayout<1, HP>>::kThreads)
    summary_kernel(LinearScan scan, WarpPlan plan, SliceMaps told, float* starts, MapProducts products) {
  if (int64_t(blockIdx.x) >= scan.B) {
    ProductOfMaps<MapLayout<1, HP>>(products, reinterpret_cast<double*>(dynamic_shared_memory()))
        .run(int64_t(blockIdx.x) - scan.B);
    return;
  }
  if (threadIdx.x >= kWarp) return;
  const int64_t batch = blockIdx.x;
  const float x = through_slice<HP, kTransposed, kAligned, Way::whole>(
      scan, plan, told.maps, starts, batch, scan.x0 != nullptr, plan.chunks,
      reinterpret_cast<float*>(dynamic_shared_memory()));
  if (int(threadIdx.x) < scan.H) {
    told.value[batch * scan.H + threadIdx.x] = x;
    if (told.message) told.values()[batch * scan.H + threadIdx.x] = __float_as_int(x);
  }
  if (told.message && batch == 0 && threadIdx.x == 0) told.values()[scan.B * scan.H] = 1;
}

// 3. Nothing came where `came` says so: then A of the first step is not looked at.
template <int HP, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(kWarp)
    arrival_kernel(LinearScan scan, WarpPlan plan, const float* maps, float* starts, const int32_t* came) {
  through_slice<HP, kTransposed, kAligned, Way::again>(scan, plan, maps, starts, blockIdx.x, !came || *came != 0,
                                                       plan.chunks - 1,
                                                       reinterpret_cast<float*>(dynamic_shared_memory()));
}

template <int HP, bool kAligned>
constexpr size_t kSliceBytes = sizeof(float) * kBoundaryElements<MapLayout<1, HP>> + kReplayBytes<float, HP, kAligned>;

// Of a slice's maps, those of chunks and rows and behind them the states at the chunks' starts.
template <int HP>
float* starts_behind(const LinearScan& scan, const WarpPlan& plan, float* maps) {
  return maps + plan.chunks * scan.B * MapLayout<1, HP>::kStride;
}

template <int HP, bool kTransposed, bool kAligned>
void make_slice_maps(const LinearScan& scan, const WarpPlan& plan, const SliceMaps& told, const Workspace& workspace,
                     cudaStream_t stream) {
  using Map = MapLayout<1, HP>;
  using Product = ProductOfMaps<Map>;
  float* const starts = starts_behind<HP>(scan, plan, told.maps);
  MapProducts products{told.maps, scan.B * Map::kStride, Map::kStride, plan.chunks, told.rows, int(scan.H)};
  int64_t blocks = 0;
  if (told.message) {
    cut_into_groups(products);
    blocks = products.rows * products.groups;
    const int64_t n = scan.H;
    char* const memory = static_cast<char*>(workspace(size_t(8 * (blocks * (n * n + n) + products.rows))));
    products.parts = reinterpret_cast<double*>(memory);
    products.exponents = reinterpret_cast<int64_t*>(products.parts + blocks * n * n);
    products.through = reinterpret_cast<int*>(products.exponents + blocks * n);
    products.out = told.message;
    cuda_check(cudaMemsetAsync(products.through, 0, products.rows * sizeof(int), stream), "slice_maps");
  }
  run_products<float, HP, kTransposed, kAligned>(scan, plan, told.maps, stream);
  const size_t bytes = std::max(kSliceBytes<HP, kAligned>, told.message ? size_t(Product::kBytes) : 0);
  launch("slice_summary", summary_kernel<HP, kTransposed, kAligned>, scan.B + blocks, dim3(Product::kThreads), bytes,
         stream, scan, plan, told, starts, products);
}

template <int HP, bool kTransposed, bool kAligned>
void replay_slice(const LinearScan& scan, const WarpPlan& plan, float* maps, const int32_t* came, cudaStream_t stream) {
  float* const starts = starts_behind<HP>(scan, plan, maps);
  if (plan.chunks > 1) {
    launch("slice_arrival", arrival_kernel<HP, kTransposed, kAligned>, scan.B, dim3(kWarp), kSliceBytes<HP, kAligned>,
           stream, scan, plan, static_cast<const float*>(maps), starts, came);
  }
  run_replay<float, HP, kTransposed, kAligned>(scan, plan, starts, came, stream);
}

}  // namespace

void run_slice_maps(const LinearScan& scan, const WarpPlan& plan, const SliceMaps& told, const Workspace& workspace,
                    cudaStream_t stream) {
  with_warp_kernels<float>(scan, [&]<int HP, bool kTransposed, bool kAligned>() {
    make_slice_maps<HP, kTransposed, kAligned>(scan, plan, told, workspace, stream);
  });
}

void run_slice_replay(const LinearScan& scan, const WarpPlan& plan, float* maps, const int32_t* came,
                      cudaStream_t stream) {
  with_warp_kernels<float>(scan, [&]<int HP, bool kTransposed, bool kAligned>() {
    replay_slice<HP, kTransposed, kAligned>(scan, plan, maps, came, stream);
  });
}

}  // namespace weft::scan
