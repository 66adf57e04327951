// Zero-value compression by tiles of 32 KiB of x, a block of 512 threads each.
//
// Compressing, in one pass: x is read once. Blocks take tiles in turn from a counter. A thread owns four pieces of 16
//   bytes, one in each row of its warp; the bits of a row's pieces become mask words by three exchanges between lanes,
//   and places by one scan over the warp, four rows in one register. The tile's non-zeros are gathered in shared
//   memory. Their place in `values` is the sum of the counts of all tiles before: a separate warp looks back over the
//   words that these have published (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back",
//   2016), 128 of them per read of L2. It does so a round after the tile's own count was published, when most other
//   counts are there, and has a round of time; the tile is written in the round after that, a line per warp and store.
// Decompressing, in three passes: the mask's bits are counted by tiles and groups of tiles; the groups' counts are
//   summed; every tile reads its values, whose place is known then, into shared memory and distributes them from there.
//
// Registers: 16 of input, loaded a round ahead; decompressing loads the place of a tile's values a tile ahead. Shared
//   memory: compressing three tiles (one being gathered, one looking back, one being written), two blocks per SM;
//   decompressing one tile, four blocks per SM.
// L2: x is read and written without keeping its lines, which leaves them to the compute beside.
// Cost: the bytes of x, mask and values, once each; decompressing reads the mask, at most a sixteenth of x, twice. A
//   tile takes one barrier to compress, two to decompress.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "common/integers.h"
#include "offload/cuda/status.cuh"
#include "offload/cuda/zvc_compress.h"

