// Products of a persistent kernel with a matrix of which each block keeps some columns: rows @ matrix, by all threads
// of a block.
//
// The block's columns are the rows of tensor-core tiles, and up to 8 rows of the left factor their columns, so few rows
// cost as much as 8. The reduction is cut among the warps in chunks of 16, whose order inside may be any, if it is the
// same for both factors: so a lane takes four neighbours of a row at once, straight from L2, every element once per
// block, and weights lie in the order of fragments, without bank conflicts. The warps' partial sums are added up in
// shared memory in a fixed order. fp32 is three products of TF32, of fp32 accuracy; of up to four rows it is
// multiply-adds, because every use of a weight on the tensor cores splits it first. Half types go to the tensor cores
// as they are.
//
// Cost, of 8 rows: 6 mma of 2 clocks for each 16 x 16 weights, and more for the splits, 80 instructions of a warp in
// all. As multiply-adds a row takes 9.
#pragma once

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/cuda/ptx.jit.cuh"
#include "common/elementwise.jit.cuh"

namespace weft {

// Pairs (first, width): of each such range of columns the r-th of kBlocks blocks has those from first + r * units on.
template <int kBlocks, int... kNumbers>
struct DealtColumns {
  static constexpr int kRanges = sizeof...(kNumbers) / 2;
  static constexpr int units(int width) { return (width + kBlocks - 1) / kBlocks; }
  static constexpr int count() {
    const int numbers[] = {kNumbers...};
    int sum = 0;
    for (int i = 0; i < kRanges; ++i) sum += units(numbers[2 * i + 1]);
    return sum;
  }
  // The column of the matrix that is the block's `local`-th; -1 where it is none.
  static __device__ __forceinline__ int of(int local, int rank) {
    const int numbers[] = {kNumbers...};
    int found = -1;
#pragma unroll
    for (int i = 0; i < kRanges; ++i) {
      const int width = numbers[2 * i + 1], mine = units(width), in_range = rank * mine + local;
      if (local >= 0 && local < mine && in_range < width) found = numbers[2 * i] + in_range;
      local -= mine;
    }
    return found;
  }
};

template <typename E>
inline constexpr bool kIsFloat16 = false;
template <>
inline constexpr bool kIsFloat16<Float16> = true;

// How products are made: fp32 accuracy; as the tensor cores take floats; of half types, whose products are exact.
enum class Multiply { kFloat, kTf32, kHalf };

template <typename E>
struct alignas(4 * sizeof(E)) FourOf {
  E x[4];
};

// kPublished: rows of the left factor are waited for (common/cuda/words.jit.cuh); kInner is a multiple of four.
template <typename E, Multiply kMultiply, int kThreads, int kInner, typename Columns, bool kPublished = false>
struct ResidentProduct {
  static constexpr int kWarps = kThreads / 32, kColumns = Columns::count(), kTiles = (kColumns + 15) / 16;
  static constexpr int kChunks = (kInner + 15) / 16, kOfWarp = (kChunks + kWarps - 1) / kWarps;
  static constexpr int kActive = kChunks < kWarps ? kChunks : kWarps;       // warps that have chunks
  static constexpr int kMostGroups = kTiles == 1 ? 4 : kTiles < 8 ? 2 : 1;  // of 8 rows, at a time
  static constexpr int kWeightBytes = kChunks * kTiles * 256 * int(sizeof(E));
  // Partial sums are added up some tiles at a time; rows are in other banks each.
  static constexpr int kMostPartialBytes = 44 << 10;
  static constexpr int tiles_at_once(int groups) {
    const int found = (kMostPartialBytes / (kActive * groups * 32) - 4) / 16;
    return found < 1 ? 1 : found < kTiles ? found : kTiles;
  }
  static constexpr int partial_bytes(int groups) { return kActive * groups * 8 * (tiles_at_once(groups) * 16 + 4) * 4; }
  static constexpr int kPartialBytes = partial_bytes(1) > partial_bytes(kMostGroups) ? partial_bytes(1)
                                                                                     : partial_bytes(kMostGroups);

