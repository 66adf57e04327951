// What the files of the chunked scans in block_chunks.cuh share: the chunks and where their maps lie.
#pragma once
#include <cstdint>

namespace weft::scan::block {

constexpr int kReplayThreads = 256;
// log2 of a norm of 0, far below every sum of logarithms.
constexpr float kZeroGrowth = -1e30f;

// A recurrence of H states, cut into `chunks` chunks of `length` steps, the last of which may be shorter.
struct Chunked {
  int H, padded;  // padded: 64, 96 or 128
  int64_t batch;
  int64_t chunks, length;
  int splits;        // of the columns of a chunk's product over blocks
  bool copy_engine;  // the device has one for shared memory
  int map_stages;    // of the ring of chunk products
  void* workspace;

  // The map of one chunk, in states: product (by columns), then offset, exponent, loss and growth, which are
  // addressed in states as well so that every piece is 16-byte aligned.
  static constexpr int64_t kTail = 16;
  constexpr int64_t map_size() const { return int64_t(padded) * padded + 3 * padded + kTail; }
  // Of the maps and of the states at the chunks' starts.
  constexpr int64_t workspace_size() const { return batch * (chunks - 1) * (map_size() + padded); }
};

}  // namespace weft::scan::block