namespace weft::offload {

constexpr int kWarp = 32, kRows = 4, kPieceBytes = 16;  // a thread has a piece in each of its warp's rows
constexpr int kPackWarps = 16, kThreads = kWarp * kPackWarps;
constexpr int kSpreadWarps = 16;
constexpr int kGroup = 64;    // tiles whose counts a block sums up
constexpr int kStatuses = 2;  // words of the workspace before those of tiles, whose pairs are aligned
constexpr unsigned kAll = 0xffffffffu;

template <int kItem>
struct Element;
template <>
struct Element<2> {
  using T = uint16_t;
};
template <>
struct Element<4> {
  using T = uint32_t;
};

// The tile that the warps of a block process.
template <int kItem, int kOfWarps>
struct Tile {
  static constexpr int kWarps = kOfWarps, kThreads = kWarp * kWarps;
  static constexpr int kBytes = kThreads * kRows * kPieceBytes;
  static constexpr int kPiece = kPieceBytes / kItem;  // elements
  static constexpr int kElements = kBytes / kItem;
  static constexpr int kWords = kElements / 32;  // of the mask
};
template <int kItem>
using PackTile = Tile<kItem, kPackWarps>;
template <int kItem>
using SpreadTile = Tile<kItem, kSpreadWarps>;

template <int kWarps>
constexpr int64_t tiles_of(int64_t n, int itemsize) {
  return ceil_div(n * itemsize, Tile<4, kWarps>::kBytes);
}

constexpr int kPacked = 3;  // tiles of a block that are packed and not all written
struct CompressShared {
  alignas(16) unsigned char packed[kPacked][PackTile<4>::kBytes];
  int64_t tiles[2], starts[2];
  int counts[2][kPackWarps];
};

struct DecompressShared {
  alignas(16) unsigned char values[SpreadTile<4>::kBytes + 16];
  uint32_t words[SpreadTile<2>::kWords];
  int before[SpreadTile<2>::kWords];
  int counts[kSpreadWarps];
};

// Bit i: whether element i of a piece has any bit set.
template <int kItem>
__device__ __forceinline__ uint32_t piece_bits(const uint4& p) {
  if constexpr (kItem == 4) {
    return uint32_t(p.x != 0) | uint32_t(p.y != 0) << 1 | uint32_t(p.z != 0) << 2 | uint32_t(p.w != 0) << 3;
  } else {
    // Bits 15 and 31 of a word: whether its halves are not zero. The sum of 15 bits and 0x7fff never leaves the half.
    const auto halves = [](uint32_t w) { return (((w & 0x7fff7fffu) + 0x7fff7fffu) | w) & 0x80008000u; };
    const uint32_t bits = halves(p.x) >> 15 | halves(p.y) >> 13 | halves(p.z) >> 11 | halves(p.w) >> 9;
    return (bits | bits >> 15) & 0xff;  // the high halves' bits between those of the low ones
  }
}

template <int kItem>
__device__ __forceinline__ uint32_t element(const uint4& p, int i) {
  if constexpr (kItem == 4) {
    return i == 0 ? p.x : i == 1 ? p.y : i == 2 ? p.z : p.w;
  } else {
    const uint32_t w = i < 2 ? p.x : i < 4 ? p.y : i < 6 ? p.z : p.w;
    return i % 2 == 0 ? w & 0xffff : w >> 16;
  }
}

__device__ __forceinline__ int byte_of(uint32_t word, int i) {
  return int(word >> (8 * i) & 0xff);
}

// Byte r of `rows` has the bits of this lane's piece of row r; the result is a whole mask word of one row, row_of_lane.
// Each exchange halves the rows and doubles the bits that a lane has of one; lanes of 4 bits first fill bytes in pairs.
template <int kItem>
__device__ __forceinline__ uint32_t mask_word(uint32_t rows, int lane) {
  constexpr int d = kItem == 4 ? 2 : 1;
  if constexpr (kItem == 4) {
    const uint32_t other = __shfl_xor_sync(kAll, rows, 1);
    rows = lane & 1 ? other | rows << 4 : rows | other << 4;
  }
  uint32_t other = __shfl_xor_sync(kAll, rows, d);
  rows = __byte_perm(rows, other, lane & d ? 0x3726 : 0x5140);
  other = __shfl_xor_sync(kAll, rows, 2 * d);
  return __byte_perm(rows, other, lane & 2 * d ? 0x3276 : 0x5410);
}
template <int kItem>
__device__ __forceinline__ int row_of_lane(int lane) {
  constexpr int d = kItem == 4 ? 2 : 1;
  return 2 * (lane / d & 1) + (lane / (2 * d) & 1);
}

// Set bits of each byte.
__device__ __forceinline__ uint32_t bytes_set(uint32_t v) {
  v -= v >> 1 & 0x55555555u;
  v = (v & 0x33333333u) + (v >> 2 & 0x33333333u);
  return (v + (v >> 4)) & 0x0f0f0f0fu;
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t v, int lane) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, v, d);
    if (lane >= d) v += other;
  }
  return v;
}

// Sums of counts of warps: of those before this one, and of all.
struct WarpSums {
  int before, all;
};
template <int kWarps>
__device__ __forceinline__ WarpSums warp_sums(const int* counts, int warp, int lane) {
  const unsigned count = lane < kWarps ? unsigned(counts[lane]) : 0;
  return {int(__reduce_add_sync(kAll, lane < warp ? count : 0u)), int(__reduce_add_sync(kAll, count))};
}

