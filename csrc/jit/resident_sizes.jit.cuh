// What a product of a persistent kernel (jit/resident_product.jit.cuh) has in shared memory, for the host that reserves
// it and the kernel that uses it.
#pragma once

namespace weft {

// Of a reduction over `inner`, with so many columns in the block. Weights are four neighbours of a column for each
// lane, in chunks of 16 of the reduction and eighths of 8 columns. Partial sums are of 8 rows for each of the warps
// that have chunks; where tiles may have more rows, of 16 rows for each warp.
struct ResidentSizes {
  static constexpr int kPartRows = 16;
  int chunks, eighths;
  int active;                 // warps that have chunks
  int most_parts;             // of warps with 16 rows each; 0 where no tile has more than 8 rows
  int at_once, many_at_once;  // columns whose partial sums are added up at a time: of up to 8 rows, of more
  int partial_bytes;
  long long weight_bytes;

  constexpr ResidentSizes(int inner, int columns, int warps, int element_bytes)
      : chunks((inner + 15) / 16),
        eighths((columns + 7) / 8),
        active(chunks < warps ? chunks : warps),
        most_parts(eighths < 16 ? 4 : 0),
        at_once(columns_at_once(columns, active * 8, 16)),
        many_at_once(columns_at_once(columns, warps * kPartRows, 8)),
        partial_bytes(0),
        weight_bytes(128LL * chunks * eighths * element_bytes) {
    const int few = bytes(active * 8, at_once), many = most_parts > 0 ? bytes(warps * kPartRows, many_at_once) : 0;
    partial_bytes = few > many ? few : many;
  }

 private:
  static constexpr int kMostPartialBytes = 44 << 10;
  // Rows are in other banks each.
  static constexpr int bytes(int rows, int columns) { return rows * (columns + 4) * 4; }
  static constexpr int columns_at_once(int columns, int rows, int width) {
    const int found = rows > 0 ? (kMostPartialBytes / (rows * 4) - 4) / width : 0, all = (columns + width - 1) / width;
    return (found < 1 ? 1 : found < all ? found : all) * width;
  }
};

}  // namespace weft
