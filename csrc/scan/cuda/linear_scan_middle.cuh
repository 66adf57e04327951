// Dense linear scan for kSmallMaxH < H <= kMiddleMaxH, one element type per .cu file that includes this.
//
// The steps are cut into `chunks` chunks of `length`. With one chunk only (3) runs: the sequential route.
//   (1) products: per (chunk, row of the batch) the product P = A[last] ... A[first] and the offset v of y = P x + v;
//   (2) totals:   per row of the batch, sequential over chunks: the state at every chunk's start;
//   (3) replay:   per (chunk, row of the batch), matrix-vector products from that state, which write the output.
// (1) costs H times the arithmetic of (3), on tensor cores; (3) is bound by reading A.
//
// (1) keeps P in registers for the whole chunk. Every warp owns 16 columns of P (fp64: 8), which need nothing from the
// other warps, and computes the transposed product P^T A^T: the accumulator layout of mma (a lane holds columns 2c and
// 2c+1) then is the layout of the left operand of the next step, if k slots c and c+4 stand for rows 2c and 2c+1 of P.
// Only A goes through shared memory. fp32 operands are split into two TF32 numbers, and three of the four products
// are summed; fp16 and bf16 A are TF32 numbers already, so only P is split. The sums over 16 k leave the tensor core,
// which truncates, and are added up in fp32, which rounds. One more warp advances v by fused multiply-adds.
//
// Every column of P carries an exponent, so that P neither overflows nor underflows where P x does not. A column that
// shrinks too much in one step has lost digits: (1) leaves a bound of what that can mean at the chunk's end, and (2)
// redoes the chunk step by step where the bound is not negligible or the result is not finite.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "scan/cuda/linear_scan_middle.h"

namespace weft::scan::middle {

// Columns are rescaled to [1, 2) where their largest magnitude leaves [kSmall, kLarge].
template <typename S>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmall = 0x1p-12f, kLarge = 0x1p12f;
  // Numbers below 2^-126 may be flushed to 0 (in A's low half, before it meets a column of at most 2^12, in at most
  // 2^7 rows): an error of at most 2^kLossBound in units of the column. A column that stays above kLost has it below
  // half an ulp.
  static constexpr float kLost = 0x1p-78f, kLossBound = -107.f;
  static constexpr float kTolerance = -24.f, kTiniest = -126.f;  // log2: of the result's magnitude, and absolute
  static constexpr int kMaxShift = 120;
};
template <>
struct Range<double> {
  static constexpr double kSmall = 0x1p-12, kLarge = 0x1p12, kLost = 0x1p-940;
  static constexpr float kLossBound = -1003.f, kTolerance = -53.f, kTiniest = -1022.f;
  static constexpr int kMaxShift = 1000;
};

template <typename E>
using State = std::conditional_t<std::is_same_v<E, double>, double, float>;

__device__ inline float to_state(float x) { return x; }
__device__ inline float to_state(__half x) { return __half2float(x); }
__device__ inline float to_state(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline double to_state(double x) { return x; }
template <typename E>
__device__ inline E from_state(State<E> x) {
  if constexpr (std::is_same_v<E, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<E, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// 16 bytes of elements as they lie in memory.
template <typename E>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(E);
  E at[kSize];
};

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

template <int kBytes>
__device__ inline void copy_async(void* to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
                 : "memory");
  }
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Until at most `pending` of the latest groups are under way.
__device__ inline void copy_wait_dynamic(int pending) {
  switch (pending) {
    case 0:
      return copy_wait<0>();
    case 1:
      return copy_wait<1>();
    case 2:
      return copy_wait<2>();
    case 3:
      return copy_wait<3>();
    case 4:
      return copy_wait<4>();
    case 5:
      return copy_wait<5>();
    default:
      return copy_wait<6>();
  }
}

template <int kBytes, typename E>
__device__ inline void copy_rows_by(E* to, int to_pitch, const E* from, int64_t from_pitch, int rows, int columns) {
  constexpr int kStep = kBytes / int(sizeof(E));
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int r = threadIdx.x / 32; r < rows; r += warps) {
    for (int c = lane * kStep; c < columns; c += 32 * kStep) {
      copy_async<kBytes>(to + r * to_pitch + c, from + r * from_pitch + c);
    }
  }
}

