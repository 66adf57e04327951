// What the chunked scans share that hold a chunk's product in the registers of one block: block.cuh, which
// reads its matrices, and rnn/scan/cuda/scan_block.cuh, which forms them.
//
// A chunk of a linear recurrence is an affine map, x -> P x + v. In the kernel that makes the maps every worker warp
// owns 16 columns of P, transposed, in registers: the accumulator layout of mma is the layout of the left operand of
// the next step, and only the step's matrix goes through shared memory, as planes of bf16 numbers whose sum it is.
// carry_through_chunks then takes a state through the maps of all chunks.
//
// Every column of P carries an exponent, so that P neither overflows nor underflows where P x does not. A column that
// shrinks too much in one step has lost digits: its map says how much that can mean at the chunk's end, and
// carry_through_chunks has the chunk done again step by step where that is not negligible, where the result is not
// finite, or where terms that underflow beside the largest one may be all there is to an element of the result.
#pragma once
#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/cuda/ptx.jit.cuh"
#include "common/element.cuh"
#include "scan/linear/cuda/block_chunks.h"

namespace weft::scan::block {

// Columns are rescaled to [1, 2) where their largest magnitude leaves [kSmall, kLarge].
template <typename S>
struct Range;
template <>
struct Range<float> {
  static constexpr float kSmall = 0x1p-12f, kLarge = 0x1p12f;
  // Numbers below 2^-126 may be flushed to 0 (in A's low parts, before they meet a column of at most 2^12, in at most
  // 2^7 rows): an error of at most 2^kLossBound in units of the column. A column that stays above kLost has it below
  // half an ulp.
  static constexpr float kLost = 0x1p-78f, kLossBound = -107.f;
  static constexpr float kTolerance = -24.f, kTiniest = -126.f;  // log2: of the result's magnitude, and absolute
  // log2 of what rounding to subnormal numbers can do to a sum of 2^7 products of numbers up to 1 and up to 2^12.
  static constexpr int kSumBound = -130;
  static constexpr int kMaxShift = 120;
};
template <>
struct Range<double> {
  static constexpr double kSmall = 0x1p-12, kLarge = 0x1p12, kLost = 0x1p-940;
  static constexpr float kLossBound = -1003.f, kTolerance = -53.f, kTiniest = -1022.f;
  static constexpr int kSumBound = -1055;
  static constexpr int kMaxShift = 1000;
};

// 16 bytes of elements as they lie in memory.
template <typename E>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(E);
  E at[kSize];
};

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

// Contiguous memory, both ends 16-byte aligned.
__device__ inline void copy_flat(void* to, const void* from, int bytes) {
  for (int i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) {
    copy_async<16>(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
}

// Hopper's copy engine: one thread asks for a whole block, the barrier opens when its bytes have come. It may replace
// what threads have read before their bulk_release and a __syncthreads. Code for older devices, which newer ones may be
// given, has none of these and never calls them.
#if __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif
__device__ inline void bulk_release() {
  fence_copy_engine();
}
__device__ inline void bulk_init(uint64_t* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) mbarrier_init(shared_address(barriers + i));
    mbarrier_publish();
  }
  bulk_release();
}
__device__ inline void bulk_end(uint64_t* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) mbarrier_invalidate(shared_address(barriers + i));
  }
}
__device__ inline void bulk_copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  mbarrier_expect(shared_address(barrier), bytes);
  copy_bulk(shared_address(to), from, bytes, shared_address(barrier));
}
__device__ inline void bulk_wait(uint64_t* barrier, uint32_t parity) {
  mbarrier_wait(shared_address(barrier), parity);
}

__device__ inline void clear_shared(void* p, int bytes) {
  for (int i = 4 * threadIdx.x; i < bytes; i += 4 * blockDim.x) {
    *reinterpret_cast<uint32_t*>(static_cast<char*>(p) + i) = 0;
  }
}

