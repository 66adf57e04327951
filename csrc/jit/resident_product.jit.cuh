// Products of a persistent kernel with a matrix of which each block keeps some columns: rows @ matrix, by all threads
// of a block.
//
// Weights lie in shared memory in the order of tensor-core fragments, without bank conflicts. The order inside a chunk
// of 16 of the reduction may be any, if it is the same for both factors: so a lane takes four neighbours of a row at
// once, straight from L2, every element once per block.
//
// Up to 8 rows are the columns of a tile, the block's columns its rows, and the reduction is cut among all warps. Of
// more, rows are the rows of a tile, 16 for each part of the warps, and the reduction is cut among the warps of a part,
// which ask for what comes next before they multiply. The warps' partial sums are added up in shared memory in a fixed
// order, as many numbers whatever the rows.
//
// fp32 is three products of TF32, of fp32 accuracy; of up to four rows it is multiply-adds, because every use of a
// weight on the tensor cores splits it first. Their lanes share columns as far as registers go for the sums, so that
// four neighbours of a row are read by few lanes, and then hand each other halves of their sums. Half types go to the
// tensor cores as they are. What comes out as NaN is summed up again, one by one, because an infinity is one that way.
//
// Of few rows a warp has the first of its weights in registers before its rows are there. Where products of few rows
// follow each other it keeps them, split, and three or four rows go to the tensor cores, too: each takes a lane one
// load and a few instructions instead of four and the exchange of sums.
//
// Cost: 6 mma of 2 clocks of a multiprocessor for each 16 x 16 weights and 8 rows, and more for the splits below 16
// rows, 60 instructions of a warp in all. As multiply-adds a row takes 9.
#pragma once

#include "common/cuda/grid_barrier.jit.cuh"
#include "common/cuda/ptx.jit.cuh"
#include "common/elementwise.jit.cuh"
#include "jit/dealt_columns.jit.cuh"
#include "jit/four_elements.jit.cuh"
#include "jit/resident_sizes.jit.cuh"

namespace weft {

// kPublished: rows of the left factor are waited for (common/cuda/words.jit.cuh); kInner is a multiple of four.
template <typename E, Multiply kMultiply, int kThreads, int kInner, typename Columns, bool kPublished = false>
struct ResidentProduct {
  static constexpr int kWarps = kThreads / 32, kColumns = Columns::count(), kTiles = (kColumns + 15) / 16;
  static constexpr ResidentSizes kSizes{kInner, kColumns, kWarps, int(sizeof(E))};
  static constexpr int kChunks = kSizes.chunks, kOfWarp = (kChunks + kWarps - 1) / kWarps, kActive = kSizes.active;
  static constexpr int kPartRows = ResidentSizes::kPartRows, kEighths = kSizes.eighths, kMostParts = kSizes.most_parts;
  static constexpr int kAtOnce = kSizes.at_once, kManyAtOnce = kSizes.many_at_once;
  static constexpr int kPartialBytes = kSizes.partial_bytes;

  // matrix[k][column] is at k * inner_stride + column * column_stride. Weights are seen after the thread's copies are
  // there, and then a barrier of the block.
  static __device__ __noinline__ void load(const E* matrix, long long inner_stride, long long column_stride, int rank,
                                           FourOf<E>* weights) {
    const bool fours = by_fours(matrix, inner_stride, column_stride);
#pragma unroll 4
    for (int i = threadIdx.x; i < kChunks * kEighths * 32; i += kThreads) {
      const int lane = i % 32, eighth = i / 32 % kEighths, chunk = i / (32 * kEighths);
      const int k = chunk * 16 + 4 * (lane % 4), column = column_of(eighth, lane, rank);
      FourOf<E>* const to = weights + place(chunk, eighth) + lane;
      const E* const from = matrix + k * inner_stride + column * column_stride;
      if constexpr (kMultiply == Multiply::kFloat) {
        if (column >= 0 && k + 4 <= kInner) {
          copy_four(from, inner_stride, fours, *to);
          continue;
        }
      }
      *to = as_multiplied<kMultiply>(four_at(from, inner_stride, fours, column < 0 ? 0 : kInner - k));
    }
    copy_commit();
  }

  // Rows i = 0 to count - 1: source(i), 0 beyond, points to row i of the left factor, of kInner neighbouring elements
  // aligned to four where kInner is a multiple of four; store(i, local, column, sum) takes the sum of the block's
  // `local`-th column. Ends with a barrier of the block.
  template <typename Source, typename Store>
  static __device__ __forceinline__ void run(int count, int rank, const FourOf<E>* weights, float* partials,
                                             const Source& source, const Store& store) {
    for (int first = 0; first < count;) {
      first += some(
          first, count, rank, weights, partials, source, store, [] {}, [] {});
    }
  }
  // The same; ask() is called when the first rows have been asked for, meanwhile() after it, before they are all there.
  template <typename Source, typename Store, typename Ask, typename Meanwhile>
  static __device__ __forceinline__ void run_between(int count, int rank, const FourOf<E>* weights, float* partials,
                                                     const Source& source, const Store& store, const Ask& ask,
                                                     const Meanwhile& meanwhile) {
    const int done = some(0, count, rank, weights, partials, source, store, ask, meanwhile);
    if constexpr (kMostParts == 0) {
      for (int first = done; first < count;) {
        first += some(
            first, count, rank, weights, partials, source, store, [] {}, [] {});
      }
    }
  }