// A rows x columns block to shared memory, in pieces of `bytes`, which divides every address and row.
template <typename E>
__device__ inline void copy_rows(E* to, int to_pitch, const E* from, int64_t from_pitch, int rows, int columns,
                                 int bytes) {
  if (bytes == 16) {
    copy_rows_by<16>(to, to_pitch, from, from_pitch, rows, columns);
  } else if (bytes == 8) {
    copy_rows_by<8>(to, to_pitch, from, from_pitch, rows, columns);
  } else if (bytes == 4) {
    if constexpr (sizeof(E) <= 4) copy_rows_by<4>(to, to_pitch, from, from_pitch, rows, columns);
  } else {
    // 16-bit elements at odd addresses: cp.async has no such piece.
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int r = threadIdx.x / 32; r < rows; r += warps) {
      for (int c = lane; c < columns; c += 32) to[r * to_pitch + c] = from[r * from_pitch + c];
    }
  }
}

// Contiguous memory, both ends 16-byte aligned.
__device__ inline void copy_flat(void* to, const void* from, int bytes) {
  for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
    copy_async<16>(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
}

__device__ inline void clear_shared(void* p, int bytes) {
  for (int i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x) {
    *reinterpret_cast<uint32_t*>(static_cast<char*>(p) + i) = 0;
  }
}

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }
__device__ inline float scaled(float x, int e) { return ldexpf(x, e); }
__device__ inline double scaled(double x, int e) { return ldexp(x, e); }
__device__ inline int exponent(float x) { return ilogbf(x); }
__device__ inline int exponent(double x) { return ilogb(x); }

// Where the totals of one chunk lie, and the states at the chunks' starts.
template <typename S>
struct Totals {
  S* product;  // by columns: P[i][j] at j * padded + i
  S* offset;
  int* exponent;
  float* loss;
  float* growth;
  __device__ Totals(const Arguments& p, int64_t row, int64_t chunk) {
    product = static_cast<S*>(p.workspace) + (row * (p.chunks - 1) + chunk) * p.total_size();
    offset = product + p.padded * p.padded;
    exponent = reinterpret_cast<int*>(offset + p.padded);
    loss = reinterpret_cast<float*>(offset + 2 * p.padded);
    growth = reinterpret_cast<float*>(offset + 3 * p.padded);
  }
};

template <typename S>
__device__ inline S* chunk_start(const Arguments& p, int64_t row, int64_t chunk) {
  return static_cast<S*>(p.workspace) + p.batch * (p.chunks - 1) * p.total_size() +
         (row * (p.chunks - 1) + chunk - 1) * p.padded;
}

// One column of P beside its values, the same in every lane that holds a part of it.
template <typename S>
struct Column {
  int exponent = 0;
  float loss = -INFINITY;  // log2 of the largest loss, in the chunk's first units, divided by the growth up to then
  bool zero = false;
};

// What to multiply the column by after a step that left it with the largest magnitude `top`. `growth` is log2 of the
// product of the norms of A so far: later norms bound what becomes of a loss.
template <typename S>
__device__ inline S rescale(Column<S>& column, S top, bool first, float growth) {
  using R = Range<S>;
  if (column.zero || (top >= R::kSmall && top <= R::kLarge) || isinf(top)) return S(1);
  // The first product is A itself: nothing is lost there, and a column of zeros stays one.
  if (!first && top < R::kLost && growth > kZeroGrowth) {
    column.loss = fmaxf(column.loss, float(column.exponent) - growth);
  }
  if (top == S(0)) {
    column.zero = true;
    return S(1);
  }
  const int shift = max(-R::kMaxShift, min(R::kMaxShift, exponent(top)));
  column.exponent += shift;
  return scaled(S(1), -shift);
}

// log2 of the largest row sum of |A|, for the warp that holds the sums.
template <typename S>
__device__ inline float log2_norm(S sum) {
  for (int d = 16; d > 0; d /= 2) sum = larger(sum, __shfl_xor_sync(~0u, sum, d));
  if (sum == S(0)) return 2 * kZeroGrowth;
  return float(log2(sum));
}

