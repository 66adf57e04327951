// Which columns of a matrix a block keeps.
#pragma once

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

}  // namespace weft