  // matrix[k][column] is at k * inner_stride + column * column_stride. Weights are seen after the block's next barrier.
  static __device__ __noinline__ void load(const E* matrix, long long inner_stride, long long column_stride, int rank,
                                           FourOf<E>* weights) {
    const bool fours = kInner % 4 == 0 && inner_stride == 1 && column_stride % 4 == 0 &&
                       reinterpret_cast<u64>(matrix) % (4 * sizeof(E)) == 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < kChunks * kTiles * 64; i += kThreads) {
      const int lane = i % 32, local = i / 64 % kTiles * 16 + i / 32 % 2 * 8 + lane / 4;
      const int k = i / (64 * kTiles) * 16 + 4 * (lane % 4), column = local < kColumns ? Columns::of(local, rank) : -1;
      FourOf<E> four;
      const E* from = matrix + k * inner_stride + column * column_stride;
      if (column >= 0 && fours && k < kInner) {
        four = *reinterpret_cast<const FourOf<E>*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          four.x[e] = column >= 0 && k + e < kInner ? from[e * inner_stride] : E(0.0f);
        }
      }
      if constexpr (kMultiply == Multiply::kTf32) {
#pragma unroll
        for (int e = 0; e < 4; ++e) four.x[e] = __uint_as_float(round_tf32(__float_as_uint(four.x[e])));
      }
      weights[i] = four;
    }
  }

  // Rows i = 0 to count - 1: source(i), 0 beyond, points to row i of the left factor, of kInner neighbouring elements
  // aligned to four where kInner is a multiple of four; store(i, local, column, sum) takes the sum of the block's
  // `local`-th column. Ends with a barrier of the block.
  template <typename Source, typename Store>
  static __device__ __forceinline__ void run(int count, int rank, const FourOf<E>* weights, float* partials,
                                             const Source& source, const Store& store) {
    int first = 0;
    if constexpr (kMostGroups > 1) {
      for (; count - first > 8; first += kMostGroups * 8) {
        some<kMostGroups>(first, count, rank, weights, partials, source, store, [] {});
      }
    }
    for (; first < count; first += 8) {
      few(first, count, rank, weights, partials, source, store, [] {});
    }
  }
  // The same of at most 8; between() is called when they have been asked for.
  template <typename Source, typename Store, typename Between>
  static __device__ __forceinline__ void run_few(int count, int rank, const FourOf<E>* weights, float* partials,
                                                 const Source& source, const Store& store, const Between& between) {
    few(0, count, rank, weights, partials, source, store, between);
  }

 private:
  static constexpr int kMostSums = 64;  // of a lane
  // Whether a tile has columns in this half.
  static constexpr bool has(int tile, int half) {
    return tile * 16 + half * 8 < kColumns;
  }

  // Up to 8 rows from `first` on.
  template <typename Source, typename Store, typename Between>
  static __device__ __forceinline__ void few(int first, int count, int rank, const FourOf<E>* weights, float* partials,
                                             const Source& source, const Store& store, const Between& between) {
    if constexpr (kMultiply == Multiply::kFloat && kInner % 4 == 0) {
      if constexpr (kTiles * 2 <= kMostSums) {
        if (count - first == 1) return multiply_add<1>(first, count, rank, weights, partials, source, store, between);
      }
      if constexpr (kTiles * 8 <= kMostSums) {
        if (count - first <= 4) return multiply_add<4>(first, count, rank, weights, partials, source, store, between);
      }
    }
    some<1>(first, count, rank, weights, partials, source, store, between);
  }

  // The same of at most kRows rows by multiply-adds. Four lanes share a column; each has four neighbours of a chunk.
  template <int kRows, typename Source, typename Store, typename Between>
  static __device__ __forceinline__ void multiply_add(int first, int count, int rank, const FourOf<E>* weights,
                                                      float* partials, const Source& source, const Store& store,
                                                      const Between& between) {
    constexpr int kBatch = kOfWarp < 12 / kRows ? kOfWarp : 12 / kRows;  // chunks that are loaded together
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = count - first;
    float d[kTiles][2][kRows] = {};
    const E* from[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) from[r] = r < rows ? source(first + r) : nullptr;
    for (int batch = 0; batch < kOfWarp; batch += kBatch) {
      FourOf<E> b[kBatch][kRows];
      read<kBatch, kRows>(batch, from, b, between);
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int chunk = warp + (batch + c) * kWarps;
        if (chunk >= kChunks) break;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (!has(tile, half)) continue;
            const FourOf<E> w = weights[(chunk * kTiles + tile) * 64 + half * 32 + lane];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
              for (int e = 0; e < 4; ++e) d[tile][half][r] = fmaf(w.x[e], b[c][r].x[e], d[tile][half][r]);
            }
          }
        }
      }
    }
    finish<1>(first, rows, rank, partials, store, [&](int begin, int end, int pitch) {
#pragma unroll
      for (int tile = begin; tile < end; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!has(tile, half)) continue;
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float sum = d[tile][half][r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const int column = (tile - begin) * 16 + half * 8 + lane / 4;
            if (lane % 4 == r) partials[(warp * 8 + r) * pitch + column] = sum;
          }
        }
      }
    });
  }

  // Neighbours of kGroups rows, of which the lane has some; zeros where there is no row. The first are asked for before
  // between(), and waited for after it.
  template <int kBatch, int kGroups, typename Between>
  static __device__ __forceinline__ void read(int batch, const E* const (&from)[kGroups],
                                              FourOf<E> (&b)[kBatch][kGroups], const Between& between) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool missing[kBatch][kGroups] = {};