__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x = high + low, high rounded to TF32; the tensor core truncates low, whose sign is as good as random.
__device__ inline void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// The right operand A^T of four neighbouring 8-column tiles from column 32 * ng, in the k tile kt: b[j] = {row 2c, 2c+1}.
template <typename E, int kPitch, bool kTransposed>
struct Fragments {
  const E* base;
  __device__ Fragments(const E* tile, int lane) {
    const int g = lane / 4, c = lane % 4;
    if constexpr (sizeof(E) == 2) {
      const int matrix = lane / 8, row = lane % 8;
      base = kTransposed ? tile + row * kPitch + 8 * matrix : tile + (8 * matrix + row) * kPitch;
    } else {
      base = kTransposed ? tile + 2 * c * kPitch + g : tile + g * kPitch + 2 * c;
    }
  }
  __device__ void load(int kt, int ng, float (&b)[4][2]) const {
    if constexpr (sizeof(E) == 2) {
      uint32_t r[4];
      if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(base + 8 * kt * kPitch + 32 * ng))
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(base + 32 * ng * kPitch + 8 * kt))
                     : "memory");
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (std::is_same_v<E, __half>) {
          const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&r[j]));
          b[j][0] = f.x;
          b[j][1] = f.y;
        } else {
          b[j][0] = __uint_as_float(r[j] << 16);
          b[j][1] = __uint_as_float(r[j] & 0xffff0000u);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kTransposed) {
          b[j][0] = base[8 * kt * kPitch + 8 * (4 * ng + j)];
          b[j][1] = base[(8 * kt + 1) * kPitch + 8 * (4 * ng + j)];
        } else {
          const float2 f = *reinterpret_cast<const float2*>(base + 8 * (4 * ng + j) * kPitch + 8 * kt);
          b[j][0] = f.x;
          b[j][1] = f.y;
        }
      }
    }
  }
};

// Row pitch of A's tile in (1), chosen so that the fragment loads have no bank conflict.
template <typename E, int kPadded, bool kTransposed>
constexpr int kProductPitch = kPadded + (sizeof(E) == 2 ? 8 : kTransposed ? 4 : 8);

template <typename E, int kPadded, bool kTransposed>
constexpr size_t product_shared_bytes() {
  return 2 * size_t(kPadded) * kProductPitch<E, kPadded, kTransposed> * sizeof(E) + (2 * kPadded + 4) * sizeof(float);
}

// The whole-warp part of (1) that advances v: sums of A v and of |A|, for rows lane, lane + 32, ...
template <typename E, int kPadded, int kPitch, bool kTransposed>
__device__ inline void advance_offset(const E* tile, const float* v, int lane, float (&sum)[kPadded / 32],
                                      float (&norm)[kPadded / 32]) {
  constexpr int kRows = kPadded / 32;
#pragma unroll
  for (int m = 0; m < kRows; ++m) sum[m] = norm[m] = 0.f;
  constexpr int kStep = kTransposed ? 4 : Pack<E>::kSize;
#pragma unroll 2
  for (int k = 0; k < kPadded; k += kStep) {
    float x[kStep];
#pragma unroll
    for (int i = 0; i < kStep; i += 4) {
      const float4 f = *reinterpret_cast<const float4*>(v + k + i);
      x[i] = f.x, x[i + 1] = f.y, x[i + 2] = f.z, x[i + 3] = f.w;
    }
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const int row = lane + 32 * m;
      float a[kStep];
      if constexpr (kTransposed) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) a[i] = to_state(tile[(k + i) * kPitch + row]);
      } else {
        const auto pack = *reinterpret_cast<const Pack<E>*>(tile + row * kPitch + k);
#pragma unroll
        for (int i = 0; i < kStep; ++i) a[i] = to_state(pack.at[i]);
      }
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        sum[m] = fmaf(a[i], x[i], sum[m]);
        norm[m] += fabsf(a[i]);
      }
    }
  }
}

