// All steps of a pass on the last frontiers of a batch, which are small: one kernel, because a launch costs more than
// what it would do there.
//   WEFT_VERTEX_TYPE      float or double, of registers; buffers may be narrower
//   WEFT_VERTEX_BUFFERS   how many the program has
//   WEFT_VERTEX_MATRICES  the same, or 1 where it has none
//   WEFT_VERTEX_STEPS     the steps of one task; csrc/vertex/program/source.h
//
// Decomposition: one block on each multiprocessor, all resident; a barrier of the grid (1 us) after every step. A
// kernel's elements go round all threads as in frontier.jit.cu. A product of float32 is made of tiles of 16 rows and 32
// columns on the tensor cores, by three products of TF32 each, of fp32 accuracy; a tile's sum is cut among as many
// warps of a block as there are for it, whose parts are added up in shared memory. Operands come from L2 straight into
// registers, where a lane's four neighbours along the sum, or four neighbouring columns, are spread over fragments: any
// order does, if it is the same for both. Half types need one product. For one row, doubles and what is not aligned a
// warp sums up a column where the matrix is contiguous along the sum, a block 8 columns else, up to 8 rows at a time.
// Sums run in a fixed order. Cost of a frontier of a few rows of a binary Tree-LSTM, H = 256: 6 us each way, measured.
#include "vertex/exec/cuda/body.jit.cuh"

namespace {

using weft::vertex::kTailThreads;
using weft::vertex::MatrixArgument;
using weft::vertex::TailArguments;

constexpr int kWarps = kTailThreads / 32, kRows = 8, kColumns = 8;
// Of a tile on the tensor cores, and how far a warp goes along the sum at a time.
constexpr int kTileRows = 16, kTileColumns = 32, kDeep = 16;

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
struct Rows {
  const E* from[R];
  T sums[R];

  __device__ __forceinline__ Rows(const Product<E>& p, int first) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      from[r] = p.source + min(first + r, p.rows - 1) * p.source_stride;
      sums[r] = 0;
    }
  }
  __device__ __forceinline__ void add(int k, T weight) {
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] += weight * T(from[r][k]);
  }
};

template <int R, typename E>
__device__ __forceinline__ void by_dots(const Product<E>& p, int first, int n, int lane) {
  const E* m = p.matrix + n * p.column;
  Rows<R, E> rows(p, first);
#pragma unroll 4
  for (int k = lane; k < p.inner; k += 32) {
    rows.add(k, T(m[k]));
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int apart = 16; apart > 0; apart /= 2) rows.sums[r] += from_lane(rows.sums[r], apart);
    if (lane == 0 && first + r < p.rows) p.target[(first + r) * p.target_stride + n] = E(rows.sums[r]);
  }
}