  // Products of few rows, one after the other, of which each has one barrier of the block alone: the partial sums of
  // one lie beside those of the one before. The lanes that add up a row are neighbours, kRowLanes apart from those of
  // the next row, so that of up to 32 a row has a warp's.
  static constexpr int row_lanes() {
    if (kColumns > 32) return kColumns;
    int found = 1;
    while (found < kColumns) found *= 2;
    return found;
  }
  static constexpr int kRowLanes = row_lanes(), kRepeatedPitch = kEighths * 8 + 4;

  template <typename Sums>
  struct Repeated {
    static constexpr int kOwn = Sums::kTerms * Sums::kRows * kRepeatedPitch;  // partial sums
    static constexpr bool kFits = Sums::kRows * kRowLanes <= kThreads && 2 * kOwn * 4 <= kPartialBytes;
    Sums sums;
    const int rank;
    int turn = 0, row, local, column;

    __device__ __forceinline__ Repeated(int of, const FourOf<E>* weights)
        : sums{weights}, rank(of), row(threadIdx.x / kRowLanes), local(threadIdx.x % kRowLanes) {
      column = local < kColumns ? Columns::of(local, rank) : -1;
      pin(row), pin(local), pin(column);
      sums.hold();
    }
    // Of so many rows.
    static __device__ __forceinline__ bool takes(int count) {
      return count >= Sums::kLeastRows && count <= Sums::kRows;
    }

    // As run_between(), of rows 0 to rows - 1.
    template <typename Source, typename Store, typename Ask, typename Meanwhile>
    __device__ __forceinline__ void run(int rows, float* partials, const Source& source, const Store& store,
                                        const Ask& ask, const Meanwhile& meanwhile) {
      float* const own = partials + turn * kOwn;
      turn ^= 1;
      sums.multiply(0, rows, source, ask, meanwhile);
      sums.write(own, 0, kColumns, Sums::kRows, kRepeatedPitch);
      __syncthreads();
      if (row >= rows || column < 0) return;
      float sum = sum_of<Sums::kTerms, Sums::kRows * kRepeatedPitch>(own + row * kRepeatedPitch + local);
      if constexpr (Sums::kAgain && kMultiply == Multiply::kFloat) {
        if (sum != sum) sum = one_by_one(source(row), sums.weights, local);
      }
      store(row, local, column, sum);
    }
  };

  // with(product) for the one that takes so many rows; false where none does.
  template <typename With>
  static __device__ __forceinline__ bool repeated(int count, int rank, const FourOf<E>* weights, const With& with) {
    if constexpr (kByMultiplyAdds) {
      return repeated_by<MultiplyAdds<1, kOfMany>>(count, rank, weights, with) ||
             repeated_by<MultiplyAdds<2, kOfMany>>(count, rank, weights, with) ||
             repeated_by<Tiles<3, 4>>(count, rank, weights, with) ||
             repeated_by<Tiles<5, 8>>(count, rank, weights, with);
    } else if constexpr (kEighths == 1) {
      return repeated_by<Tiles<1, 4>>(count, rank, weights, with) ||
             repeated_by<Tiles<5, 8>>(count, rank, weights, with);
    } else {
      return repeated_by<Tiles<1, 8>>(count, rank, weights, with);
    }
  }

 private:
  template <typename Sums, typename With>
  static __device__ __forceinline__ bool repeated_by(int count, int rank, const FourOf<E>* weights, const With& with) {
    if constexpr (Repeated<Sums>::kFits) {
      if (Repeated<Sums>::takes(count)) {
        with(Repeated<Sums>(rank, weights));
        return true;
      }
    }
    return false;
  }

  static constexpr int kMostSums = 64;  // of a lane
  // Whether a tile has columns in this half.
  static constexpr bool has(int tile, int half) {
    return tile * 16 + half * 8 < kColumns;
  }

  static __device__ __forceinline__ int column_of(int eighth, int lane, int rank) {
    const int local = eighth * 8 + lane / 4;
    return local < kColumns ? Columns::of(local, rank) : -1;
  }
  // Whether neighbours of the reduction are, four at a time, in memory, too.
  static __device__ __forceinline__ bool by_fours(const E* matrix, long long inner_stride, long long column_stride) {
    return kInner % 4 == 0 && inner_stride == 1 && column_stride % 4 == 0 &&
           reinterpret_cast<u64>(matrix) % (4 * sizeof(E)) == 0;
  }
  // Where the lanes' parts of 8 columns are.
  static __device__ __forceinline__ int place(int chunk, int eighth) {
    return (chunk * kEighths + eighth) * 32;
  }