// (1) for fp32, fp16 and bf16. Grid: (splits, chunks - 1, B) flattened, split fastest; a split has its own columns.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(32 * (kPadded / 16 + 1), kPadded == 128 ? 1 : kPadded == 96 ? 2 : 3)
    products_kernel(const Arguments p) {
  constexpr int kPitch = kProductPitch<E, kPadded, kTransposed>, kTiles = kPadded / 8, kRows = kPadded / 32;
  constexpr int kTileSize = kPadded * kPitch;
  extern __shared__ __align__(16) unsigned char shared[];
  E* const tiles = reinterpret_cast<E*>(shared);
  float* const v = reinterpret_cast<float*>(tiles + 2 * kTileSize);
  float* const growth = v + 2 * kPadded;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, workers = blockDim.x / 32 - 1;
  const int split = blockIdx.x % p.splits;
  const int64_t rest = blockIdx.x / p.splits, chunk = rest % (p.chunks - 1), row = rest / (p.chunks - 1);
  const int64_t start = p.first + chunk * p.length;
  const E* const A = static_cast<const E*>(p.A) + start * p.A_t + row * p.A_b;
  const E* const b = static_cast<const E*>(p.b) + start * p.b_t + row * p.b_b;
  const int H = p.H, length = int(p.length);
  const Totals<float> totals(p, row, chunk);

  clear_shared(shared, int(product_shared_bytes<E, kPadded, kTransposed>()));
  __syncthreads();
  copy_rows(tiles, kPitch, A, p.A_ld, H, H, p.piece);
  copy_commit();

  const int g = lane / 4, c = lane % 4, column0 = 16 * (split * workers + warp);
  float P[kTiles][4];  // P^T: columns column0 + g and + 8 of P, rows 8 q + 2 c and + 1
  Column<float> left, right;
  auto check = [&](bool first, float now) {
    float top_left = 0.f, top_right = 0.f;
#pragma unroll
    for (int q = 0; q < kTiles; ++q) {
      top_left = fmaxf(top_left, fmaxf(fabsf(P[q][0]), fabsf(P[q][1])));
      top_right = fmaxf(top_right, fmaxf(fabsf(P[q][2]), fabsf(P[q][3])));
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      top_left = fmaxf(top_left, __shfl_xor_sync(~0u, top_left, d));
      top_right = fmaxf(top_right, __shfl_xor_sync(~0u, top_right, d));
    }
    const float by_left = rescale(left, top_left, first, now), by_right = rescale(right, top_right, first, now);
    if (__any_sync(~0u, by_left != 1.f || by_right != 1.f)) {
#pragma unroll
      for (int q = 0; q < kTiles; ++q) {
        P[q][0] *= by_left;
        P[q][1] *= by_left;
        P[q][2] *= by_right;
        P[q][3] *= by_right;
      }
    }
  };

  float next[kRows];  // b of the step that comes
  auto load_offset = [&](int step) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      next[m] = step < length && lane + 32 * m < H ? to_state(b[step * p.b_t + lane + 32 * m]) : 0.f;
    }
  };
  if (warp == workers) load_offset(0);

  for (int step = 0; step < length; ++step) {
    copy_wait<0>();
    __syncthreads();
    const E* const tile = tiles + step % 2 * kTileSize;
    if (step + 1 < length) {
      copy_rows(tiles + (step + 1) % 2 * kTileSize, kPitch, A + (step + 1) * p.A_t, p.A_ld, H, H, p.piece);
      copy_commit();
    }
    if (warp == workers) {
      float sum[kRows], norm[kRows], offset[kRows];
#pragma unroll
      for (int m = 0; m < kRows; ++m) offset[m] = next[m];
      load_offset(step + 1);
      advance_offset<E, kPadded, kPitch, kTransposed>(tile, v + (step + 1) % 2 * kPadded, lane, sum, norm);
      float top = 0.f;
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        v[step % 2 * kPadded + lane + 32 * m] = step == 0 ? offset[m] : sum[m] + offset[m];
        top = fmaxf(top, norm[m]);
      }
      top = log2_norm(top);
      if (lane == 0) growth[step % 2] = step == 0 ? 0.f : growth[(step + 1) % 2] + top;
      __syncwarp();
    } else if (column0 < H) {
      if (step == 0) {
#pragma unroll
        for (int q = 0; q < kTiles; ++q) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int r = 8 * q + 2 * c + i % 2, j = column0 + g + i / 2 * 8;
            P[q][i] = to_state(kTransposed ? tile[j * kPitch + r] : tile[r * kPitch + j]);
          }
        }
        continue;
      }
      check(step == 1, growth[(step + 1) % 2]);
      const Fragments<E, kPitch, kTransposed> fragments(tile, lane);
      float Q[kTiles][4];
#pragma unroll
      for (int q = 0; q < kTiles; ++q) Q[q][0] = Q[q][1] = Q[q][2] = Q[q][3] = 0.f;
#pragma unroll
      for (int kg = 0; kg < kTiles / 2; ++kg) {
        if (16 * kg < H) {
          uint32_t high[2][4], low[2][4];
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            split_tf32(P[2 * kg + k][0], high[k][0], low[k][0]);
            split_tf32(P[2 * kg + k][2], high[k][1], low[k][1]);
            split_tf32(P[2 * kg + k][1], high[k][2], low[k][2]);
            split_tf32(P[2 * kg + k][3], high[k][3], low[k][3]);
          }
#pragma unroll
          for (int ng = 0; ng < kTiles / 4; ++ng) {
            if (32 * ng < H) {
              // Small products first; four independent accumulators in turn hide the latency of mma.
              float sum[4][4] = {};
#pragma unroll
              for (int k = 0; k < 2; ++k) {
                float f[4][2];
                uint32_t b_high[4][2], b_low[4][2];
                fragments.load(2 * kg + k, ng, f);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
#pragma unroll
                  for (int i = 0; i < 2; ++i) {
                    if constexpr (sizeof(E) == 2) {
                      b_high[j][i] = __float_as_uint(f[j][i]);
                    } else {
                      split_tf32(f[j][i], b_high[j][i], b_low[j][i]);
                    }
                  }
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_tf32(sum[j], low[k], b_high[j]);
                if constexpr (sizeof(E) == 4) {
#pragma unroll
                  for (int j = 0; j < 4; ++j) mma_tf32(sum[j], high[k], b_low[j]);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_tf32(sum[j], high[k], b_high[j]);
              }
#pragma unroll
              for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) Q[4 * ng + j][i] += sum[j][i];
              }
            }
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kTiles; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) P[q][i] = Q[q][i];
      }
    }
  }
  __syncthreads();

  const float total_growth = growth[(length + 1) % 2];
  if (warp == workers) {
    if (split == 0) {
      for (int i = lane; i < H; i += 32) totals.offset[i] = v[(length + 1) % 2 * kPadded + i];
      if (lane == 0) *totals.growth = total_growth;
    }
    return;
  }
  if (column0 >= H) return;
  check(length == 1, total_growth);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = column0 + g + 8 * h;
    if (j >= H) continue;