__device__ inline float scaled(float x, int e) {
  return ldexpf(x, e);
}
__device__ inline double scaled(double x, int e) {
  return ldexp(x, e);
}
__device__ inline int exponent(float x) {
  return ilogbf(x);
}
__device__ inline int exponent(double x) {
  return ilogb(x);
}

// Where the map of one chunk lies, and the states at the chunks' starts.
template <typename S>
struct ChunkMap {
  S* product;  // by columns: P[i][j] at j * padded + i
  S* offset;
  int* exponent;
  float* loss;
  float* growth;
  __device__ ChunkMap(const Chunked& p, int64_t row, int64_t chunk) {
    product = static_cast<S*>(p.workspace) + (row * (p.chunks - 1) + chunk) * p.map_size();
    offset = product + p.padded * p.padded;
    exponent = reinterpret_cast<int*>(offset + p.padded);
    loss = reinterpret_cast<float*>(offset + 2 * p.padded);
    growth = reinterpret_cast<float*>(offset + 3 * p.padded);
  }
};

template <typename S>
__device__ inline S* chunk_start(const Chunked& p, int64_t row, int64_t chunk) {
  return static_cast<S*>(p.workspace) + p.batch * (p.chunks - 1) * p.map_size() +
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
// product of the norms of A so far: later norms bound what becomes of a loss. The last step leaves every column in [1,
// 2), so that its exponent is the order of the terms it contributes.
template <typename S>
__device__ inline S rescale(Column<S>& column, S top, bool first, bool last, float growth) {
  using R = Range<S>;
  if (column.zero || (!last && top >= R::kSmall && top <= R::kLarge) || isinf(top)) return S(1);
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

constexpr int kFeeders = 4;  // warps that feed A

__device__ inline void feeders_sync() {
  named_barrier<1, 32 * kFeeders>();
}

// Ends a step for feeders and workers.
__device__ inline void step_sync() {
  sync_from_anywhere<2>();
}

// The right operand A^T of four neighbouring 8-column tiles, from tile 4 * ng, and 16 rows, from 16 * kk.
template <int kPitch, bool kTransposed>
__device__ inline void load_fragments(const uint16_t* plane, int kk, int ng, int lane, uint32_t (&b)[4][2]) {
  const int matrix = lane / 8, row = lane % 8, k = 16 * kk + 8 * (matrix % 2), n = 32 * ng + 8 * (matrix / 2);
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint16_t* const from =
        kTransposed ? plane + (k + row) * kPitch + n + 8 * j : plane + (n + 8 * j + row) * kPitch + k;
    load_matrices<kTransposed>(shared_address(from), b[j][0], b[j][1], b[j + 1][0], b[j + 1][1]);
  }
}

// Q += left times 16 rows of the step's right operand: the warp's 16 columns of P, entries 16 kk and on, times the
// planes of A^T. `left` is used up. The sums over 16 k leave the tensor core, which truncates, and are added up in
// fp32.
template <int kPlanes, int kPlane, int kPitch, bool kTransposed, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&left)[2][4], const uint16_t* tile, int kk, int H, int lane,
                                              float (&Q)[kTiles][4]) {
  uint32_t part[3][4];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    part[i][0] = take_bf16(left[0][0], left[0][1]);
    part[i][1] = take_bf16(left[0][2], left[0][3]);
    part[i][2] = take_bf16(left[1][0], left[1][1]);
    part[i][3] = take_bf16(left[1][2], left[1][3]);
  }
#pragma unroll
  for (int ng = 0; ng < kTiles / 4; ++ng) {
    if (32 * ng >= H) continue;
    float sum[4][4] = {};
    // Small parts of A first, and of P within one part of A. Four accumulators in turn hide the latency of mma.
#pragma unroll
    for (int plane = kPlanes - 1; plane >= 0; --plane) {
      uint32_t f[4][2];
      load_fragments<kPitch, kTransposed>(tile + plane * kPlane, kk, ng, lane, f);
#pragma unroll
      for (int i = 2 - plane; i >= 0; --i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) mma_bf16(sum[j], part[i], f[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) Q[4 * ng + j][i] += sum[j][i];
    }
  }
}