  // The first of kAll fours of weights that a lane multiplies, as far as registers go beside `kOthers`: they are read
  // while its rows are under way, or before the first of many products. at(i) reads the i-th.
  template <int kAll, int kRegisters, int kOthers>
  struct Held {
    static constexpr int kRoom = (kRegisters - kOthers) / int(sizeof(E));
    static constexpr int kCount = kRoom < 0 ? 0 : kRoom < kAll ? kRoom : kAll;
    FourOf<E> of[kCount > 0 ? kCount : 1];

    template <typename At>
    __device__ __forceinline__ void read(const At& at) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) of[i] = at(i);
    }
    template <typename At>
    __device__ __forceinline__ FourOf<E> take(const At& at, int i) const {
      if (i < kCount) return of[i];
      return at(i);
    }
  };

  // Some of the rows from `first` on, all where they are few enough. How many that may be.
  template <typename Source, typename Store, typename Ask, typename Meanwhile>
  static __device__ __forceinline__ int some(int first, int count, int rank, const FourOf<E>* weights, float* partials,
                                             const Source& source, const Store& store, const Ask& ask,
                                             const Meanwhile& meanwhile) {
    const int left = count - first;
    if constexpr (kMostParts > 0) {
      if (left > 8) {
        const int parts = left > 3 * kPartRows ? 4 : left > kPartRows ? 2 : 1;
        many(first, count, parts, rank, weights, partials, source, store, ask, meanwhile);
        return parts * kPartRows;
      }
    }
    few(first, count, rank, weights, partials, source, store, ask, meanwhile);
    return 8;
  }

  static constexpr bool kByMultiplyAdds = kMultiply == Multiply::kFloat && kInner % 4 == 0 && kTiles * 8 <= kMostSums;

  // Up to 8 rows from `first` on.
  template <typename Source, typename Store, typename Ask, typename Meanwhile>
  static __device__ __forceinline__ void few(int first, int count, int rank, const FourOf<E>* weights, float* partials,
                                             const Source& source, const Store& store, const Ask& ask,
                                             const Meanwhile& meanwhile) {
    const auto once = [&](auto sums) {
      const Own<kAtOnce> own(rank);
      const int rows = min(count - first, sums.kRows);
      sums.multiply(
          first, rows, source,
          [&] {
            sums.hold();
            ask();
          },
          meanwhile);
      finish<kAtOnce, sums.kAgain>(own, first, rows, 8, sums.kTerms, rank, weights, partials, source, store,
                                   [&](int begin, int end) { sums.write(partials, begin, end, 8, kAtOnce + 4); });
    };
    if constexpr (kMultiply == Multiply::kFloat && kInner % 4 == 0) {
      if constexpr (kTiles * 2 <= kMostSums) {
        if (count - first == 1) return once(MultiplyAdds<1, kOfOne>{weights});
      }
      if constexpr (kTiles * 4 <= kMostSums) {
        if (count - first == 2) return once(MultiplyAdds<2, kOfOne>{weights});
      }
      if constexpr (kByMultiplyAdds) {
        if (count - first <= 4) return once(MultiplyAdds<4, kOfOne>{weights});
      }
    }
    once(Eight{weights});
  }

  // How multiply-adds of so many rows are dealt: a warp has kOfWarp neighbouring fours of the reduction, kSpan lanes
  // have a four each and share columns, so that a four of a row goes to few lanes; of the columns a lane has every
  // kSets-th.
  template <int kRows>
  struct Dealt {
    static constexpr int kFours = kInner / 4, kLeast = (kFours + kWarps - 1) / kWarps;
    static constexpr int kOfWarp = kLeast < 4 ? 4 : kLeast, kActive = (kFours + kOfWarp - 1) / kOfWarp;
    static constexpr int each(int span) { return (kColumns * span + 31) / 32; }
    static constexpr int span() {
      constexpr int kMostSums = 24;
      int found = 4;
      // Of many columns the lanes' weights would lie in the same banks.
      while (kColumns <= 10 && found < 32 && found < kOfWarp && each(2 * found) * kRows <= kMostSums) found *= 2;
      return found;
    }
    static constexpr int kSpan = span(), kSets = 32 / kSpan, kEach = each(kSpan);
    static constexpr int kRounds = (kOfWarp + kSpan - 1) / kSpan;
    static constexpr bool kWhole = kFours == kOfWarp * kWarps && kOfWarp % kSpan == 0;  // every lane has one each time
    // The lane's four in a round; -1 where it has none.
    static __device__ __forceinline__ int four(int round) {
      const int of_warp = round * kSpan + threadIdx.x % kSpan, found = threadIdx.x / 32 * kOfWarp + of_warp;
      if (kWhole) return found;
      const bool is =
          ((round + 1) * kSpan <= kOfWarp || of_warp < kOfWarp) && (kFours == kOfWarp * kWarps || found < kFours);
      return is ? found : -1;
    }
    static __device__ __forceinline__ int column(int i) { return i * kSets + threadIdx.x % 32 / kSpan; }

    // Sums over the lanes of a span, which share them: what is left of `sums` in this lane, and which they were.
    static constexpr int kSums = kEach * kRows;
    static constexpr int left(int steps) { return (kSums + (1 << steps) - 1) >> steps; }
    static constexpr int log2(int x) { return x <= 1 ? 0 : 1 + log2((x + 1) / 2); }
    static constexpr int kSteps = log2(kSpan), kHalved = log2(kSums) < kSteps ? log2(kSums) : kSteps;
    static constexpr int kLeft = left(kHalved);
    template <int kStep = 0>
    static __device__ __forceinline__ void add_up(float (&sums)[kSums]) {
      if constexpr (kStep < kHalved) {
        const bool odd = (threadIdx.x >> kStep) & 1;
#pragma unroll
        for (int i = 0; i < left(kStep + 1); ++i) {
          const float even = sums[2 * i], other = 2 * i + 1 < left(kStep) ? sums[2 * i + 1] : 0.0f;
          sums[i] = (odd ? other : even) + __shfl_xor_sync(~0u, odd ? even : other, 1 << kStep);
        }
      } else if constexpr (kStep < kSteps) {
        sums[0] += __shfl_xor_sync(~0u, sums[0], 1 << kStep);
      }
      if constexpr (kStep < kSteps) add_up<kStep + 1>(sums);
    }
    // -1 of those that are none, or another lane's, too.
    static __device__ __forceinline__ int which(int i) {
      const int in_span = threadIdx.x % kSpan, found = (i << kHalved) + in_span % (1 << kHalved);
      return found < kSums && in_span >> kHalved == 0 ? found : -1;
    }
  };

  // Registers for weights and what is multiplied by them: of one product, and of many.
  static constexpr int kOfOne = 24, kOfMany = 56;

  // The sums of at most kMostRows rows that a warp has by multiply-adds.
  template <int kMostRows, int kRegisters>
  struct MultiplyAdds {
    using D = Dealt<kMostRows>;
    static constexpr int kLeastRows = kMostRows == 4 ? 3 : kMostRows, kRows = kMostRows, kTerms = D::kActive;
    static constexpr int kBatch = D::kRounds < 12 / kRows ? D::kRounds : 12 / kRows;  // that are loaded together
    static constexpr int kHeld = (kRegisters == kOfOne ? kBatch : D::kRounds) * D::kEach;
    static constexpr bool kAgain = false;
    const FourOf<E>* const weights;
    Held<kHeld, kRegisters, (kBatch * 4 + D::kEach) * kRows> held;
    float sums[D::kSums];

    __device__ __forceinline__ FourOf<E> at(int i) const {
      const int four = max(0, D::four(i / D::kEach)), column = D::column(i % D::kEach);
      return weights[place(four / 4, column / 8) + column % 8 * 4 + four % 4];
    }
    __device__ __forceinline__ void hold() {
      held.read([&](int i) { return at(i); });
    }
    template <typename Source, typename Ask, typename Meanwhile>
    __device__ __forceinline__ void multiply(int first, int rows, const Source& source, const Ask& ask,
                                             const Meanwhile& meanwhile) {
#pragma unroll
      for (int i = 0; i < D::kSums; ++i) sums[i] = 0.0f;
      const E* from[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) from[r] = source(first + min(r, rows - 1));
#pragma unroll
      for (int batch = 0; batch < D::kRounds; batch += kBatch) {
        FourOf<E> b[kBatch][kRows];
        const auto k = [&](int c) {
          const int four = D::four(batch + c);
          return four < 0 ? kInner : four * 4;
        };
        read<kRegisters == kOfMany, D::kWhole && D::kRounds % kBatch == 0>(batch == 0, k, from, b, ask, meanwhile);
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
          if (batch + c >= D::kRounds || D::four(batch + c) < 0) continue;
#pragma unroll
          for (int n = 0; n < D::kEach; ++n) {
            const FourOf<E> w = held.take([&](int i) { return at(i); }, (batch + c) * D::kEach + n);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                float& sum = sums[n * kRows + r];
                sum = fmaf(w.x[e], b[c][r].x[e], sum);
              }
            }
          }
        }
      }
      D::add_up(sums);
    }
    // Those of columns [begin, end), from partials[(term * apart + row) * pitch] on.
    __device__ __forceinline__ void write(float* partials, int begin, int end, int apart, int pitch) const {
      const int warp = threadIdx.x / 32;
      if (D::kActive < kWarps && warp >= D::kActive) return;
#pragma unroll
      for (int i = 0; i < D::kLeft; ++i) {
        const int found = D::which(i), column = D::column(found / kRows);
        if (found < 0 || column < begin || column >= end) continue;
        partials[(warp * apart + found % kRows) * pitch + column - begin] = sums[i];
      }
    }
  };

  // Neighbours of kGroups rows from where(0), where(1), ... on; zeros beyond kInner, where nothing is with kWhole. Of
  // one product the first are asked for before ask(), and waited for after it; meanwhile() takes place when they are
  // asked for once more, or else at once. Of many ask() comes before: until then what a block waits for is not all
  // there.
  template <bool kMany, bool kWhole, int kBatch, int kGroups, typename Where, typename Ask, typename Meanwhile>
  static __device__ __forceinline__ void read(bool is_first, const Where& where, const E* const (&from)[kGroups],
                                              FourOf<E> (&b)[kBatch][kGroups], const Ask& ask,
                                              const Meanwhile& meanwhile) {
    if (kMany && is_first) ask();
#pragma unroll
    for (int c = 0; c < kBatch; ++c) {
      const int k = where(c);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (kWhole || (kInner % 4 == 0 && k < kInner)) {
          if constexpr (kPublished) {
            ask_published(from[g] + k, b[c][g]);
          } else {
            b[c][g] = *reinterpret_cast<const FourOf<E>*>(from[g] + k);
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            b[c][g].x[e] = kInner % 4 != 0 && k + e < kInner ? from[g][k + e] : E(0.0f);
          }
        }
      }
    }
    if (!kMany && is_first) ask();
    if constexpr (kPublished) {
      const auto any = [&] {
        bool found = false;
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) found |= is_missing(b[c][g]);
        }
        return found;
      };
      // All that are missing at once: one after the other costs a round trip each.
      const auto again = [&] {
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
#pragma unroll
          for (int g = 0; g < kGroups; ++g) {
            if (is_missing(b[c][g])) ask_published(from[g] + where(c), b[c][g]);
          }
        }
      };
      if (is_first) {
        if (!kMany) again();
        meanwhile();
      }
      while (__any_sync(~0u, any())) again();
    } else {
      if (is_first) meanwhile();
    }
  }

  // Which of the first columns that finish() adds up at once is the thread's: worked out before the rows are there, for
  // nothing hides it after.
  template <int kColumnsAtOnce>
  struct Own {
    static constexpr int kWidth = kColumns < kColumnsAtOnce ? kColumns : kColumnsAtOnce;
    int row, local, column;
    __device__ __forceinline__ explicit Own(int rank)
        : row(threadIdx.x / kWidth), local(threadIdx.x % kWidth), column(Columns::of(local, rank)) {
      pin(row), pin(local), pin(column);
    }
  };

  // Of partial sums so far apart, in chains of additions that do not wait for each other.
  static __device__ __forceinline__ float sum_of(const float* of, int terms, int apart) {
    constexpr int kChains = 4;
    float sums[kChains] = {};
    int term = 0;
    for (; term + kChains <= terms; term += kChains) {
#pragma unroll
      for (int chain = 0; chain < kChains; ++chain) sums[chain] += of[(term + chain) * apart];
    }
    for (; term < terms; ++term) sums[0] += of[term * apart];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  template <int kTerms, int kApart>
  static __device__ __forceinline__ float sum_of(const float* of) {
    float terms[kTerms];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) terms[i] = of[i * kApart];
    constexpr int kChains = 4;
    float sums[kChains] = {};
#pragma unroll
    for (int i = 0; i < kTerms; ++i) sums[i < kTerms / kChains * kChains ? i % kChains : 0] += terms[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  // Adds up `terms` partial sums of `rows` rows, kColumnsAtOnce at a time: write(begin, end) puts those of columns
  // [begin, end) that this warp has at partials[(term * apart + row) * (kColumnsAtOnce + 4) + column - begin].
  template <int kColumnsAtOnce, bool kAgain, typename Source, typename Store, typename Write>
  static __device__ __forceinline__ void finish(const Own<kColumnsAtOnce>& own, int first, int rows, int apart,
                                                int terms, int rank, const FourOf<E>* weights, float* partials,
                                                const Source& source, const Store& store, const Write& write) {
    constexpr int kPitch = kColumnsAtOnce + 4;
    const auto add = [&](int row, int local, int column, const float* of) {
      float sum = sum_of(of, terms, apart * kPitch);
      if constexpr (kAgain && kMultiply == Multiply::kFloat) {
        if (sum != sum && column >= 0) sum = one_by_one(source(first + row), weights, local);
      }
      if (column >= 0) store(first + row, local, column, sum);
    };
#pragma unroll
    for (int begin = 0; begin < kColumns; begin += kColumnsAtOnce) {
      const int columns = kColumns - begin < kColumnsAtOnce ? kColumns - begin : kColumnsAtOnce;
      write(begin, begin + columns);
      __syncthreads();
      int i = threadIdx.x;
      if (begin == 0) {
        if (own.row < rows) add(own.row, own.local, own.column, partials + own.row * kPitch + own.local);
        i += kThreads;
      }
      for (; i < rows * columns; i += kThreads) {
        const int row = i / columns, local = begin + i % columns;
        add(row, local, Columns::of(local, rank), partials + row * kPitch + i % columns);
      }
      __syncthreads();
    }
  }

  // Of a row, which is there, and the block's `local`-th column.
  static __device__ __noinline__ float one_by_one(const E* row, const FourOf<E>* weights, int local) {
    float sum = 0.0f;
    for (int k = 0; k < kInner; k += 4) {
      const int lane = local % 8 * 4 + k % 16 / 4;
      const FourOf<E> w = weights[place(k / 16, local / 8) + lane];
      FourOf<E> x{};
      if constexpr (kPublished) {
        ask_published(row + k, x);
      } else {
        for (int e = 0; e < 4 && k + e < kInner; ++e) x.x[e] = row[k + e];
      }
      for (int e = 0; e < 4; ++e) sum = fmaf(float(w.x[e]), float(x.x[e]), sum);
    }
    return sum;
  }

  // The sums of at most 8 rows that a warp has by tensor cores.
  struct Eight {
    // Independent sums, or each product would wait for the one before.
    static constexpr int kProducts = kMultiply == Multiply::kFloat ? 3 : 1, kSums = kTiles == 1 ? 2 * kProducts : 1;
    static constexpr int kBatch = kOfWarp < 8 ? kOfWarp : 8;  // chunks that are loaded together
    static constexpr int kRows = 8, kTerms = kActive;
    static constexpr bool kWhole = kInner == kOfWarp * kWarps * 16, kAgain = true;
    const FourOf<E>* const weights;
    Held<kBatch * kEighths, kOfOne, kBatch* int(sizeof(E)) + kTiles * kSums * 4 + 24> held;
    float d[kTiles][kSums][4];

    __device__ __forceinline__ FourOf<E> at(int i) const {
      const int chunk = threadIdx.x / 32 + i / kEighths * kWarps;
      return weights[place(kChunks % kWarps == 0 ? chunk : min(chunk, kChunks - 1), i % kEighths) + threadIdx.x % 32];
    }
    __device__ __forceinline__ void hold() {
      held.read([&](int i) { return at(i); });
    }
    template <typename Source, typename Ask, typename Meanwhile>
    __device__ __forceinline__ void multiply(int first, int rows, const Source& source, const Ask& ask,
                                             const Meanwhile& meanwhile) {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const auto weight = [&](int i) { return held.take([&](int j) { return at(j); }, i); };
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) d[tile][s][i] = 0.0f;
        }
      }
      const E* const from[1] = {source(first + min(lane / 4, rows - 1))};
#pragma unroll
      for (int batch = 0; batch < kOfWarp; batch += kBatch) {
        FourOf<E> b[kBatch][1];
        const auto k = [&](int c) { return (warp + (batch + c) * kWarps) * 16 + lane % 4 * 4; };
        read<false, kWhole && kOfWarp % kBatch == 0>(batch == 0, k, from, b, ask, meanwhile);
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
          if (!kWhole && warp + (batch + c) * kWarps >= kChunks) break;
          u32 b_high[4], b_low[4];
          if constexpr (kMultiply == Multiply::kHalf) {
            b_high[0] = pair_of(b[c][0], 0), b_high[1] = pair_of(b[c][0], 1);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) split<kMultiply>(float(b[c][0].x[e]), b_high[e], b_low[e]);
          }
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            float(&sums)[kSums][4] = d[tile];
            const FourOf<E> upper = weight((batch + c) * kEighths + tile * 2);
            FourOf<E> lower{};
            if (has(tile, 1)) lower = weight((batch + c) * kEighths + tile * 2 + 1);
            if constexpr (kMultiply == Multiply::kHalf) {
              const u32 a[4] = {pair_of(upper, 0), pair_of(lower, 0), pair_of(upper, 1), pair_of(lower, 1)};
              mma_half<E>(sums[c % kSums], a, b_high);
              continue;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              u32 high[4], low[4];
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                split_apart<kMultiply>(float(upper.x[2 * half + e]), high[2 * e], low[2 * e]);
                split_apart<kMultiply>(float(lower.x[2 * half + e]), high[2 * e + 1], low[2 * e + 1]);
              }
              if constexpr (kProducts == 3) {
                mma_tf32(sums[(half * 3 + 1) % kSums], low, b_high + 2 * half);
                mma_tf32(sums[(half * 3 + 2) % kSums], high, b_low + 2 * half);
              }
              mma_tf32(sums[half * kProducts % kSums], high, b_high + 2 * half);
            }
          }
        }
      }
    }
    // Those of columns [begin, end), from partials[(term * apart + row) * pitch] on.
    __device__ __forceinline__ void write(float* partials, int begin, int end, int apart, int pitch) const {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (kActive < kWarps && warp >= kActive) return;
#pragma unroll
      for (int tile = begin / 16; tile * 16 < end; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float sum = 0.0f;
#pragma unroll
          for (int s = kSums; s > 0; --s) sum += d[tile][s - 1][i];
          const int row = lane % 4 * 2 + i % 2, column = tile * 16 - begin + i / 2 * 8 + lane / 4;
          if (has(tile, i / 2)) partials[(warp * apart + row) * pitch + column] = sum;
        }
      }
    }
  };

  // The sums of kLeast to kRows rows that a warp has by tensor cores, one product after the other: what weights it has
  // of a step, two halves of a chunk of 16, are put before the tensor cores once, as far as registers go. Of up to 8
  // columns and 4 rows a tile has two chunks: the columns once more, and the rows, of which each is multiplied by both,
  // and the sums of a chunk by its own are taken.
  template <int kLeast, int kMostRows>
  struct Tiles {
    static constexpr bool kTwice = kEighths == 1 && kMostRows <= 4, kAgain = true;
    static constexpr int kLeastRows = kLeast, kRows = kMostRows, kTerms = kActive, kOfStep = kTwice ? 2 : 1;
    static constexpr int kSteps = (kChunks + kOfStep * kWarps - 1) / (kOfStep * kWarps);
    static constexpr int kBatch = kSteps < 4 ? kSteps : 4;  // steps that are loaded together
    static constexpr bool kWhole = kInner == kSteps * kOfStep * kWarps * 16;
    static constexpr int kParts = kMultiply == Multiply::kFloat ? 2 : 1;  // of a weight
    static constexpr int kHalves = kMultiply == Multiply::kHalf ? 1 : 2;  // instructions of a step
    static constexpr int kSums = kTiles == 1 ? kParts : 1, kOfTile = 4 * kParts * kHalves, kMost = 40;
    static constexpr int kAll = kSteps * kTiles, kKept = kAll * kOfTile <= kMost ? kAll : kMost / kOfTile;
    struct Fragment {
      u32 of[kHalves][kParts][4];
    };
    const FourOf<E>* const weights;
    Fragment kept[kKept > 0 ? kKept : 1];
    float d[kTiles][kSums][4];

    static __device__ __forceinline__ int chunk(int step, int which) {
      const int found = kOfStep * (int(threadIdx.x) / 32 + step * kWarps) + which;
      return kWhole ? found : min(found, kChunks - 1);
    }
    __device__ __forceinline__ Fragment fragment(int i) const {
      const int step = i / kTiles, tile = i % kTiles, lane = threadIdx.x % 32;
      const FourOf<E> upper = weights[place(chunk(step, 0), tile * 2) + lane];
      FourOf<E> lower{};
      if (kTwice) {
        lower = weights[place(chunk(step, 1), 0) + lane];
      } else if (has(tile, 1)) {
        lower = weights[place(chunk(step, 0), tile * 2 + 1) + lane];
      }
      Fragment found;
      if constexpr (kMultiply == Multiply::kHalf) {
        found.of[0][0][0] = pair_of(upper, 0), found.of[0][0][1] = pair_of(lower, 0);
        found.of[0][0][2] = pair_of(upper, 1), found.of[0][0][3] = pair_of(lower, 1);
      } else {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            u32 low;
            split_apart<kMultiply>(float((e % 2 ? lower : upper).x[2 * half + e / 2]), found.of[half][0][e], low);
            if (kParts == 2) found.of[half][kParts - 1][e] = low;
          }
        }
      }
      return found;
    }
    __device__ __forceinline__ void hold() {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        kept[i] = fragment(i);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int e = 0; e < 4; ++e) pin(reinterpret_cast<int&>(kept[i].of[half][part][e]));
          }
        }
      }
    }
    template <typename Source, typename Ask, typename Meanwhile>
    __device__ __forceinline__ void multiply(int first, int rows, const Source& source, const Ask& ask,
                                             const Meanwhile& meanwhile) {
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) d[tile][s][i] = 0.0f;
        }
      }
      const E* const from[1] = {source(first + min(lane / 4 % kRows, rows - 1))};