#pragma unroll
    for (int q = 0; q < kTiles; ++q) {
      if (8 * q < H) {
        *reinterpret_cast<float2*>(totals.product + j * kPadded + 8 * q + 2 * c) =
            make_float2(P[q][2 * h], P[q][2 * h + 1]);
      }
    }
    if (c == 0) {
      totals.exponent[j] = h ? right.exponent : left.exponent;
      totals.loss[j] = h ? right.loss : left.loss;
    }
  }
}


// The state and the ring of stages of replay and totals, in shared memory.
template <typename E>
struct ReplayMemory {
  using S = State<E>;
  S* x[2];
  S* partial;  // one pack of sums per thread, for transposed A
  unsigned char* offsets;
  unsigned char* ring;
  int offset_bytes, stage_bytes;

  static constexpr int kPartialBytes = kReplayThreads * Pack<E>::kSize * sizeof(S);

  __host__ __device__ static int offset_stage(const Arguments& p) { return p.padded * int(sizeof(E)) + 16; }
  __host__ __device__ static int pitch(const Arguments& p) {
    return (p.H + Pack<E>::kSize - 1) / Pack<E>::kSize * Pack<E>::kSize;
  }
  __host__ __device__ static int stage(const Arguments& p) { return p.tile_rows * pitch(p) * int(sizeof(E)); }
  // Everything but the ring.
  __host__ __device__ static int fixed_bytes(const Arguments& p) {
    return 2 * p.padded * int(sizeof(S)) + kPartialBytes + p.stages * offset_stage(p);
  }
  static int bytes(const Arguments& p) { return fixed_bytes(p) + p.stages * stage(p); }

  __device__ ReplayMemory(const Arguments& p, unsigned char* shared) {
    x[0] = reinterpret_cast<S*>(shared);
    x[1] = x[0] + p.padded;
    partial = x[1] + p.padded;
    offsets = reinterpret_cast<unsigned char*>(partial) + kPartialBytes;
    offset_bytes = offset_stage(p);
    ring = shared + fixed_bytes(p);
    stage_bytes = stage(p);
  }
};

// Sums of column packs: the thread's part of y[i] = sum over k of M[k][i] x[k] for M's rows k in one tile.
template <typename E, typename S>
__device__ inline void accumulate_columns(const E* tile, int pitch, int rows, const S* x, int part, int parts, int pack,
                                          S (&sum)[Pack<E>::kSize]) {
#pragma unroll 4
  for (int k = part; k < rows; k += parts) {
    const auto a = *reinterpret_cast<const Pack<E>*>(tile + k * pitch + pack * Pack<E>::kSize);
    const S xk = x[k];
#pragma unroll
    for (int i = 0; i < Pack<E>::kSize; ++i) sum[i] += to_state(a.at[i]) * xk;
  }
}