// The number of non-zeros before tile `tile`, which has `count` and has published it; called by one warp. By windows of
// as many tiles as there may be at work, all read at once, a pair per lane and load.
__device__ __forceinline__ int64_t look_back(uint64_t* statuses, int64_t tile, int count, int lane) {
  constexpr int kLoads = 2;
  if (tile == 0) return 0;
  int64_t before = 0;
  for (int64_t nearest = (tile - 1) / 2;; nearest -= kWarp * kLoads) {  // of pairs
    uint64_t even[kLoads], odd[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t pair = nearest - i * kWarp - lane;
      even[i] = odd[i] = kSumCount;  // of the tiles before the first: none
      if (pair >= 0) load_words(statuses + 2 * pair, even[i], odd[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t pair = nearest - i * kWarp - lane;
      for (;;) {
        if (2 * pair + 1 >= tile) odd[i] = kOwnCount;  // the tile itself
        // Whether the pair knows all before it; whether it has not said enough yet.
        const bool knows = (odd[i] & kSumCount) != 0 || (odd[i] != 0 && (even[i] & kSumCount) != 0);
        const unsigned sums = __ballot_sync(kAll, knows);
        const unsigned silent = __ballot_sync(kAll, !knows && (odd[i] == 0 || even[i] == 0));
        const int first = sums != 0 ? __ffs(int(sums)) - 1 : kWarp;  // the nearest that knows
        if (silent != 0 && __ffs(int(silent)) - 1 < first) {
          rest<100>();
          if (pair >= 0 && (odd[i] == 0 || even[i] == 0)) load_words(statuses + 2 * pair, even[i], odd[i]);
          continue;
        }
        before += __reduce_add_sync(kAll, lane < first ? unsigned(odd[i]) + unsigned(even[i]) : 0u);
        if (sums == 0) break;
        const uint64_t known = (odd[i] & kCountBits) + ((odd[i] & kSumCount) != 0 ? 0 : even[i] & kCountBits);
        const uint64_t low = __shfl_sync(kAll, uint32_t(known), first),
                       high = __shfl_sync(kAll, uint32_t(known >> 32), first);
        before += int64_t(high << 32 | low);
        if (lane == 0) store_word(statuses + tile, uint64_t(before + count) | kSumCount);
        return before;
      }
    }
  }
}

// This thread's pieces of a tile; zeros behind the end.
template <int kItem>
__device__ __forceinline__ void fetch(const ZvcCompress& args, int64_t tile, uint4 (&pieces)[kRows], int warp,
                                      int lane) {
  using T = typename Element<kItem>::T;
  constexpr int kTileBytes = PackTile<kItem>::kBytes;
  const auto* x = static_cast<const unsigned char*>(args.x) + tile * kTileBytes;
  const int64_t left = args.n * kItem - tile * kTileBytes;
  if (left >= kTileBytes && reinterpret_cast<uint64_t>(x) % kPieceBytes == 0) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      pieces[r] = __ldcs(reinterpret_cast<const uint4*>(x) + (warp * kRows + r) * kWarp + lane);
    return;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int piece = ((warp * kRows + r) * kWarp + lane) * kPieceBytes;
    uint32_t words[kPieceBytes / 4] = {};
#pragma unroll
    for (int i = 0; i < PackTile<kItem>::kPiece; ++i) {
      if (piece + (i + 1) * kItem <= left)
        words[i * kItem / 4] |= uint32_t(reinterpret_cast<const T*>(x + piece)[i]) << (i * kItem % 4 * 8);
    }
    pieces[r] = uint4{words[0], words[1], words[2], words[3]};
  }
}

// Writes `count` elements to `values`, which is element `start` of memory that is aligned to 4 bytes: words of 4 bytes,
// a line of 128 per warp and store.
template <typename T>
__device__ __forceinline__ void write_run(T* values, int64_t start, int count, const T* packed, int thread) {
  if constexpr (sizeof(T) == 4) {
    for (int i = thread - int(start % kWarp); i < count; i += kThreads) {
      if (i >= 0) values[i] = packed[i];
    }
  } else {
    const int odd = int(start & 1), words = (odd + count + 1) / 2;
    for (int w = thread - int(start / 2 % kWarp); w < words; w += kThreads) {
      if (w < 0) continue;
      const int i = 2 * w - odd;
      if (i >= 0 && i + 1 < count) {
        *reinterpret_cast<uint32_t*>(values + i) = uint32_t(packed[i]) | uint32_t(packed[i + 1]) << 16;
      } else if (i >= 0) {
        values[i] = packed[i];
      } else if (count > 0) {
        values[0] = packed[0];
      }
    }
  }
}

// Writes a tile's values where they belong: as many as fit to `values`, the others to `all`.
template <int kItem>
__device__ __forceinline__ void write_values(const ZvcCompress& args, int64_t start, int count,
                                             const typename Element<kItem>::T* packed, int thread) {
  using T = typename Element<kItem>::T;
  const int fit = start + count <= args.capacity ? count : int(max(args.capacity - start, int64_t(0)));
  write_run(static_cast<T*>(args.values) + start, start, fit, packed, thread);
  if (fit == count || args.all == nullptr) return;
  for (int i = fit + thread; i < count; i += kThreads) static_cast<T*>(args.all)[start + i] = packed[i];
}

// What a thread has of a tile: its pieces, their bits by rows, a byte each, and how many of these are set in the lanes
// before and in all.
template <int kItem>
struct Counted {
  uint4 pieces[kRows];
  uint32_t rows, before, last_before, last_own;
  __device__ int row_count(int r) const { return byte_of(last_before, r) + byte_of(last_own, r); }
};

template <int kItem>
__device__ __forceinline__ void count(Counted<kItem>& own, int lane) {
  own.rows = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) own.rows |= piece_bits<kItem>(own.pieces[r]) << (8 * r);
  // Four sums in four bytes: those before a lane are at most 31 * 8, and what overflows in sums up to the last lane
  // goes away with that lane's own count.
  const uint32_t set = bytes_set(own.rows);
  own.before = inclusive_sum(set, lane) - set;
  own.last_before = __shfl_sync(kAll, own.before, kWarp - 1);
  own.last_own = __shfl_sync(kAll, set, kWarp - 1);
}

