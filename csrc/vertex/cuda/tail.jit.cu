// All steps of a pass on the last frontiers of a batch, which are small: one kernel, because a launch costs more than
// what it would do there.
//   WEFT_VERTEX_TYPE   float or double, of registers; buffers may be narrower
//   WEFT_VERTEX_STEPS  the steps of one task; csrc/vertex/source.h
//
// Decomposition: one block on each multiprocessor, all resident; a barrier of the grid (1 us) after every step. A
// kernel's elements go round all threads as in frontier.jit.cu. A product of float32 is made of tiles on the tensor
// cores, by three products of TF32 each, of fp32 accuracy: a block has a tile of 16 x 32, 32 x 32 or 64 x 64, whichever
// keeps the multiprocessors busiest, and copies its operands from L2 through shared memory, stage by stage, while it
// multiplies the stages before. A lane's four neighbours along the sum, or four neighbouring columns, are spread over
// fragments: any order does, if it is the same for both. Half types need one product. For one row, doubles and what is
// not aligned a warp sums up a column where the matrix is contiguous along the sum, a block 8 columns else, up to 8
// rows at a time. Sums run in a fixed order. Cost of a product of R rows: a tile's multiply-adds, at 213 a clock of
// three TF32 each, times the tiles that one block gets; where that is little, the latency of two or three stages.
#include "vertex/cuda/body.jit.cuh"