// Steps [begin, end) from the state memory.x[0] (zero beyond H), which holds the last state afterwards. All threads of
// the block; writes the output where `write` is set.
template <typename E, int kPadded, bool kTransposed>
__device__ void replay(const Arguments& p, const ReplayMemory<E>& memory, int64_t row, int64_t begin, int64_t end,
                       bool write) {
  using S = State<E>;
  constexpr int kPack = Pack<E>::kSize;
  // As A[t] x: 8 lanes share a row, each group of 8 lanes has rows group, group + 32, ...
  constexpr int kLanes = 8, kGroups = kReplayThreads / kLanes, kRows = kPadded / kGroups;
  constexpr int kPacks = (kPadded / kPack + kLanes - 1) / kLanes;
  const int H = p.H, pitch = ReplayMemory<E>::pitch(p), tile_rows = p.tile_rows;
  const int tiles = (H + tile_rows - 1) / tile_rows, packs = pitch / kPack, parts = kReplayThreads / packs;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int pack = threadIdx.x % packs, part = threadIdx.x / packs;
  const E* const A = static_cast<const E*>(p.A) + row * p.A_b;
  const E* const b = static_cast<const E*>(p.b) + row * p.b_b;
  E* const out = static_cast<E*>(p.out) + row * p.out_b;

  // b[t] comes by 4-byte words, of which the first and the last may reach over its ends by one 16-bit element.
  auto b_words = [&](int64_t t) { return reinterpret_cast<uintptr_t>(b + t * p.b_t); };
  int64_t next_step = begin;
  int next_tile = 0, next_stage = 0, next_slot = 0;
  auto issue = [&]() {
    if (next_step < end) {
      const int r0 = next_tile * tile_rows, rows = min(tile_rows, H - r0);
      E* const stage = reinterpret_cast<E*>(memory.ring + next_stage * memory.stage_bytes);
      const E* const from = A + next_step * p.A_t + r0 * p.A_ld;
      if (p.flat) {
        copy_flat(stage, from, rows * pitch * int(sizeof(E)));
      } else {
        copy_rows(stage, pitch, from, p.A_ld, rows, H, p.piece);
      }
      if (next_tile == 0) {
        const uintptr_t at = b_words(next_step);
        const int words = (int(at % 4) + H * int(sizeof(E)) + 3) / 4;
        for (int w = threadIdx.x; w < words; w += kReplayThreads) {
          copy_async<4>(memory.offsets + next_slot * memory.offset_bytes + 4 * w,
                        reinterpret_cast<const void*>(at - at % 4 + 4 * w));
        }
        next_slot = next_slot + 1 == p.stages ? 0 : next_slot + 1;
      }
      if (++next_tile == tiles) {
        next_tile = 0;
        ++next_step;
      }
      next_stage = next_stage + 1 == p.stages ? 0 : next_stage + 1;
    }
    copy_commit();
  };

  if (!p.flat) clear_shared(memory.ring, p.stages * memory.stage_bytes);  // the end of every row
  __syncthreads();
  for (int i = 0; i + 1 < p.stages; ++i) issue();

  S* x = memory.x[0];
  S* y = memory.x[1];
  int stage_index = 0, slot = 0;
  for (int64_t t = begin; t < end; ++t) {
    const E* const bt = reinterpret_cast<const E*>(memory.offsets + slot * memory.offset_bytes + b_words(t) % 4);
    S sums[kPack] = {};
    for (int tile_index = 0; tile_index < tiles; ++tile_index) {
      copy_wait_dynamic(p.stages - 2);
      __syncthreads();
      issue();
      const E* const tile = reinterpret_cast<const E*>(memory.ring + stage_index * memory.stage_bytes);
      stage_index = stage_index + 1 == p.stages ? 0 : stage_index + 1;
      const int r0 = tile_index * tile_rows, rows = min(tile_rows, H - r0);
      if constexpr (kTransposed) {
        if (part < parts) accumulate_columns<E, S>(tile, pitch, rows, x + r0, part, parts, pack, sums);
      } else {
        S sum[4] = {};
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          const int at = lane + kLanes * i;
          if (at < packs) {
            S xs[kPack];
#pragma unroll
            for (int e = 0; e < kPack; ++e) xs[e] = x[at * kPack + e];
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
              const int r = group + kGroups * m;
              if (r < rows) {
                const auto a = *reinterpret_cast<const Pack<E>*>(tile + r * pitch + at * kPack);
#pragma unroll
                for (int e = 0; e < kPack; ++e) sum[m] += to_state(a.at[e]) * xs[e];
              }
            }
          }
        }
        // Each exchange sums over two lanes and shares the rows between them; the last leaves both with the sum.
        const bool upper = lane & 4, odd = lane & 2;
        S pair[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const S keep = upper ? sum[m + 2] : sum[m], give = upper ? sum[m] : sum[m + 2];
          pair[m] = keep + __shfl_xor_sync(~0u, give, 4);
        }
        S total = (odd ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, odd ? pair[0] : pair[1], 2);
        total += __shfl_xor_sync(~0u, total, 1);
        const int r = group + kGroups * (2 * upper + odd);
        if (lane % 2 == 0 && r < rows) {
          const S value = total + to_state(bt[r0 + r]);
          y[r0 + r] = value;
          if (write) out[t * p.out_t + r0 + r] = from_state<E>(value);
        }
      }
    }
    if constexpr (kTransposed) {
#pragma unroll
      for (int e = 0; e < kPack; ++e) memory.partial[threadIdx.x * kPack + e] = sums[e];
      __syncthreads();
      if (threadIdx.x < H) {
        S value = 0;
        for (int i = 0; i < parts; ++i) value += memory.partial[i * packs * kPack + threadIdx.x];
        value += to_state(bt[threadIdx.x]);
        y[threadIdx.x] = value;
        if (write) out[t * p.out_t + threadIdx.x] = from_state<E>(value);
      }
    }
    slot = slot + 1 == p.stages ? 0 : slot + 1;
    S* const old = x;
    x = y;
    y = old;
  }
  copy_wait<0>();
  __syncthreads();
  if (x != memory.x[0]) {
    for (int i = threadIdx.x; i < H; i += kReplayThreads) memory.x[0][i] = memory.x[1][i];
    __syncthreads();
  }
}

