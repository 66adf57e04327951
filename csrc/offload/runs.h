// Lengths of runs from the bits of a mask, shared by rle_compress's kernels on both devices. Torch-free.
//
// A change is an element of another kind than the one before it; a run ends at the next change. Runs too long for an
// int32 are split, so the number of entries of a change depends on the place of the one before. The summary of a part
// of the changes is therefore: the entries of all but its first change, and its first and last place.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace weft::offload {

constexpr int64_t kLongestRun = 2147483647;

// Entries of a run of that length beyond the first: pairs of a zero-length run and what follows it.
WEFT_HOST_DEVICE constexpr int64_t split_entries(int64_t length) {
  return length > kLongestRun ? 2 * ((length - 1) / kLongestRun) : 0;
}

struct Changes {
  int64_t entries = 0;            // of all runs that end at one of the changes but the first
  int64_t first = -1, last = -1;  // -1: no changes

  // Before any element: as if x had begun with a zero at 0, whose run the first change ends.
  WEFT_HOST_DEVICE static constexpr Changes start() { return {0, 0, 0}; }
  WEFT_HOST_DEVICE void add(int64_t at) { *this = then({0, at, at}); }
  // The summary of these changes followed by those.
  WEFT_HOST_DEVICE constexpr Changes then(const Changes& next) const {
    if (next.first < 0) return *this;
    if (first < 0) return next;
    return {entries + next.entries + 1 + split_entries(next.first - last), first, next.last};
  }
};

// The changes in a word of the mask, whose elements begin at 32 * index, of n in all; `before`: the word before it.
WEFT_HOST_DEVICE constexpr uint32_t change_bits(uint32_t word, uint32_t before, int64_t index, int64_t n) {
  const uint32_t bits = word ^ (word << 1 | before >> 31);
  return n - 32 * index < 32 ? bits & ((uint32_t(1) << (n - 32 * index)) - 1) : bits;
}

// Writes a run, split where it must be, and returns where the next one goes.
WEFT_HOST_DEVICE inline int32_t* write_run(int32_t* runs, int64_t length) {
  for (; length > kLongestRun; length -= kLongestRun) {
    *runs++ = int32_t(kLongestRun);
    *runs++ = 0;
  }
  *runs++ = int32_t(length);
  return runs;
}

}  // namespace weft::offload