#pragma unroll
      for (int batch = 0; batch < kSteps; batch += kBatch) {
        FourOf<E> b[kBatch][1];
        const auto k = [&](int c) {
          const int of_warp = kOfStep * (int(threadIdx.x) / 32 + (batch + c) * kWarps);
          return (of_warp + (kTwice ? lane / 16 : 0)) * 16 + lane % 4 * 4;
        };
        read<true, kWhole && kSteps % kBatch == 0>(batch == 0, k, from, b, ask, meanwhile);
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
          if (batch + c >= kSteps) break;
          u32 high[4], low[4];
          if constexpr (kMultiply == Multiply::kHalf) {
            high[0] = pair_of(b[c][0], 0), high[1] = pair_of(b[c][0], 1);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) split<kMultiply>(float(b[c][0].x[e]), high[e], low[e]);
          }
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const int i = (batch + c) * kTiles + tile;
            const Fragment a = i < kKept ? kept[i < kKept ? i : 0] : fragment(i);
            if constexpr (kMultiply == Multiply::kHalf) {
              mma_half<E>(d[tile][0], a.of[0][0], high);
              continue;
            }
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
              float(&small)[4] = d[tile][kSums - 1];
              if constexpr (kParts == 2) {
                mma_tf32(small, a.of[half][kParts - 1], high + 2 * half);
                mma_tf32(small, a.of[half][0], low + 2 * half);
              }
              mma_tf32(d[tile][0], a.of[half][0], high + 2 * half);
            }
          }
        }
      }
    }
    // Those of columns [begin, end), from partials[(term * apart + row) * pitch] on.
    __device__ __forceinline__ void write(float* partials, int begin, int end, int apart, int pitch) const {
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (kActive < kWarps && warp >= kActive) return;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float sums[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = kSums == 2 ? d[tile][0][i] + d[tile][kSums - 1][i] : d[tile][0][i];
        if constexpr (kTwice) {
          const bool second = lane % 4 >= 2;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float sum = second ? sums[i + 2] : sums[i];
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (!second) partials[(warp * apart + lane % 4 * 2 + i) * pitch + lane / 4] = sum;
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = lane % 4 * 2 + i % 2, column = tile * 16 + i / 2 * 8 + lane / 4;
            if (has(tile, i / 2) && (kRows == 8 || row < kRows)) {
              partials[(warp * apart + row) * pitch + column] = sums[i];
            }
          }
        }
      }
    }
  };

  // Up to 16 * parts rows from `first` on; parts is 1, 2 or 4.
  template <typename Source, typename Store, typename Ask, typename Meanwhile>
  static __device__ __forceinline__ void many(int first, int count, int parts, int rank, const FourOf<E>* weights,
                                              float* partials, const Source& source, const Store& store, const Ask& ask,
                                              const Meanwhile& meanwhile) {
    constexpr int kTerms = kMultiply == Multiply::kFloat ? 3 : 1;
    constexpr int kAhead = kEighths <= 8 ? 3 : 1;  // chunks that are asked for before they are multiplied
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp & (parts - 1), slice = warp / parts, slices = kWarps / parts;
    const int rows = min(count - first, parts * kPartRows);
    const E* from[2];  // the lane's neighbours in the first chunk
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      const int row = part * kPartRows + g * 8 + lane / 4;
      from[g] = row < rows ? source(first + row) + lane % 4 * 4 : nullptr;
    }
    FourOf<E> ahead[kAhead][2] = {};  // where there is no row it stays so
    const auto start = [&](int chunk, FourOf<E>(&x)[2]) {
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const int k = chunk * 16 + lane % 4 * 4;
        if constexpr (kInner % 4 == 0) {
          if (from[g] != nullptr && (kInner % 16 == 0 ? chunk < kChunks : k < kInner)) {
            if constexpr (kPublished) {
              ask_published(from[g] + chunk * 16, x[g]);
            } else {
              x[g] = *reinterpret_cast<const FourOf<E>*>(from[g] + chunk * 16);
            }
          } else if constexpr (kInner % 16 != 0) {
            x[g] = {};
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x[g].x[e] = from[g] != nullptr && k + e < kInner ? from[g][chunk * 16 + e] : E(0.0f);
          }
        }
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) start(slice + i * slices, ahead[i]);
    ask();
    meanwhile();
    float d[kEighths][4] = {};