#pragma unroll
    for (int c = 0; c < kBatch; ++c) {
      const int k = (warp + (batch + c) * kWarps) * 16 + lane % 4 * 4;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (kInner % 4 == 0 && from[g] != nullptr && k < kInner) {
          if constexpr (kPublished) {
            missing[c][g] = ask(from[g] + k, b[c][g]);
          } else {
            b[c][g] = *reinterpret_cast<const FourOf<E>*>(from[g] + k);
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            b[c][g].x[e] = kInner % 4 != 0 && from[g] != nullptr && k + e < kInner ? from[g][k + e] : E(0.0f);
          }
        }
      }
    }
    if (batch == 0) between();
    if constexpr (kPublished) {
      const auto any = [&] {
        bool found = false;
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) found |= missing[c][g];
        }
        return found;
      };
      // All that are missing at once: one after the other costs a round trip each.
      while (__any_sync(~0u, any())) {
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            const int k = (warp + (batch + c) * kWarps) * 16 + lane % 4 * 4;
            if (missing[c][g]) missing[c][g] = ask(from[g] + k, b[c][g]);
          }
        }
      }
    }
  }

  // Adds up what the warps have of `rows` rows, some tiles at a time: write(begin, end, pitch) puts what this one has
  // of tiles [begin, end) at partials[(warp * 8 * kGroups + row) * pitch + column].
  template <int kGroups, typename Store, typename Write>
  static __device__ __forceinline__ void finish(int first, int rows, int rank, float* partials, const Store& store,
                                                const Write& write) {
    constexpr int kAtOnce = tiles_at_once(kGroups), kPitch = kAtOnce * 16 + 4;
    constexpr int kChains = kActive % 4 == 0 ? 4 : 1;  // of additions
#pragma unroll
    for (int begin = 0; begin < kTiles; begin += kAtOnce) {
      const int end = begin + kAtOnce < kTiles ? begin + kAtOnce : kTiles;
      if (threadIdx.x / 32 < kActive) write(begin, end, kPitch);
      __syncthreads();
      const int columns = min(kAtOnce * 16, kColumns - begin * 16);
      for (int i = threadIdx.x; i < rows * columns; i += kThreads) {
        const int row = i / columns, local = begin * 16 + i % columns, column = Columns::of(local, rank);
        float sums[kChains] = {};
#pragma unroll
        for (int w = 0; w < kActive; ++w) {
          sums[w % kChains] += partials[(w * kGroups * 8 + row) * kPitch + i % columns];
        }
        float sum = sums[0];
        if constexpr (kChains == 4) sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (column >= 0) store(first + row, local, column, sum);
      }
      __syncthreads();
    }
  }

  static __device__ __forceinline__ bool ask(const E* from, FourOf<E>& to) {
    if constexpr (sizeof(E) == 2) {
      return load_published(reinterpret_cast<const unsigned short*>(from),
                            reinterpret_cast<unsigned short(&)[4]>(to.x));
    } else {
      return load_published(from, to.x);
    }
  }

  static __device__ __forceinline__ void split(float x, u32& high, u32& low) {
    if constexpr (kMultiply == Multiply::kFloat) {
      high = cut_tf32(__float_as_uint(x)), low = cut_off_tf32(__float_as_uint(x));
    } else {
      high = __float_as_uint(x), low = 0;
    }
  }

  // Two of four neighbours.
  static __device__ __forceinline__ u32 pair(const FourOf<E>& four, int which) {
    return u32(four.x[2 * which].bits) | u32(four.x[2 * which + 1].bits) << 16;
  }
  static __device__ __forceinline__ void mma_half(float (&d)[4], const u32* a, const u32* b) {
    if constexpr (kIsFloat16<E>) {
      mma_f16(d, a, b);
    } else {
      mma_bf16(d, a, b);
    }
  }

  // 8 * kGroups rows from `first` on.
  template <int kGroups, typename Source, typename Store, typename Between>
  static __device__ __forceinline__ void some(int first, int count, int rank, const FourOf<E>* weights, float* partials,
                                              const Source& source, const Store& store, const Between& between) {
    // Independent sums, or each product would wait for the one before.
    constexpr int kTerms = kMultiply == Multiply::kFloat ? 3 : 1, kSums = kTiles * kGroups == 1 ? 2 * kTerms : 1;
    constexpr int kBatch = kOfWarp < 8 / kGroups ? kOfWarp : 8 / kGroups;  // chunks that are loaded together
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = min(count - first, 8 * kGroups);
    float d[kTiles][kGroups][kSums][4] = {};
    const E* from[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int row = g * 8 + lane / 4;
      from[g] = row < rows ? source(first + row) : nullptr;
    }
    for (int batch = 0; batch < kOfWarp; batch += kBatch) {
      FourOf<E> b[kBatch][kGroups];
      read<kBatch, kGroups>(batch, from, b, between);
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int chunk = warp + (batch + c) * kWarps;
        if (chunk >= kChunks) break;
        u32 b_high[kGroups][4], b_low[kGroups][4];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if constexpr (kMultiply == Multiply::kHalf) {
            b_high[g][0] = pair(b[c][g], 0), b_high[g][1] = pair(b[c][g], 1);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) split(float(b[c][g].x[e]), b_high[g][e], b_low[g][e]);
          }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const FourOf<E> upper = weights[(chunk * kTiles + tile) * 64 + lane];
          FourOf<E> lower{};
          if (has(tile, 1)) lower = weights[(chunk * kTiles + tile) * 64 + 32 + lane];
          if constexpr (kMultiply == Multiply::kHalf) {
            const u32 a[4] = {pair(upper, 0), pair(lower, 0), pair(upper, 1), pair(lower, 1)};
#pragma unroll
            for (int g = 0; g < kGroups; ++g) mma_half(d[tile][g][c % kSums], a, b_high[g]);
            continue;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            u32 high[4], low[4];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              split(float(upper.x[2 * half + e]), high[2 * e], low[2 * e]);
              split(float(lower.x[2 * half + e]), high[2 * e + 1], low[2 * e + 1]);
            }
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
              float(&sums)[kSums][4] = d[tile][g];
              if constexpr (kTerms == 3) {
                mma_tf32(sums[(half * 3 + 1) % kSums], low, b_high[g] + 2 * half);
                mma_tf32(sums[(half * 3 + 2) % kSums], high, b_low[g] + 2 * half);
              }
              mma_tf32(sums[half * kTerms % kSums], high, b_high[g] + 2 * half);
            }
          }
        }
      }
    }
    finish<kGroups>(first, rows, rank, partials, store, [&](int begin, int end, int pitch) {
#pragma unroll
      for (int tile = begin; tile < end; ++tile) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float sum = 0.0f;
#pragma unroll
            for (int s = kSums; s > 0; --s) sum += d[tile][g][s - 1][i];
            const int row = g * 8 + lane % 4 * 2 + i % 2, column = (tile - begin) * 16 + i / 2 * 8 + lane / 4;
            partials[(warp * kGroups * 8 + row) * pitch + column] = sum;
          }
        }
      }
    });
  }
};

}  // namespace weft