// The two columns of P of which a lane holds a part, P[.][0..1] and P[.][2..3], after a step.
struct ColumnPair {
  Column<float> left, right;

  template <int kTiles>
  __device__ __forceinline__ void rescale_after_step(float (&P)[kTiles][4], bool first, bool last, float growth) {
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
    const float by_left = rescale(left, top_left, first, last, growth),
                by_right = rescale(right, top_right, first, last, growth);
    if (__any_sync(~0u, by_left != 1.f || by_right != 1.f)) {
#pragma unroll
      for (int q = 0; q < kTiles; ++q) {
        P[q][0] *= by_left;
        P[q][1] *= by_left;
        P[q][2] *= by_right;
        P[q][3] *= by_right;
      }
    }
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
    for (int i = 0; i < Pack<E>::kSize; ++i) sum[i] += to_acc(a.at[i]) * xk;
  }
}

// The largest value over the block, for all its threads. `scratch`: one value per warp.
__device__ inline int block_max(int value, int* scratch) {
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kReplayThreads / 32; ++w) value = max(value, scratch[w]);
  return value;
}

// What (2) orders by: above all where not finite, below all where 0.
template <typename S>
__device__ inline int order(S value, int shift) {
  return !isfinite(value) ? INT_MAX : value == S(0) ? INT_MIN : exponent(value) + shift;
}

constexpr int kCancellation = 4;  // log2 of how much larger than the result its terms may be

// Shared memory of carry_through_chunks for kReplayThreads threads.
template <typename S>
struct BoundariesMemory {
  S* x;                 // padded states; zero beyond H
  S* z;                 // padded
  S* partial;           // one pack of sums per thread
  unsigned char* ring;  // map_stages products of H columns, 16-byte aligned
  uint64_t* barriers;   // one per stage
  int* scratch;         // two values per warp
};

