// Decomposition: a block of 8 warps has 32 neighbouring columns and a piece of the rows; a lane has a column, a warp
// every 8th row. Where there are several pieces, the last block of a group of columns adds up what all have written, in
// their order, so that the bits are the same in every run. Cost: what it reads, once; one launch for all vectors.
#include <algorithm>

#include "common/element.cuh"
#include "common/integers.h"
#include "common/launch.cuh"
#include "vertex/exec/cuda/totals.h"

namespace weft::vertex {
namespace {

constexpr int kWarps = 8, kColumns = 32, kRowsAtLeast = 64;

__device__ float number(float x) {
  return x;
}
__device__ double number(double x) {
  return x;
}
__device__ float number(__half x) {
  return to_acc(x);
}
__device__ float number(__nv_bfloat16 x) {
  return to_acc(x);
}

// Of one column in every 8th row from `row` on. The type is known outside of the loop, so that several loads are on
// their way at once: one after another 9,000 rows of 1,300 columns took 100 us, seven times what their bytes do.
template <typename T, typename Source>
__device__ T column_sum(const Total& total, int column, int64_t row, int64_t end) {
  const auto* source = static_cast<const Source*>(total.source) + column;
  T sum = 0;
#pragma unroll 8
  for (; row < end; row += kWarps) sum += number(source[row * total.stride]);
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kColumns) totals_kernel(const __grid_constant__ TotalsLaunch a) {
  __shared__ T shared[kWarps][kColumns];
  __shared__ bool last;
  const int lane = threadIdx.x % kColumns, warp = threadIdx.x / kColumns, group = blockIdx.x, piece = blockIdx.y;
  int which = 0;
  while (which + 1 < a.num_vectors && a.vectors[which + 1].group <= group) ++which;
  const TotalVector& vector = a.vectors[which];
  const int column = (group - vector.group) * kColumns + lane;
  T sum = 0;
  for (int t = vector.first; t < vector.end; ++t) {
    const Total& total = a.totals[t];
    const int from = column - total.to;
    if (from < 0 || from >= total.width) continue;
    const int64_t row = total.rows * piece / a.pieces + warp, end = total.rows * (piece + 1) / a.pieces;
    if constexpr (sizeof(T) == 8) {
      sum += column_sum<T, double>(total, from, row, end);
    } else if (total.dtype == DType::f16) {
      sum += column_sum<T, __half>(total, from, row, end);
    } else if (total.dtype == DType::bf16) {
      sum += column_sum<T, __nv_bfloat16>(total, from, row, end);
    } else {
      sum += column_sum<T, float>(total, from, row, end);
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  T* const partial = static_cast<T*>(a.partial);
  if (warp == 0) {
    for (int w = 1; w < kWarps; ++w) sum += shared[w][lane];
    if (a.pieces == 1) {
      if (column < vector.width) static_cast<T*>(vector.result)[column] = sum;
      return;
    }
    partial[(int64_t(piece) * a.groups + group) * kColumns + lane] = sum;
    __threadfence();
    __syncwarp();
    if (lane == 0) last = atomicAdd(a.arrived + group, 1) == a.pieces - 1;
  }
  if (a.pieces == 1) return;
  __syncthreads();
  if (!last || warp > 0) return;
  __threadfence();
  T all = 0;
  for (int p = 0; p < a.pieces; ++p) all += __ldcg(partial + (int64_t(p) * a.groups + group) * kColumns + lane);
  if (column < vector.width) static_cast<T*>(vector.result)[column] = all;
}

}  // namespace

int totals_pieces(int64_t rows, int64_t groups, int sm_count) {
  const int64_t wanted = ceil_div(4 * int64_t{sm_count}, std::max<int64_t>(1, groups));
  return static_cast<int>(std::clamp<int64_t>(std::min(wanted, rows / kRowsAtLeast), 1, 1024));
}

void launch_totals(const TotalsLaunch& a, bool doubles, cudaStream_t stream) {
  launch("vertex_totals", doubles ? totals_kernel<double> : totals_kernel<float>, Grid{a.groups, a.pieces},
         dim3(kWarps * kColumns), 0, stream, a);
}

}  // namespace weft::vertex
