// All steps of a pass on the last frontiers of a batch, which are small: one kernel, because a launch costs more than
// what it would do there.
//   WEFT_VERTEX_TYPE   float or double, of registers; buffers may be narrower
//   WEFT_VERTEX_STEPS  the steps of one task; csrc/vertex/source.h
//
// Decomposition: one block on each multiprocessor, all resident; a barrier of the grid (1 us) after every step. A
// kernel's elements go round all threads as in frontier.jit.cu. A product has a warp for each column where the matrix
// is contiguous along what is summed over, whose lanes add up every 32nd term, else a block for 8 columns, whose
// threads add up every 64th; up to 8 rows at a time, so that a matrix is read from L2 once for 8 rows. Sums run in a
// fixed order. Cost of a frontier of a binary Tree-LSTM, H = 256, up to 8 rows: about 5 us each way.
#include "vertex/cuda/body.jit.cuh"

namespace {

using weft::vertex::kTailThreads;
using weft::vertex::TailArguments;

constexpr int kWarps = kTailThreads / 32, kRows = 8, kColumns = 8;

__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// All blocks are here, and see what all have written.
__device__ __forceinline__ void meet(unsigned* arrived, unsigned& expected) {
  expected += gridDim.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    while (int(load_acquire(arrived) - expected) < 0) {
    }
    __threadfence();
  }
  __syncthreads();
}

// target rows [0, rows) = source rows @ matrix (inner, columns).
template <typename E>
struct Product {
  const E* source;
  long long source_stride;
  const E* matrix;
  long long row, column;
  E* target;
  long long target_stride;
  int rows, inner, columns;
};

// R rows from `first` on; those beyond the last are the last again, and not stored.
template <int R, typename E>
__device__ __forceinline__ void by_dots(const Product<E>& p, int first, int n, int lane) {
  const E* m = p.matrix + n * p.column;
  const E* from[R];
  T sums[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    from[r] = p.source + min(first + r, p.rows - 1) * p.source_stride;
    sums[r] = 0;
  }
#pragma unroll 4
  for (int k = lane; k < p.inner; k += 32) {
    const T w = T(m[k]);
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] += w * T(from[r][k]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int apart = 16; apart > 0; apart /= 2) sums[r] += from_lane(sums[r], apart);
    if (lane == 0 && first + r < p.rows) p.target[(first + r) * p.target_stride + n] = E(sums[r]);
  }
}

template <int R, typename E>
__device__ __forceinline__ void by_columns(const Product<E>& p, int first, int column, T* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = column + lane % kColumns;
  const E* m = p.matrix + min(n, p.columns - 1);
  const E* from[R];
  T sums[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    from[r] = p.source + min(first + r, p.rows - 1) * p.source_stride;
    sums[r] = 0;
  }
#pragma unroll 4
  for (int k = warp * (32 / kColumns) + lane / kColumns; k < p.inner; k += kTailThreads / kColumns) {
    const T w = T(m[k * p.row]);
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] += w * T(from[r][k]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int apart = 16; apart >= kColumns; apart /= 2) sums[r] += from_lane(sums[r], apart);
    if (lane < kColumns) shared[(warp * kRows + r) * kColumns + lane] = sums[r];
  }
  __syncthreads();
  if (threadIdx.x < R * kColumns) {
    const int r = threadIdx.x / kColumns, at = column + threadIdx.x % kColumns;
    T sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += shared[w * kRows * kColumns + threadIdx.x];
    if (first + r < p.rows && at < p.columns) p.target[(first + r) * p.target_stride + at] = E(sum);
  }
  __syncthreads();
}

template <int R, typename E>
__device__ void tiles(const Product<E>& p, T* shared) {
  const int count = (p.rows + R - 1) / R;
  if (p.row == 1) {
    const int lane = threadIdx.x % 32, warps = gridDim.x * kWarps;
    for (int unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < count * p.columns; unit += warps) {
      by_dots<R>(p, unit / p.columns * R, unit % p.columns, lane);
    }
    return;
  }
  const int groups = (p.columns + kColumns - 1) / kColumns;
  for (int unit = blockIdx.x; unit < count * groups; unit += gridDim.x) {
    by_columns<R>(p, unit / groups * R, unit % groups * kColumns, shared);
  }
}

template <typename E>
__device__ __forceinline__ void product(const TailArguments& a, int source, int matrix, bool transposed, int target,
                                        int inner, int columns, int first, int count, T* shared) {
  const FrontierArguments& p = a.frontier;
  const TailArguments::Matrix& m = a.matrices[matrix];
  const Product<E> product = {data(const E, source) + first * stride(source),
                              stride(source),
                              static_cast<const E*>(m.data),
                              transposed ? m.column : m.row,
                              transposed ? m.row : m.column,
                              data(E, target) + first * stride(target),
                              stride(target),
                              count,
                              inner,
                              columns};
  if (count == 1) {
    tiles<1>(product, shared);
  } else if (count == 2) {
    tiles<2>(product, shared);
  } else if (count <= 4) {
    tiles<4>(product, shared);
  } else {
    tiles<kRows>(product, shared);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kTailThreads) vertex_tail(const TailArguments a) {
  __shared__ T shared[kWarps * kRows * kColumns];
  const FrontierArguments& p = a.frontier;
  const int *vertices = p.vertices, *gather = p.gather, *first_edge = p.first_edge, *edge_children = p.edge_children,
            *edge_parents = p.edge_parents, *first_use = p.first_use, *use_rows = p.use_rows,
            *use_columns = p.use_columns, *first_sum_use = p.first_sum_use, *sum_use_edges = p.sum_use_edges;
  const long long num_vertices = p.num_vertices;
  const long long start = (long long)blockIdx.x * kTailThreads + threadIdx.x,
                  threads = (long long)gridDim.x * kTailThreads;
  unsigned expected = 0;
  for (int i = 0; i < a.count; ++i) {
    const int* task = a.tasks + 8 * (a.first + i * a.apart);
    const int kind = task[0];
    WEFT_VERTEX_STEPS
  }
}