template <int R, typename E>
__device__ __forceinline__ void by_columns(const Product<E>& p, int first, int column, T* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = column + lane % kColumns;
  const E* m = p.matrix + min(n, p.columns - 1);
  Rows<R, E> rows(p, first);
#pragma unroll 4
  for (int k = warp * (32 / kColumns) + lane / kColumns; k < p.inner; k += kTailThreads / kColumns) {
    rows.add(k, T(m[k * p.row]));
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    for (int apart = 16; apart >= kColumns; apart /= 2) rows.sums[r] += from_lane(rows.sums[r], apart);
    if (lane < kColumns) shared[(warp * kRows + r) * kColumns + lane] = rows.sums[r];
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
__device__ __noinline__ void tiles(const Product<E>& p, T* shared) {
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
__device__ __forceinline__ void load4(const E* from, float (&to)[4]) {
  struct alignas(4 * sizeof(E)) Four {
    E x[4];
  };
  const Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = float(four.x[i]);
}

// d += a b of fp32 accuracy, x as it is, y split; of half types nothing is lost by TF32.
template <bool kHalf>
__device__ __forceinline__ void multiply(float (&d)[4], const weft::u32* a, const weft::u32* a_low, const weft::u32* b,
                                         const weft::u32* b_low) {
  if constexpr (!kHalf) {
    weft::mma_tf32(d, a, b_low);
    weft::mma_tf32(d, a_low, b);
  }
  weft::mma_tf32(d, a, b);
}

template <bool kHalf>
__device__ __forceinline__ void split(float x, weft::u32& high, weft::u32& low) {
  if constexpr (kHalf) {
    high = __float_as_uint(x), low = 0;
  } else {
    high = weft::cut_tf32(__float_as_uint(x)), low = weft::cut_off_tf32(__float_as_uint(x));
  }
}

// Rows [row, row + 16), columns [column, column + 32), sums over [first, end): d[j] is the fragment of columns
// column + 8 j + ..., or where neighbouring columns are contiguous, column + 4 ... + j.
template <bool kDots, typename E>
__device__ __forceinline__ void tile(const Product<E>& p, int row, int column, int first, int end, float (&d)[4][4]) {
  constexpr bool kHalf = sizeof(E) == 2;
  const int lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
  const E* above = p.source + min(row + group, p.rows - 1) * p.source_stride;
  const E* below = p.source + min(row + group + 8, p.rows - 1) * p.source_stride;
#pragma unroll 2
  for (int chunk = first; chunk < end; chunk += kDeep) {
    const int k = chunk + 4 * in_group;
    float a[2][4] = {}, b[4][4] = {};  // b: by j, then along the sum
    if (k < end) {
      load4(above + k, a[0]);
      load4(below + k, a[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kDots) {
          load4(p.matrix + min(column + 8 * i + group, p.columns - 1) * p.column + k, b[i]);
        } else {
          float four[4];
          load4(p.matrix + (k + i) * p.row + min(column + 4 * group, p.columns - 4), four);
#pragma unroll
          for (int j = 0; j < 4; ++j) b[j][i] = four[j];
        }
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      weft::u32 a_high[4], a_low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) split<kHalf>(a[i % 2][2 * step + i / 2], a_high[i], a_low[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weft::u32 b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) split<kHalf>(b[j][2 * step + i], b_high[i], b_low[i]);
        multiply<kHalf>(d[j], a_high, a_low, b_high, b_low);
      }
    }
  }
}

// Tiles on the tensor cores; `shared` has room for one of each warp.
template <bool kDots, typename E>
__device__ __noinline__ void by_tiles(const Product<E>& p, float* shared) {
  const int tall = (p.rows + kTileRows - 1) / kTileRows, wide = (p.columns + kTileColumns - 1) / kTileColumns;
  const int units = tall * wide, deep = (p.inner + kDeep - 1) / kDeep;
  int share = 1;  // warps that share a tile
  while (share < kWarps && units * share * 2 <= int(gridDim.x) * kWarps) share *= 2;
  const int at_once = kWarps / share, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = (deep + share - 1) / share * kDeep;
  for (int base = blockIdx.x * at_once; base < units; base += gridDim.x * at_once) {
    // Warps beside each other have the same columns, whose part of the matrix then comes from L1.
    const int unit = base + warp / share, first = warp % share * depth;
    if (unit < units) {
      float d[4][4] = {};
      tile<kDots>(p, unit % tall * kTileRows, unit / tall * kTileColumns, first, min(first + depth, p.inner), d);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + i / 2 * 8, slot = lane % 4 * 2 + i % 2;
          shared[(warp * kTileRows + row) * kTileColumns + (kDots ? 8 * j + slot : 4 * slot + j)] = d[j][i];
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < at_once * kTileRows * kTileColumns; i += kTailThreads) {
      const int mine = i / (kTileRows * kTileColumns), at = i % (kTileRows * kTileColumns);
      const int row = (base + mine) % tall * kTileRows + at / kTileColumns;
      const int column = (base + mine) / tall * kTileColumns + at % kTileColumns;
      if (base + mine >= units || row >= p.rows || column >= p.columns) continue;
      float sum = 0;
      for (int w = 0; w < share; ++w) sum += shared[(mine * share + w) * kTileRows * kTileColumns + at];
      p.target[row * p.target_stride + column] = E(sum);
    }
    __syncthreads();
  }
}

template <typename E>
__device__ __forceinline__ bool aligned(const E* x, long long stride) {
  return reinterpret_cast<unsigned long long>(x) % (4 * sizeof(E)) == 0 && stride % 4 == 0;
}

// kFours: source and target are as wide as a multiple of 4.
template <typename E, bool kFours>
__device__ __forceinline__ void product(const BufferArgument& source, const MatrixArgument& matrix, bool transposed,
                                        const BufferArgument& target, int inner, int columns, int first, int count,
                                        T* shared) {
  const Product<E> product = {static_cast<const E*>(source.data) + first * source.stride,
                              source.stride,
                              static_cast<const E*>(matrix.data),
                              transposed ? matrix.column : matrix.row,
                              transposed ? matrix.row : matrix.column,
                              static_cast<E*>(target.data) + first * target.stride,
                              target.stride,
                              count,
                              inner,
                              columns};
  if (count == 1) return tiles<1>(product, shared);
  if constexpr (kFours && sizeof(E) <= 4 && sizeof(T) == 4) {
    const bool dots = product.row == 1;
    if (aligned(product.source, product.source_stride) &&
        aligned(product.matrix, dots ? product.column : product.row)) {
      return dots ? by_tiles<true>(product, shared) : by_tiles<false>(product, shared);
    }
  }
  tiles<kRows>(product, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kTailThreads)
    vertex_tail(const TailArguments a, const Many<BufferArgument, WEFT_VERTEX_BUFFERS> buffers,
                const Many<MatrixArgument, WEFT_VERTEX_MATRICES> matrices) {
  T* shared = reinterpret_cast<T*>(weft::dynamic_shared_memory());
  const FrontierArguments& p = a.frontier;
  const int *vertices = p.vertices, *gather = p.gather, *first_edge = p.first_edge, *edge_children = p.edge_children,
            *edge_parents = p.edge_parents, *first_use = p.first_use, *users = p.users,
            *first_sum_use = p.first_sum_use, *sum_use_edges = p.sum_use_edges;
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