template <int kItem>
__device__ __forceinline__ void write_mask(const ZvcCompress& args, int64_t tile, uint32_t rows, int warp, int lane) {
  constexpr int kWords = PackTile<kItem>::kWords, kWarpWords = kWords / kPackWarps, kRowWords = kWarpWords / kRows;
  constexpr int kLanes = 32 / PackTile<kItem>::kPiece;  // whose pieces make up a word
  const uint32_t word = mask_word<kItem>(rows, lane);
  const int64_t place = tile * kWords + warp * kWarpWords + row_of_lane<kItem>(lane) * kRowWords + lane / kLanes;
  if ((kItem == 2 || lane % 2 == 0) && place < ceil_div(args.n, 32)) args.mask[place] = word;
}

// Puts the non-zeros of this thread where they belong among those of the tile; `row_start`: of the warp's first.
template <int kItem>
__device__ __forceinline__ void pack(const Counted<kItem>& from, int row_start, typename Element<kItem>::T* packed) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    int at = row_start + byte_of(from.before, r);
    row_start += from.row_count(r);
#pragma unroll
    for (int i = 0; i < PackTile<kItem>::kPiece; ++i) {
      const uint32_t set = from.rows >> (8 * r + i) & 1;
      if (set) packed[at] = typename Element<kItem>::T(element<kItem>(from.pieces[r], i));
      at += int(set);
    }
  }
}