namespace {

using weft::vertex::kTailShared;
using weft::vertex::kTailThreads;
using weft::vertex::TailArguments;

constexpr int kWarps = kTailThreads / 32, kRows = 8, kColumns = 8;
// Of a warp on the tensor cores, and how far it goes along the sum at a time.
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

// Four neighbours from global to shared memory, later; or zeros.
template <typename E>
__device__ __forceinline__ void fetch(E* to, const E* from, bool there) {
  if (there) return weft::copy_async<4 * sizeof(E)>(to, from);
  struct alignas(4 * sizeof(E)) Four {
    E x[4];
  };
  *reinterpret_cast<Four*>(to) = {{E(0.0f), E(0.0f), E(0.0f), E(0.0f)}};
}

// Where the n-th four columns of a row of b stand: the lanes that read one column of four rows at a time then meet
// every bank once.
__device__ __forceinline__ int swapped(int n, int rows) {
  return n ^ 2 * rows;
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

// d += 16 rows of a times 32 columns of b, a sum of 16: d[j] is the fragment of columns 8 j + ..., or where
// neighbouring columns of b are contiguous, 4 ... + j. `above` is where the lane's row begins and `below` the one 8
// further down.
template <bool kDots, int kWide, typename E>
__device__ __forceinline__ void chunk(const E* above, const E* below, const E* b_tile, int column, float (&d)[4][4]) {
  constexpr bool kHalf = sizeof(E) == 2;
  const int lane = threadIdx.x % 32, group = lane / 4, in_group = lane % 4;
  float a[2][4], b[4][4];  // b: by j, then along the sum
  load4(above + 4 * in_group, a[0]);
  load4(below + 4 * in_group, a[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kDots) {
      load4(b_tile + (column + 8 * i + group) * kDeep + 4 * in_group, b[i]);
    } else {
      float four[4];
      load4(b_tile + (4 * in_group + i) * kWide + swapped(column / 4 + group, in_group) * 4, four);
#pragma unroll
      for (int j = 0; j < 4; ++j) b[j][i] = four[j];
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

// Tiles of kTall rows and kWide columns, a block for each. Its warps have 16 rows and 32 columns each; where there are
// more warps than such parts, they share a part's sum, each with its own chunk of every stage, and their sums are added
// up in shared memory. A stage of operands is copied while those before it are multiplied.
template <bool kDots, int kTall, int kWide, typename E>
__device__ __noinline__ void by_tiles(const Product<E>& p, unsigned char* memory) {
  constexpr int kDown = kTall / kTileRows, kAcross = kWide / kTileColumns, kShare = kWarps / (kDown * kAcross);
  constexpr int kStage = kDeep * kShare;               // along the sum
  constexpr int kElements = (kTall + kWide) * kStage;  // of a stage
  constexpr int kFit = kTailShared / (kElements * 4);  // stages of float
  constexpr int kStages = kFit < 6 ? kFit : 6;
  static_assert(kShare >= 1 && kStages >= 2 && kTailShared >= kWarps * kTileRows * kTileColumns * 4);
  E* const stages = reinterpret_cast<E*>(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  const int tall = (p.rows + kTall - 1) / kTall, tiles = tall * ((p.columns + kWide - 1) / kWide);
  const int count = (p.inner + kStage - 1) / kStage;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int mine = warp % kShare, part = warp / kShare, down = part % kDown * kTileRows,
            across = part / kDown * kTileColumns;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int row = tile % tall * kTall, column = tile / tall * kWide;
    const auto copy = [&](int number) {
      if (number < count) {
        E* const to_a = stages + number % kStages * kElements;
        E* const to_b = to_a + kTall * kStage;
        const int first = number * kStage;
#pragma unroll 1
        for (int i = threadIdx.x; i < kTall * kStage / 4; i += kTailThreads) {
          const int at = i / (kStage / 4), k = i % (kStage / 4) * 4;
          fetch(to_a + (k / kDeep * kTall + at) * kDeep + k % kDeep,
                p.source + min(row + at, p.rows - 1) * p.source_stride + first + k, first + k < p.inner);
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < kWide * kStage / 4; i += kTailThreads) {
          if constexpr (kDots) {
            const int at = i / (kStage / 4), k = i % (kStage / 4) * 4;
            fetch(to_b + (k / kDeep * kWide + at) * kDeep + k % kDeep,
                  p.matrix + min(column + at, p.columns - 1) * p.column + first + k, first + k < p.inner);
          } else {
            const int k = i / (kWide / 4), at = i % (kWide / 4);
            fetch(to_b + k * kWide + swapped(at, k / 4 % 4) * 4,
                  p.matrix + (first + k) * p.row + min(column + 4 * at, p.columns - 4), first + k < p.inner);
          }
        }
      }
      weft::copy_commit();
    };
    float d[4][4] = {};
    // One loop, so that copying and multiplying stand in the code once: compiling them takes long.
#pragma unroll 1
    for (int number = 1 - kStages; number < count; ++number) {
      if (number >= 0) {
        weft::copy_wait<kStages - 2>();
        __syncthreads();  // all threads' copies are there, and the stage before this one is free
      }
      copy(number + kStages - 1);
      if (number >= 0) {
        const E* const a = stages + number % kStages * kElements + (mine * kTall + down + lane / 4) * kDeep;
        const E* const b = stages + number % kStages * kElements + kTall * kStage + mine * kWide * kDeep;
        chunk<kDots, kWide>(a, a + 8 * kDeep, b, across, d);
      }
    }
    weft::copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = lane / 4 + i / 2 * 8, slot = lane % 4 * 2 + i % 2;
        sums[(warp * kTileRows + at) * kTileColumns + (kDots ? 8 * j + slot : 4 * slot + j)] = d[j][i];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kTall * kWide; i += kTailThreads) {
      const int r = i / kWide, c = i % kWide;
      if (row + r >= p.rows || column + c >= p.columns) continue;
      const int first = (c / kTileColumns * kDown + r / kTileRows) * kShare;
      float sum = 0;
#pragma unroll 4
      for (int w = 0; w < kShare; ++w) {
        sum += sums[((first + w) * kTileRows + r % kTileRows) * kTileColumns + c % kTileColumns];
      }
      p.target[(row + r) * p.target_stride + column + c] = E(sum);
    }
    __syncthreads();
  }
}

// What the tiles of this size cost: a block multiplies its elements, and reads its sides.
__device__ __forceinline__ int cost(int rows, int columns, int tall, int wide) {
  const int tiles = ((rows + tall - 1) / tall) * ((columns + wide - 1) / wide);
  return (tiles + int(gridDim.x) - 1) / int(gridDim.x) * (tall * wide + 16 * (tall + wide));
}

template <bool kDots, typename E>
__device__ __forceinline__ void by_best_tiles(const Product<E>& p, unsigned char* memory) {
  // More sizes than these would gain a twentieth, and take as long to compile as all else.
  const int small = cost(p.rows, p.columns, 16, 32), middle = cost(p.rows, p.columns, 32, 32),
            large = cost(p.rows, p.columns, 64, 64);
  if (large <= min(small, middle)) return by_tiles<kDots, 64, 64>(p, memory);
  if (middle <= small) return by_tiles<kDots, 32, 32>(p, memory);
  by_tiles<kDots, 16, 32>(p, memory);
}

template <typename E>
__device__ __forceinline__ bool aligned(const E* x, long long stride) {
  return reinterpret_cast<unsigned long long>(x) % (4 * sizeof(E)) == 0 && stride % 4 == 0;
}

// kFours: source and target are as wide as a multiple of 4.
template <typename E, bool kFours>
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
  if (count == 1) return tiles<1>(product, shared);
  if constexpr (kFours && sizeof(E) <= 4 && sizeof(T) == 4) {
    const bool dots = product.row == 1;
    if (aligned(product.source, product.source_stride) &&
        aligned(product.matrix, dots ? product.column : product.row)) {
      unsigned char* const memory = reinterpret_cast<unsigned char*>(shared);
      return dots ? by_best_tiles<true>(product, memory) : by_best_tiles<false>(product, memory);
    }
  }
  tiles<kRows>(product, shared);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kTailThreads) vertex_tail(const TailArguments a) {
  T* shared = reinterpret_cast<T*>(weft::dynamic_shared_memory());
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
