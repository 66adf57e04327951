// Runs from the bits of a mask, and back: scans over words and over runs.
//
// To runs: a word's changes are its items' sum, see runs.h, and what comes before a word tells where its runs go.
// To a mask: a run flips the bit behind its end, for which the lengths are summed up; two that end in one place cancel,
//   in whatever order the atomics come. Then every bit is the parity of the flips up to it: within a word by shifts,
//   across words by a scan.
// Cost: RLE serves as a comparison for zero-value compression, whose kernels do the rest; these read their input twice
//   and scatter runs.
#include <algorithm>

#include "offload/cuda/rle_compress.h"
#include "offload/cuda/tile_scan.cuh"
#include "offload/runs.h"

namespace weft::offload {
namespace {

struct WriteRuns {
  using Value = Changes;
  int64_t items;
  RleRuns args;

  __device__ static Changes none() { return {}; }
  __device__ static Changes both(const Changes& a, const Changes& b) { return a.then(b); }
  __device__ Changes start() const { return Changes::start(); }
  __device__ uint32_t bits(int64_t w) const {
    return change_bits(args.mask[w], w > 0 ? args.mask[w - 1] : 0, w, args.n);
  }
  __device__ Changes item(int64_t w) const {
    Changes changes;
    for (uint32_t left = bits(w); left != 0; left &= left - 1) changes.add(32 * w + __ffs(int(left)) - 1);
    return changes;
  }
  __device__ void apply(int64_t w, const Changes& before) const {
    int32_t* to = args.runs + before.entries;
    int64_t last = before.last;
    for (uint32_t left = bits(w); left != 0; left &= left - 1) {
      const int64_t at = 32 * w + __ffs(int(left)) - 1;
      to = write_run(to, at - last);
      last = at;
    }
  }
  __device__ void finish(const Changes& all) const {
    *args.runs_used = write_run(args.runs + all.entries, args.n - all.last) - args.runs;
  }
};

struct FlipEnds {
  using Value = int64_t;
  int64_t items;
  RleMask args;

  __device__ static int64_t none() { return 0; }
  __device__ static int64_t both(int64_t a, int64_t b) { return a + b; }
  __device__ int64_t start() const { return 0; }
  __device__ int64_t item(int64_t r) const { return args.runs[r]; }
  __device__ void apply(int64_t r, int64_t before) const {
    const int64_t end = before + args.runs[r];
    if (end >= 0 && end < args.n) atomicXor(args.mask + end / 32, 1u << (end % 32));
  }
  __device__ void finish(int64_t) const {}
};

struct SpreadFlips {
  using Value = uint32_t;
  int64_t items;
  RleMask args;

  __device__ static uint32_t none() { return 0; }
  __device__ static uint32_t both(uint32_t a, uint32_t b) { return a ^ b; }
  __device__ uint32_t start() const { return 0; }
  __device__ uint32_t item(int64_t w) const { return uint32_t(__popc(args.mask[w]) & 1); }
  __device__ void apply(int64_t w, uint32_t before) const {
    uint32_t word = args.mask[w];
    for (int d = 1; d < 32; d *= 2) word ^= word << d;
    if (before != 0) word = ~word;
    const int64_t left = args.n - 32 * w;
    args.mask[w] = left < 32 ? word & ((1u << left) - 1) : word;
  }
  __device__ void finish(uint32_t) const {}
};

}  // namespace

size_t rle_runs_workspace(const RleRuns& args) {
  return tile_scan_workspace<WriteRuns>(ceil_div(args.n, 32));
}

void rle_runs(const RleRuns& args, void* workspace, cudaStream_t stream) {
  cuda_check(cudaMemsetAsync(args.runs, 0, size_t(args.n + 1) * sizeof(int32_t), stream), "rle_compress: runs");
  if (args.n == 0) {
    cuda_check(cudaMemsetAsync(args.runs_used, 0, sizeof(int64_t), stream), "rle_compress: size");
    return;
  }
  tile_scan("rle_compress", WriteRuns{ceil_div(args.n, 32), args}, workspace, stream);
}

size_t rle_mask_workspace(const RleMask& args) {
  return std::max(tile_scan_workspace<FlipEnds>(args.count), tile_scan_workspace<SpreadFlips>(ceil_div(args.n, 32)));
}

void rle_mask(const RleMask& args, void* workspace, cudaStream_t stream) {
  const int64_t words = ceil_div(args.n, 32);
  if (words == 0) return;
  cuda_check(cudaMemsetAsync(args.mask, 0, size_t(words) * sizeof(uint32_t), stream), "rle_decompress: mask");
  if (args.count == 0) return;
  tile_scan("rle_decompress (ends)", FlipEnds{args.count, args}, workspace, stream);
  tile_scan("rle_decompress (mask)", SpreadFlips{words, args}, workspace, stream);
}

}  // namespace weft::offload