// Run by kThreads that work and a warp that looks back. workspace: a counter and a word per tile, zeros; aligned to 16
// bytes.
template <int kItem>
__device__ void compress_tiles(const ZvcCompress& args, uint64_t* workspace, CompressShared& shared) {
  using T = typename Element<kItem>::T;
  const int thread = int(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const bool looks_back = warp == kPackWarps;
  const int64_t tiles = tiles_of<kPackWarps>(args.n, kItem);
  uint64_t* const statuses = workspace + kStatuses;
  const auto packed = [&](int round) { return reinterpret_cast<T*>(shared.packed[round % kPacked]); };

  if (thread < 2) shared.tiles[thread] = take_tile(workspace);
  __syncthreads();
  // The tiles of this round and those before and after it. What is none is behind the end.
  int64_t tile = min(shared.tiles[0], shared.tiles[1]), next = max(shared.tiles[0], shared.tiles[1]);
  int64_t last = tiles, before_last = tiles;
  int last_count = 0, before_last_count = 0;
  Counted<kItem> own;
  if (!looks_back && tile < tiles) fetch<kItem>(args, tile, own.pieces, warp, lane);
  for (int round = 0; tile < tiles || last < tiles || before_last < tiles; ++round) {
    const int stage = round % 2;
    if (!looks_back && tile < tiles) {
      count<kItem>(own, lane);
      write_mask<kItem>(args, tile, own.rows, warp, lane);
      int sum = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum += own.row_count(r);
      if (lane == 0) shared.counts[stage][warp] = sum;
    }
    __syncthreads();  // counts are there, and the start of the tile before the last, which is packed
    const WarpSums sums = warp_sums<kPackWarps>(shared.counts[stage], warp, lane);
    if (round > 0) next = shared.tiles[stage ^ 1];
    if (looks_back) {
      int64_t taken = 0;
      if (lane == 0) taken = take_tile(workspace);
      if (lane == 0 && tile < tiles)
        store_word(statuses + tile, uint64_t(sums.all) | (tile == 0 ? kSumCount : kOwnCount));
      if (last < tiles) {
        const int64_t start = look_back(statuses, last, last_count, lane);
        if (lane == 0) shared.starts[stage ^ 1] = start;
        if (lane == 0 && last == tiles - 1) *args.size = start + last_count;
      }
      if (lane == 0) shared.tiles[stage] = taken;
    } else {
      if (tile < tiles) pack<kItem>(own, sums.before, packed(round));
      if (next < tiles) fetch<kItem>(args, next, own.pieces, warp, lane);
      if (before_last < tiles)
        write_values<kItem>(args, shared.starts[stage], before_last_count, packed(round + 1), thread);
    }
    before_last = last, before_last_count = last_count;
    last = tile, last_count = sums.all;
    tile = next;
  }
}

// starts: for each tile the set bits of its group's tiles before it; totals: for each group its set bits.
template <int kItem>
__device__ void count_tiles(const ZvcDecompress& args, int64_t group, int* starts, int64_t* totals, int* shared) {
  constexpr int kWords = SpreadTile<kItem>::kWords;
  const int thread = int(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int64_t words = ceil_div(args.n, 32), tiles = tiles_of<kSpreadWarps>(args.n, kItem);
#pragma unroll
  for (int t = warp; t < kGroup; t += kSpreadWarps) {
    const int64_t first = (group * kGroup + t) * kWords;
    unsigned count = 0;
#pragma unroll
    for (int w = 0; w < kWords; w += kWarp) {
      const int64_t at = first + w + lane;
      if (at < words) count += unsigned(__popc(args.mask[at]));
    }
    count = __reduce_add_sync(kAll, count);
    if (lane == 0) shared[t] = int(count);
  }
  __syncthreads();
  if (warp != 0) return;
  const int even = shared[2 * lane], odd = shared[2 * lane + 1];
  const int sum = int(inclusive_sum(uint32_t(even + odd), lane)), before = sum - even - odd;
  const int64_t tile = group * kGroup + 2 * lane;
  if (tile < tiles) starts[tile] = before;
  if (tile + 1 < tiles) starts[tile + 1] = before + even;
  if (lane == kWarp - 1) totals[group] = sum;
}

// Reads values[start, start + count) into shared memory, and returns where there the first one is. In pieces of 16
// bytes, counted from the one that the first value of all lies in, of which `lead` elements are not ours;
// asynchronously, because a thread that waits for each of its pieces waits four times.
template <int kItem>
__device__ __forceinline__ int read_values(const ZvcDecompress& args, int64_t start, int count, unsigned char* memory,
                                           int thread) {
  using T = typename Element<kItem>::T;
  constexpr int kPiece = SpreadTile<kItem>::kPiece;
  const int lead = int(reinterpret_cast<uint64_t>(args.values) % kPieceBytes) / kItem;
  const T* const values = static_cast<const T*>(args.values) - lead;
  const T* const all = args.all != nullptr ? static_cast<const T*>(args.all) - lead : nullptr;
  const int64_t end = args.available + lead;
  start += lead;
  const int first = int(start % kPiece), pieces = (first + count + kPiece - 1) / kPiece;
  for (int p = thread; p < pieces; p += SpreadTile<kItem>::kThreads) {
    const int64_t at = start - first + p * kPiece;
    T* const to = reinterpret_cast<T*>(memory) + p * kPiece;
    const bool behind = all != nullptr && at >= end;
    const T* const source = behind ? all : values;
    if (at >= lead && at + kPiece <= (behind ? args.n + lead : end) &&
        (!behind || reinterpret_cast<uint64_t>(all + at) % kPieceBytes == 0)) {
      copy_async<kPieceBytes>(to, source + at);
    } else {
      for (int i = 0; i < kPiece; ++i) {
        const int64_t k = at + i;
        to[i] = k < lead ? T(0) : k < end ? values[k] : all != nullptr && k < args.n + lead ? all[k] : T(0);
      }
    }
  }
  copy_commit();
  copy_wait<0>();
  return first;
}

// starts and totals as count_tiles has left them, the latter summed up: the values before a group.
template <int kItem>
__device__ void decompress_tiles(const ZvcDecompress& args, int64_t block, int64_t blocks, const int* starts,
                                 const int64_t* totals, DecompressShared& shared) {
  using T = typename Element<kItem>::T;
  using Spread = SpreadTile<kItem>;
  constexpr int kWords = Spread::kWords, kPiece = Spread::kPiece;
  const int thread = int(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int64_t tiles = tiles_of<kSpreadWarps>(args.n, kItem), words = ceil_div(args.n, 32);
  const bool aligned = reinterpret_cast<uint64_t>(args.out) % kPieceBytes == 0;
  // Of a tile: this thread's word of the mask, and where the values begin.
  const auto word_of = [&](int64_t tile) {
    const int64_t at = tile * kWords + thread;
    return tile < tiles && thread < kWords && at < words ? args.mask[at] : 0;
  };
  const auto start_of = [&](int64_t tile) { return tile < tiles ? totals[tile / kGroup] + starts[tile] : 0; };
  uint32_t next_word = word_of(block);
  int64_t next_start = start_of(block);
  for (int64_t tile = block; tile < tiles; tile += blocks) {
    const uint32_t own = next_word;
    const int64_t start = next_start;
    next_word = word_of(tile + blocks), next_start = start_of(tile + blocks);
    const int count = __popc(own), sum = int(inclusive_sum(uint32_t(count), lane));
    if (lane == kWarp - 1) shared.counts[warp] = sum;
    __syncthreads();  // counts are there, and everybody has spread the last tile
    const WarpSums sums = warp_sums<kSpreadWarps>(shared.counts, warp, lane);
    if (thread < kWords) {
      shared.words[thread] = own;
      shared.before[thread] = sums.before + sum - count;
    }
    const int first = read_values<kItem>(args, start, sums.all, shared.values, thread);
    __syncthreads();  // words and values are there
    const auto* values = reinterpret_cast<const T*>(shared.values) + first;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int place = ((warp * kRows + r) * kWarp + lane) * kPiece, shift = place % 32;
      const uint32_t word = shared.words[place / 32];
      int from = shared.before[place / 32] + __popc(word & ((1u << shift) - 1));
      uint32_t out[kPieceBytes / 4] = {};
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        const uint32_t set = word >> (shift + i) & 1;
        const uint32_t value = set ? uint32_t(values[from]) : 0;
        from += int(set);
        out[i * kItem / 4] |= value << (i * kItem % 4 * 8);
      }
      const int64_t element = tile * Spread::kElements + place;
      T* const to = static_cast<T*>(args.out) + element;
      if (aligned && element + kPiece <= args.n) {
        __stcs(reinterpret_cast<uint4*>(to), uint4{out[0], out[1], out[2], out[3]});
      } else {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) {
          if (element + i < args.n) to[i] = T(out[i * kItem / 4] >> (i * kItem % 4 * 8));
        }
      }
    }
  }
}

}  // namespace weft::offload