#pragma unroll 1
    for (int begin = slice; begin < kChunks; begin += kAhead * slices) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int chunk = begin + i * slices;
        if (chunk >= kChunks) break;
        if constexpr (kPublished) {
          // With all that are missing at once: one after the other costs a round trip each.
          while (__any_sync(~0u, is_missing(ahead[i][0]) || is_missing(ahead[i][1]))) {
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              const int asked = begin + (j < i ? j + kAhead : j) * slices;
#pragma unroll
              for (int g = 0; g < 2; ++g) {
                if (is_missing(ahead[j][g])) ask_published(from[g] + asked * 16, ahead[j][g]);
              }
            }
          }
        }
        u32 a_high[2][4], a_low[2][4];
        if constexpr (kMultiply == Multiply::kHalf) {
          a_high[0][0] = pair_of(ahead[i][0], 0), a_high[0][1] = pair_of(ahead[i][1], 0);
          a_high[0][2] = pair_of(ahead[i][0], 1), a_high[0][3] = pair_of(ahead[i][1], 1);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              split_apart<kMultiply>(float(ahead[i][e % 2].x[2 * half + e / 2]), a_high[half][e], a_low[half][e]);
            }
          }
        }
        start(chunk + kAhead * slices, ahead[i]);
#pragma unroll
        for (int n = 0; n < kEighths; ++n) {
          const FourOf<E> w = weights[place(chunk, n) + lane];
          if constexpr (kMultiply == Multiply::kHalf) {
            const u32 b[2] = {pair_of(w, 0), pair_of(w, 1)};
            mma_half<E>(d[n], a_high[0], b);
            continue;
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            u32 high[2], low[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) split<kMultiply>(float(w.x[2 * half + e]), high[e], low[e]);
            if constexpr (kTerms == 3) {
              mma_tf32(d[n], a_low[half], high);
              mma_tf32(d[n], a_high[half], low);
            }
            mma_tf32(d[n], a_high[half], high);
          }
        }
      }
    }
    const int terms = kChunks < slices ? kChunks : slices;
    finish<kManyAtOnce, true>(Own<kManyAtOnce>(rank), first, rows, parts * kPartRows, terms, rank, weights, partials,
                              source, store, [&](int begin, int end) {
                                if (slice >= terms) return;
#pragma unroll
                                for (int n = begin / 8; n * 8 < end; ++n) {
#pragma unroll
                                  for (int i = 0; i < 4; ++i) {
                                    const int row = part * kPartRows + i / 2 * 8 + lane / 4,
                                              column = n * 8 - begin + lane % 4 * 2 + i % 2;
                                    partials[(slice * parts * kPartRows + row) * (kManyAtOnce + 4) + column] = d[n][i];
                                  }
                                }
                              });
  }
};

}  // namespace weft