// Takes x through the maps of all chunks but the last, and stores it before each but the first. redo(chunk) replaces x
// by what the steps of the chunk make of it; the ring is its own in the meantime. kSelects: the steps may drop what is
// not finite, where P multiplies it by zero.
template <typename S, bool kSelects, typename Redo>
__device__ __forceinline__ void carry_through_chunks(const Chunked& p, int64_t row, const BoundariesMemory<S>& memory,
                                                     const Redo& redo_steps) {
  using R = Range<S>;
  constexpr int kPack = Pack<S>::kSize;
  const int H = p.H, i = threadIdx.x;
  const int packs = (H + kPack - 1) / kPack, parts = kReplayThreads / packs, pack = i % packs, part = i / packs;
  const int product_bytes = H * p.padded * int(sizeof(S));
  S* const x = memory.x;
  S* const z = memory.z;
  S* const partial = memory.partial;
  uint64_t* const barriers = memory.barriers;
  int* const scratch_unit = memory.scratch;
  int* const scratch_top = scratch_unit + kReplayThreads / 32;

  // Copies of products go round the ring. A redo overwrites those under way, which are asked for again.
  const int stages = p.map_stages, lead = stages - 1;
  int64_t repeated = 0;
  auto stage = [&](int64_t chunk) { return (chunk + repeated) % stages; };
  auto product = [&](int64_t chunk) { return memory.ring + stage(chunk) * product_bytes; };
  auto issue = [&](int64_t chunk) {
    if (chunk < p.chunks - 1) {
      const S* const from = ChunkMap<S>(p, row, chunk).product;
      if (!(kCopyEngine && p.copy_engine)) {
        copy_flat(product(chunk), from, product_bytes);
      } else if (i == 0) {
        bulk_copy(product(chunk), from, product_bytes, barriers + stage(chunk));
      }
    }
    copy_commit();
  };
  auto wait = [&](int64_t chunk) {
    if (kCopyEngine && p.copy_engine) bulk_wait(barriers + stage(chunk), (chunk + repeated) / stages % 2);
  };

  // What a thread needs of the next chunk comes while the chunk before it is applied.
  int next_shift = 0;
  float next_loss = -INFINITY, next_growth = 0;
  S next_offset = 0;
  auto fetch = [&](int64_t chunk) {
    if (chunk == p.chunks - 1) return;
    const ChunkMap<S> map(p, row, chunk);
    if (i < H) {
      next_shift = map.exponent[i];
      next_loss = map.loss[i];
      next_offset = map.offset[i];
    }
    next_growth = *map.growth;
  };
  fetch(0);
  if (kCopyEngine && p.copy_engine) bulk_init(barriers, stages);
  __syncthreads();
  for (int k = 0; k < lead; ++k) issue(k);
  for (int64_t chunk = 0; chunk + 1 < p.chunks; ++chunk) {
    const int shift = next_shift;
    const float loss = next_loss, growth = next_growth;
    const S offset = next_offset;
    fetch(chunk + 1);
    copy_wait_dynamic(lead - 1);
    if (kCopyEngine && p.copy_engine) bulk_release();
    __syncthreads();
    issue(chunk + lead);

    // The largest term sets the unit in which the product is summed.
    const S mine = i < H ? x[i] : S(0);
    const int rank = order(mine, shift);
    int unit = block_max(rank, scratch_unit);
    const bool came_finite = unit != INT_MAX;
    const int product_order = unit;
    if (!came_finite || unit == INT_MIN) unit = 0;
    if (i < H) z[i] = came_finite ? scaled(mine, shift - unit) : mine;
    wait(chunk);
    // Terms that the unit makes subnormal, which matter where nothing larger is added to them.
    const bool subnormal = __syncthreads_or(mine != S(0) && rank < unit + R::kSumBound + 30);

    S sums[kPack] = {};
    if (part < parts) {
      accumulate_columns<S, S>(reinterpret_cast<const S*>(product(chunk)), p.padded, H, z, part, parts, pack, sums);
    }
#pragma unroll
    for (int e = 0; e < kPack; ++e) partial[i * kPack + e] = sums[e];
    __syncthreads();
    S value = 0;
    if (i < H) {
#pragma unroll 8
      for (int k = 0; k < parts; ++k) value += partial[k * packs * kPack + i];
      value = scaled(value, unit) + offset;
    }
    const int size = order(value, 0), top = block_max(size, scratch_top);
    const bool kept = !subnormal || i >= H || float(unit + R::kSumBound) <= R::kTiniest + R::kTolerance ||
                      float(size) + R::kTolerance >= float(unit + R::kSumBound);
    // Terms that cancel so far that the error of P and v, relative to them, shows.
    const int terms = max(product_order, block_max(i < H ? order(offset, 0) : INT_MIN, scratch_unit));
    const bool cancels = terms != INT_MIN && terms - kCancellation > top;
    // Negated, so that NaN asks for the redo.
    const bool harmless =
        mine == S(0) || loss == -INFINITY ||
        loss + growth + R::kLossBound + float(exponent(mine) + 1) <= fmaxf(float(top), R::kTiniest) + R::kTolerance;
    const bool doubtful = __syncthreads_or(!harmless || !kept) || top == INT_MAX || cancels;
    const bool redo = came_finite ? doubtful : kSelects;
    if (redo) {
      for (int64_t k = chunk + 1; k <= chunk + lead && k < p.chunks - 1; ++k) wait(k);
      copy_wait<0>();
      __syncthreads();
      redo_steps(chunk);
      if (kCopyEngine && p.copy_engine) bulk_release();
      __syncthreads();
      repeated += lead;
      for (int k = 1; k <= lead; ++k) issue(chunk + k);
    } else if (i < H) {
      x[i] = value;
    }
    if (i < H) chunk_start<S>(p, row, chunk + 1)[i] = x[i];
  }
}

}  // namespace weft::scan::block