// The state before step p.first, in memory.x[0]; both states are zero beyond H.
template <typename E>
__device__ void load_start(const Arguments& p, const ReplayMemory<E>& memory, int64_t row) {
  for (int i = threadIdx.x; i < p.padded; i += kReplayThreads) {
    State<E> value = 0;
    if (i < p.H) {
      value = to_state(p.x0 ? static_cast<const E*>(p.x0)[row * p.x0_b + i]
                            : static_cast<const E*>(p.b)[row * p.b_b + i]);
    }
    memory.x[0][i] = value;
    memory.x[1][i] = 0;
  }
}

// (3). Grid: (chunks, B) flattened, chunks fastest.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(kReplayThreads) replay_kernel(const Arguments p) {
  using S = State<E>;
  extern __shared__ __align__(16) unsigned char shared[];
  const ReplayMemory<E> memory(p, shared);
  const int64_t chunk = blockIdx.x % p.chunks, row = blockIdx.x / p.chunks;
  load_start(p, memory, row);
  if (chunk > 0) {
    const S* const start = chunk_start<S>(p, row, chunk);
    for (int i = threadIdx.x; i < p.H; i += kReplayThreads) memory.x[0][i] = start[i];
  } else if (!p.x0) {
    E* const out = static_cast<E*>(p.out) + row * p.out_b;
    const E* const b = static_cast<const E*>(p.b) + row * p.b_b;
    for (int i = threadIdx.x; i < p.H; i += kReplayThreads) out[i] = b[i];
  }
  const int64_t begin = p.first + chunk * p.length, end = min(begin + p.length, p.first + p.steps);
  replay<E, kPadded, kTransposed>(p, memory, row, begin, end, true);
}

// The largest value over the block, for all its threads. `scratch`: one value per warp.
template <typename V>
__device__ inline V block_max(V value, V* scratch) {
  for (int d = 16; d > 0; d /= 2) value = max(value, __shfl_xor_sync(~0u, value, d));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int w = 1; w < kReplayThreads / 32; ++w) value = max(value, scratch[w]);
  return value;
}

constexpr int kTotalsStages = 2;
constexpr int kScratchBytes = 3 * (kReplayThreads / 32) * sizeof(float);

template <typename E>
int totals_shared_bytes(const Arguments& p) {
  const int products = kTotalsStages * p.H * p.padded * int(sizeof(State<E>));
  return ReplayMemory<E>::fixed_bytes(p) + std::max(products, p.stages * ReplayMemory<E>::stage(p)) + kScratchBytes +
         2 * p.padded * int(sizeof(State<E>));
}

