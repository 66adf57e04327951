// Launches of the diagonal scan and of its gradients, of one element type after the other. What the kernels do is in
// diagonal_walk.cuh and diagonal_tiles.cuh.
#pragma once
#include <algorithm>
#include <stdexcept>

#include "common/cuda/device_costs.h"
#include "common/cuda/tensor_map.h"
#include "common/integers.h"
#include "common/launch.cuh"
#include "scan/linear/cuda/diagonal_tiles.cuh"
#include "scan/linear/cuda/diagonal_walk.cuh"
#include "scan/linear/cuda/linear_scan.h"

namespace weft::scan {
namespace {

// What a GPU's costs say of the two ways, per SM.
struct DiagonalCosts {
  // A step of a walk takes a time of its own, however little it reads. So a walk keeps up with the memory where a step
  // of all channels has so many bytes, and what it loses on less a T of up to walk_steps does not notice.
  int64_t walk_bytes, walk_steps;
  int64_t many_warps;  // from which a walk has the kernel for many
  int64_t tiles;       // fewer make the strands of a tile shorter

  explicit DiagonalCosts(const costs::Costs& all) {
    const costs::Table& of = all.table("scan.linear_diagonal");
    walk_bytes = int64_t(of("walk_bytes")), walk_steps = int64_t(of("walk_steps"));
    many_warps = int64_t(of("many_warps")), tiles = int64_t(of("tiles"));
  }
};

// Steps of a strand: as many as the shared memory has room for, but no fewer than kLeastSteps, to which they also
// shrink where there would be too few tiles.
constexpr int kMostSteps = 64, kLeastSteps = 4;

template <typename T, bool kGradients, bool kMany>
__global__ void __launch_bounds__(32) walk_kernel(const __grid_constant__ DiagonalGradients g, int64_t slabs_per_row) {
  extern __shared__ __align__(128) unsigned char memory[];
  run_walk<T, kGradients, kMany>(g, slabs_per_row, memory);
}
// A slice's scan, and what its rank tells.
template <typename T, bool kMany>
__global__ void __launch_bounds__(32)
    told_walk_kernel(const __grid_constant__ DiagonalGradients g, int64_t slabs_per_row, void* message) {
  extern __shared__ __align__(128) unsigned char memory[];
  run_walk<T, false, kMany, true>(g, slabs_per_row, memory, message);
}

template <typename T, bool kGradients, bool kEngine>
__global__ void __launch_bounds__(kTileThreads, 1) tiles_kernel(const __grid_constant__ Tiles tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  if constexpr (!kEngine) {
    run_tiles<T, kGradients>(tiles, memory);
  } else {
#if __CUDA_ARCH__ >= 900
    run_tiles_by_engine<T, kGradients>(tiles, memory);
#endif
  }
}

// The sum of what the chunks have added to each channel.
template <typename State>
__global__ void __launch_bounds__(128)
    sum_chunks_kernel(const State* parts, int64_t chunks, int64_t channels, State* to) {
  const int64_t channel = blockIdx.x * 128ll + threadIdx.x;
  if (channel >= channels) return;
  sum_t<State> sum{};
#pragma unroll 8
  for (int64_t k = 0; k < chunks; ++k) sum += parts[k * channels + channel];
  to[channel] = rounded<State>(sum);
}

// Rows that lie end to end are one.
void merge_rows(DiagonalGradients& g) {
  LinearScan& s = g.scan;
  auto together = [&](const void* p, int64_t stride) { return p == nullptr || stride == s.H; };
  if (s.B == 1 || (s.A_b == s.H && s.b_b == s.H && together(s.out, s.out_b) && together(s.x0, s.x0_b) &&
                   together(g.x, g.x_b) && together(g.x0, g.x0_b) && (g.summed || together(g.grad_A, g.grad_A_b)))) {
    s.H *= s.B;
    s.B = 1;
  }
}

// Whether all rows begin and end at multiples of 16 bytes.
bool in_pieces(const DiagonalGradients& g, int64_t size) {
  const LinearScan& s = g.scan;
  auto aligned = [&](const void* base, int64_t stride_t, int64_t stride_b) {
    return base == nullptr || (reinterpret_cast<uintptr_t>(base) % 16 == 0 && (s.T == 1 || stride_t * size % 16 == 0) &&
                               (s.B == 1 || stride_b * size % 16 == 0));
  };
  return s.H * size % 16 == 0 && aligned(s.A, s.A_t, s.A_b) && aligned(s.b, s.b_t, s.b_b) &&
         aligned(s.out, s.out_t, s.out_b) && aligned(g.x, g.x_t, g.x_b) && aligned(g.x0, 0, g.x0_b) &&
         (g.summed || aligned(g.grad_A, g.grad_A_t, g.grad_A_b));
}

template <typename T, bool kGradients, bool kMany>
void walk(const DiagonalGradients& g, cudaStream_t stream) {
  using S = WalkShape<T, kGradients, kMany>;
  const int64_t slabs_per_row = ceil_div(g.scan.H, int64_t(S::kWidth));
  launch(kGradients ? "linear_scan_diagonal_gradients_walk" : "linear_scan_diagonal_walk",
         walk_kernel<T, kGradients, kMany>, Grid(slabs_per_row * g.scan.B), dim3(32), S::kSharedBytes, stream, g,
         slabs_per_row);
}

// Whether the copy engine can read this kernel's tiles here.
template <typename T, bool kGradients>
bool has_engine() {
  if (device_limits().compute_capability < 90) return false;
  // Code for an older architecture, which a newer device compiles for itself, does not know it.
  static thread_local int versions[64] = {};
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (versions[device] == 0) {
    cudaFuncAttributes attributes{};
    cuda_check(cudaFuncGetAttributes(&attributes, tiles_kernel<T, kGradients, true>), "linear_scan_diagonal_tiles");
    versions[device] = attributes.ptxVersion;
  }
  return versions[device] >= 90;
}

// Makes the maps of all tensors; false where one has none, as of a stride of zero.
template <typename T>
bool map_tensors(Tiles& tiles) {
  using S = TileShape<T>;
  constexpr int64_t kSize = sizeof(T);
  const DiagonalGradients& g = tiles.problem;
  const LinearScan& s = g.scan;
  tiles.turned = s.b_t < 0;
  tiles.A_skipped = s.x0 == nullptr ? 1 : 0;
  // `first`: of a step of processing, `skipped` after the tensor's address; `left_out`: of all steps.
  const auto make = [&](const void* base, int64_t stride_t, int64_t stride_b, int skipped, int left_out,
                        TensorMap& map) {
    if (base == nullptr) return true;
    if (stride_t == 0 || (stride_t < 0) != tiles.turned) return false;
    const int64_t steps = s.T - left_out;
    const char* const first = static_cast<const char*>(base) + skipped * stride_t * kSize;
    MappedTensor tensor{first + (stride_t < 0 ? (steps - 1) * stride_t * kSize : 0), int(kSize)};
    tensor.extents[0] = s.H, tensor.extents[1] = steps, tensor.extents[2] = s.B;
    tensor.strides[0] = std::abs(stride_t) * kSize, tensor.strides[1] = (s.B > 1 ? stride_b : s.H) * kSize;
    tensor.box[0] = S::kWidth, tensor.box[1] = S::kStrands * tiles.steps;
    return tensor.strides[1] > 0 && make_tensor_map(tensor, &map);
  };
  return make(s.A, s.A_t, s.A_b, tiles.A_skipped, tiles.A_skipped, tiles.A_map) &&
         make(s.b, s.b_t, s.b_b, 0, 0, tiles.b_map) && make(g.x, g.x_t, g.x_b, 0, 1, tiles.x_map);
}

template <typename T, bool kGradients>
void tile(const DiagonalGradients& g, bool pieces, const Workspace& workspace, cudaStream_t stream) {
  using S = TileShape<T>;
  const LinearScan& s = g.scan;
  Tiles tiles{};
  tiles.problem = g;
  tiles.pieces = pieces;
  tiles.slabs_per_row = ceil_div(s.H, S::kWidth);
  tiles.slabs = s.B * tiles.slabs_per_row;
  const DeviceLimits& device = device_limits();
  const int64_t sms = device.sm_count;
  auto chunks = [&](int steps) { return ceil_div(s.T, int64_t(S::kTileStrands) * steps); };
  auto shared_bytes = [&](int steps, int slots, bool engine) {
    return tile_shared_bytes<T>(steps, kGradients, slots, engine);
  };
  auto most_steps = [&](int slots, bool engine) {
    int steps = kMostSteps;
    while (steps > 1 &&
           (shared_bytes(steps, slots, engine) > device.max_shared_per_block ||
            (steps > kLeastSteps && tiles.slabs * chunks(steps) < costs_here<DiagonalCosts>().tiles * sms))) {
      --steps;
    }
    return steps;
  };
  // As even as can be; a short T is one chunk of a few steps per strand.
  tiles.chunks = chunks(most_steps(kSlots, false));
  tiles.steps = int(ceil_div(s.T, S::kTileStrands * tiles.chunks));
  // The copy engine takes some numbers of steps alone; of a single chunk or few steps there is little to gain.
  const int engine_steps = S::engine_steps(most_steps(kEngineSlots<T>, true));
  bool engine = pieces && tiles.chunks > 1 && engine_steps > 0 && s.T <= INT32_MAX / 2 && has_engine<T, kGradients>();
  if (engine) {
    Tiles mapped = tiles;
    mapped.chunks = chunks(engine_steps);
    mapped.steps = S::engine_steps(int(ceil_div(s.T, S::kTileStrands * mapped.chunks)) +
                                   (S::kStrands > 1 ? 1 : 128 / S::kRowBytes - 1));
    mapped.chunks = chunks(mapped.steps);
    engine = mapped.chunks > 1 && map_tensors<T>(mapped);
    if (engine) tiles = mapped;
  }
  const int64_t all = tiles.slabs * tiles.chunks;
  if (all + (kSlots + 1) * sms > int64_t(UINT32_MAX))
    throw std::runtime_error("weft: linear_scan: more than 2^32 tiles of sequences");
  const bool cut = tiles.chunks > 1, in_turn = cut || all > sms;
  tiles.slots = !in_turn ? 1 : engine ? kEngineSlots<T> : kSlots;

  const bool sums = g.summed && g.grad_A != nullptr, apart = sums && cut;
  const int64_t counts = (in_turn ? 16 : 0) + (cut ? ceil_div(4 * all, 16) * 16 : 0);
  const int64_t words = cut ? all * S::kWidth * S::kWords * 8 : 0;
  const int64_t channels = s.B * s.H, parts = apart ? tiles.chunks * channels * int64_t(sizeof(state_t<T>)) : 0;
  if (counts + words + parts > 0) {
    char* const memory = static_cast<char*>(workspace(size_t(counts + words + parts)));
    if (in_turn) {
      tiles.counter = reinterpret_cast<unsigned long long*>(memory);
      tiles.status = reinterpret_cast<uint32_t*>(memory + 16);
      tiles.words = reinterpret_cast<uint64_t*>(memory + counts);
      cuda_check(cudaMemsetAsync(memory, 0, size_t(counts + words), stream), "linear_scan_diagonal_tiles");
    }
    tiles.sums = memory + counts + words;
  }
  if (sums && !apart) tiles.sums = g.grad_A;
  launch(kGradients ? "linear_scan_diagonal_gradients_tiles" : "linear_scan_diagonal_tiles",
         engine ? tiles_kernel<T, kGradients, true> : tiles_kernel<T, kGradients, false>,
         Grid(std::min(all, in_turn ? sms : all)), dim3(kTileThreads),
         size_t(shared_bytes(tiles.steps, tiles.slots, engine)), stream, tiles);
  if (apart) {
    using State = state_t<T>;
    launch("linear_scan_diagonal_sums", sum_chunks_kernel<State>, Grid(ceil_div(channels, 128)), dim3(128), 0, stream,
           static_cast<const State*>(tiles.sums), tiles.chunks, channels, static_cast<State*>(g.grad_A));
  }
}

// Whether each channel has a lane that walks, of rows that are merged and lie in pieces.
template <typename T>
bool is_walked(const LinearScan& s) {
  const DiagonalCosts& costs = costs_here<DiagonalCosts>();
  return s.B * s.H * int64_t(sizeof(T)) >= costs.walk_bytes * device_limits().sm_count || s.T <= costs.walk_steps;
}
bool has_many_warps(const LinearScan& s) {
  return s.B * ceil_div(s.H, int64_t(32)) > costs_here<DiagonalCosts>().many_warps * device_limits().sm_count;
}

// linear_scan_diagonal_told, of an element type.
template <typename T>
bool run_told(DiagonalGradients g, void* message, cudaStream_t stream) {
  merge_rows(g);
  if (!in_pieces(g, sizeof(T)) || !is_walked<T>(g.scan)) return false;
  const auto walk_of = [&]<bool kMany>() {
    using S = WalkShape<T, false, kMany>;
    const int64_t slabs_per_row = ceil_div(g.scan.H, int64_t(S::kWidth));
    launch("linear_scan_diagonal_told_walk", told_walk_kernel<T, kMany>, Grid(slabs_per_row * g.scan.B), dim3(32),
           S::kSharedBytes, stream, g, slabs_per_row, message);
  };
  has_many_warps(g.scan) ? walk_of.template operator()<true>() : walk_of.template operator()<false>();
  return true;
}

template <typename T, bool kGradients>
void run(DiagonalGradients g, const Workspace& workspace, cudaStream_t stream) {
  merge_rows(g);
  const bool pieces = in_pieces(g, sizeof(T));
  // Pairs of doubles are pieces as they are; what says in a total more than they do themselves would take too long.
  if constexpr (sizeof(T) < 16) {
    if (!pieces || !is_walked<T>(g.scan)) return tile<T, kGradients>(g, pieces, workspace, stream);
  }
  if (has_many_warps(g.scan)) {
    walk<T, kGradients, true>(g, stream);
  } else {
    walk<T, kGradients, false>(g, stream);
  }
}

}  // namespace
}  // namespace weft::scan
