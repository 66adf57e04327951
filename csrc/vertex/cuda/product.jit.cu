// c (rows, columns) = a (rows, inner) @ b (inner, columns), float32 of fp32 accuracy by three products of TF32, which
// on GPUs for data centers is faster than fp32's own units.
//   WEFT_PRODUCT_ROWS, WEFT_PRODUCT_COLUMNS  a block's tile, 64 or 128 each
//   WEFT_PRODUCT_A_DEEP, WEFT_PRODUCT_B_DEEP 1 where a (b) is contiguous along the sum, 0 where its rows (columns) are
//
// Decomposition: a block has a tile of c, each of its warps 32 x 32 of that. Both operands come by cp.async, 16 along
// the sum at a time and three such stages ahead, into shared memory, where 16-byte pieces lie so that no fragment's
// read meets a bank twice. A lane has four neighbours along the sum, spread over two fragments: any order does, if it
// is the same for both. With several parts of the sum each goes to its own copy of c. Sums run in a fixed order.
// Addresses and strides are multiples of 16 bytes, and so are the contiguous sizes.
#include "common/cuda/ptx.jit.cuh"
#include "vertex/cuda/product.jit.cuh"

namespace {

using weft::u32;
using weft::vertex::kProductDeep;
using weft::vertex::kProductStages;
using weft::vertex::ProductArguments;

constexpr int kRows = WEFT_PRODUCT_ROWS, kColumns = WEFT_PRODUCT_COLUMNS;
constexpr int kThreads = weft::vertex::product_threads(kRows, kColumns);
// Warps along the columns, and a warp's fragments.
constexpr int kAcross = kColumns / 32, kTall = 2, kWide = 4;
// The tensor cores cut sums off where fp32 rounds to nearest: after so many stages theirs are added up as fp32.
constexpr int kRounds = 4;
constexpr int kStage = (kRows + kColumns) * kProductDeep;

// Where an element of a tile lies. Deep: 16 along the sum beside each other; else kLong rows, in pieces of four.
template <bool kDeep, int kLong>
__device__ __forceinline__ int place(int row, int k) {
  if constexpr (kDeep) return row * kProductDeep + k;
  return k * kLong + ((row / 4) ^ (k / 4 * 2)) * 4 + row % 4;
}

// kLong rows from `first` on, [k, k + 16) of the sum; beyond its end zeros. Rows beyond the last are the last.
template <bool kDeep, int kLong>
__device__ __forceinline__ void fetch(float* to, const float* from, long long stride, int first, int rows, int k,
                                      int end) {
#pragma unroll
  for (int i = 0; i < kLong * kProductDeep / 4 / kThreads; ++i) {
    const int piece = threadIdx.x + i * kThreads;
    if constexpr (kDeep) {
      const int row = piece / 4, at = k + piece % 4 * 4;
      const float* source = from + min(first + row, rows - 1) * stride;
      weft::copy_async_padded(to + piece * 4, source + min(at, end - 4), at < end ? 16 : 0);
    } else {
      const int row = piece % (kLong / 4) * 4, deep = piece / (kLong / 4), at = k + deep;
      weft::copy_async_padded(to + place<false, kLong>(row, deep),
                              from + min(at, end - 1) * stride + min(first + row, rows - 4), at < end ? 16 : 0);
    }
  }
}

// A lane's four along the sum in one row, as what the tensor cores take and what is left.
template <bool kDeep, int kLong>
__device__ __forceinline__ void read(const float* tile, int row, u32 (&high)[4], u32 (&low)[4]) {
  const int k = threadIdx.x % 4 * 4;
  float x[4];
  if constexpr (kDeep) {
    const float4 four = *reinterpret_cast<const float4*>(tile + place<true, kLong>(row, k));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = tile[place<false, kLong>(row, k + i)];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = weft::cut_tf32(__float_as_uint(x[i])), low[i] = weft::cut_off_tf32(__float_as_uint(x[i]));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1) vertex_product(const ProductArguments p) {
  constexpr bool kDeepA = WEFT_PRODUCT_A_DEEP, kDeepB = WEFT_PRODUCT_B_DEEP;
  float* shared = reinterpret_cast<float*>(weft::dynamic_shared_memory());
  const int across = (p.columns + kColumns - 1) / kColumns, down = (p.rows + kRows - 1) / kRows;
  const int row = int(blockIdx.x) / across % down * kRows, column = int(blockIdx.x) % across * kColumns;
  const int part = int(blockIdx.x) / across / down;
  const int begin = part * p.depth, end = min(begin + p.depth, p.inner);
  const int steps = (end - begin + kProductDeep - 1) / kProductDeep;
  const auto stage = [&](int step) {
    if (step < steps) {
      float* to = shared + step % kProductStages * kStage;
      const int k = begin + step * kProductDeep;
      fetch<kDeepA, kRows>(to, p.a, p.a_stride, row, p.rows, k, end);
      fetch<kDeepB, kColumns>(to + kRows * kProductDeep, p.b, p.b_stride, column, p.columns, k, end);
    }
    weft::copy_commit();
  };
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, in_group = threadIdx.x % 4;
  const int top = warp / kAcross * kTall * 16, left = warp % kAcross * 32;
  float sums[kTall][kWide][4] = {};
#pragma unroll
  for (int step = 0; step < kProductStages - 1; ++step) stage(step);
  for (int done = 0; done < steps; done += kRounds) {
    float d[kTall][kWide][4] = {};
#pragma unroll 1
    for (int step = done; step < min(done + kRounds, steps); ++step) {
      weft::copy_wait<kProductStages - 2>();
      __syncthreads();
      stage(step + kProductStages - 1);
      const float* a = shared + step % kProductStages * kStage;
      const float* b = a + kRows * kProductDeep;
      u32 b_high[kWide][4], b_low[kWide][4];
#pragma unroll
      for (int j = 0; j < kWide; ++j) read<kDeepB, kColumns>(b, left + 8 * j + group, b_high[j], b_low[j]);
      u32 a_high[2 * kTall][4], a_low[2 * kTall][4];
#pragma unroll
      for (int i = 0; i < 2 * kTall; ++i) read<kDeepA, kRows>(a, top + 8 * i + group, a_high[i], a_low[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // The three products that make one depend on each other: others come between them.
#pragma unroll
        for (int term = 0; term < 3; ++term) {
          const auto& of_a = term == 1 ? a_low : a_high;
          const auto& of_b = term == 0 ? b_low : b_high;
#pragma unroll
          for (int i = 0; i < kTall; ++i) {
            const u32 fragment[4] = {of_a[2 * i][2 * half], of_a[2 * i + 1][2 * half], of_a[2 * i][2 * half + 1],
                                     of_a[2 * i + 1][2 * half + 1]};
#pragma unroll
            for (int j = 0; j < kWide; ++j) weft::mma_tf32(d[i][j], fragment, of_b[j] + 2 * half);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTall; ++i) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
#pragma unroll
        for (int n = 0; n < 4; ++n) sums[i][j][n] += d[i][j][n];
      }
    }
  }
  float* c = p.c + part * p.part;
#pragma unroll
  for (int i = 0; i < kTall; ++i) {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const int at = column + left + 8 * j + 2 * in_group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = row + top + 16 * i + group + 8 * half;
        if (line >= p.rows || at >= p.columns) continue;
        *reinterpret_cast<float2*>(c + line * p.c_stride + at) =
            make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
    }
  }
}