// (2). Grid: B.
template <typename E, int kPadded, bool kTransposed>
__global__ void __launch_bounds__(kReplayThreads) totals_kernel(const Arguments p, int shared_bytes) {
  using S = State<E>;
  using R = Range<S>;
  constexpr int kPack = Pack<S>::kSize;
  extern __shared__ __align__(16) unsigned char shared[];
  const ReplayMemory<E> memory(p, shared);
  S* const z = reinterpret_cast<S*>(shared + shared_bytes - kScratchBytes) - 2 * p.padded;
  S* const y = z + p.padded;
  int* const scratch_exponent = reinterpret_cast<int*>(shared + shared_bytes - kScratchBytes);
  float* const scratch_log = reinterpret_cast<float*>(scratch_exponent + kReplayThreads / 32);
  S* const partial = memory.partial;
  const int64_t row = blockIdx.x;
  const int H = p.H, i = threadIdx.x;
  const int packs = (H + kPack - 1) / kPack, parts = kReplayThreads / packs, pack = i % packs, part = i / packs;
  const int product_bytes = H * p.padded * int(sizeof(S));
  load_start(p, memory, row);
  S* const x = memory.x[0];

  auto issue = [&](int64_t chunk) {
    if (chunk < p.chunks - 1) {
      copy_flat(memory.ring + chunk % kTotalsStages * product_bytes, Totals<S>(p, row, chunk).product, product_bytes);
    }
    copy_commit();
  };
  issue(0);
  for (int64_t chunk = 0; chunk + 1 < p.chunks; ++chunk) {
    const Totals<S> totals(p, row, chunk);
    int shift = 0;
    float loss = -INFINITY;
    S offset = 0;
    if (i < H) {
      shift = totals.exponent[i];
      loss = totals.loss[i];
      offset = totals.offset[i];
    }
    const float growth = *totals.growth;
    copy_wait<0>();
    __syncthreads();
    issue(chunk + 1);

    // The largest term sets the unit in which the product is summed.
    const S mine = i < H ? x[i] : S(0);
    const bool scale = mine != S(0) && isfinite(mine);
    int unit = block_max(scale ? exponent(mine) + shift : INT_MIN, scratch_exponent);
    if (unit == INT_MIN) unit = 0;
    if (i < H) z[i] = scale ? scaled(mine, shift - unit) : mine;
    const bool came_finite = !__syncthreads_or(!isfinite(mine));

    S sums[kPack] = {};
    if (part < parts) {
      accumulate_columns<S, S>(reinterpret_cast<const S*>(memory.ring + chunk % kTotalsStages * product_bytes), p.padded,
                               H, z, part, parts, pack, sums);
    }
#pragma unroll
    for (int e = 0; e < kPack; ++e) partial[i * kPack + e] = sums[e];
    __syncthreads();
    S value = 0;
    if (i < H) {
      for (int k = 0; k < parts; ++k) value += partial[k * packs * kPack + i];
      value = scaled(value, unit) + offset;
      y[i] = value;
    }
    const float top = block_max(value != S(0) ? float(log2(magnitude(value))) : -INFINITY, scratch_log);
    // Negated, so that NaN asks for the redo.
    const bool harmless = mine == S(0) || loss == -INFINITY ||
                          loss + growth + R::kLossBound + float(log2(magnitude(mine))) <=
                              fmaxf(top + R::kTolerance, R::kTiniest + R::kTolerance);
    const bool redo = __syncthreads_or(!harmless || !isfinite(value)) && came_finite;
    if (redo) {
      copy_wait<0>();
      __syncthreads();
      const int64_t begin = p.first + chunk * p.length;
      replay<E, kPadded, kTransposed>(p, memory, row, begin, begin + p.length, false);
      issue(chunk + 1);
    } else if (i < H) {
      x[i] = value;
    }
    if (i < H) chunk_start<S>(p, row, chunk + 1)[i] = x[i];
  }
}

template <typename E, int kPadded, bool kTransposed>
void launch_padded(const Arguments& p, cudaStream_t stream) {
  if (p.chunks > 1) {
    if constexpr (!std::is_same_v<E, double>) {
      const int64_t blocks = p.batch * (p.chunks - 1) * p.splits;
      launch("linear_scan_middle products", products_kernel<E, kPadded, kTransposed>, dim3(unsigned(blocks)),
             dim3(32 * (kPadded / 16 / p.splits + 1)), product_shared_bytes<E, kPadded, kTransposed>(), stream, p);
    }
    const int bytes = totals_shared_bytes<E>(p);
    launch("linear_scan_middle totals", totals_kernel<E, kPadded, kTransposed>, dim3(unsigned(p.batch)),
           dim3(kReplayThreads), bytes, stream, p, bytes);
  }
  launch("linear_scan_middle replay", replay_kernel<E, kPadded, kTransposed>, dim3(unsigned(p.batch * p.chunks)),
         dim3(kReplayThreads), ReplayMemory<E>::bytes(p), stream, p);
}

template <typename E>
void launch_all(const Arguments& p, bool transposed, cudaStream_t stream) {
  auto with = [&](auto padded) {
    transposed ? launch_padded<E, padded(), true>(p, stream) : launch_padded<E, padded(), false>(p, stream);
  };
  if (p.padded == 64) {
    with(std::integral_constant<int, 64>());
  } else if (p.padded == 96) {
    with(std::integral_constant<int, 96>());
  } else {
    with(std::integral_constant<int, 128>());
  }
}

}  // namespace weft::scan::middle
