// The offload policy: which saved tensors of a training step move to host memory, and when each comes back. Arithmetic
// on integers and seconds, free of torch and of any device.
//
// The model. Operations run one after another, one copy out and one copy in at a time beside them. Operation k starts
// when k - 1 has ended, every moved tensor with first_backward = k is back, and there is room for the tensors with
// last_forward = k; one that saves nothing new waits for no room. A tensor counts from the start of last_forward to the
// end of last_backward, a moved one not from the end of its copy out to the start of its copy in. Copies out go in
// order of (last_forward, index), not before the end of last_forward; copies in go in order of (first_backward, index),
// not before operation prefetch - 1 and the tensor's copy out have ended, and only where there is room. Room: what
// counts plus what is new is at most the budget. At each instant first all that ends now ends, then an operation
// starts, then a copy out, then a copy in. If nothing runs and nothing can start, the waiting operation that lacks only
// room starts over the budget; else the first copy in.
//
// The search rests on three facts. A choice meets the budget if and only if the working set of every operation does
// with all copies in as late as possible, whatever its prefetches: otherwise room is never short for good. Moving one
// more tensor makes no working set larger. The end of every operation is a non-decreasing function of every prefetch.
//
// Sources: AutoVM (Chen, 2020), chapter 3: reuse distance, prefetch with known and with unknown run times, working-set
// limit, order of the prefetches; vDNN (Rhu et al., MICRO 2016).
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace weft::offload {

// Bytes after zero-value compression at that share of non-zeros, or `bytes` if that is not less.
int64_t compressed_bytes(int64_t bytes, double density, int64_t itemsize);
// The number of leading elements of n that are compressed at that share: whole words of the mask.
int64_t compressed_elements(int64_t n, double share);

struct Saved {
  int64_t bytes, last_forward, first_backward, last_backward;
  double density;
  int64_t itemsize;
};

// Checked: 0 <= last_forward < forward <= first_backward <= last_backward < seconds.size(); nothing negative or NaN.
struct Timeline {
  std::vector<double> seconds;  // of each operation; arbitrary where not `known`
  bool known;
  int64_t forward;
  std::vector<Saved> tensors;
};

struct Link {
  double d2h, h2d;  // bytes per second
  // Bytes per second that the codec reads and writes; compute stands still meanwhile.
  double codec = std::numeric_limits<double>::infinity();
  // Least share of a tensor's uncompressed time on the bus that compression leaves: beside compute the codec's kernels
  // wait for free SMs.
  double least = 0;
};

struct Move {
  int64_t tensor, prefetch;
  bool compressed;
  double share = 1;  // compressed share of its elements, from the first on
};

using Budget = std::optional<int64_t>;

struct Prediction {
  int64_t peak_bytes;
  double seconds, forward_stall, backward_stall;  // 0 where run times are not known
  int64_t moved_bytes, sent_bytes;
  double codec_seconds;  // that compute stands still for the codec; not part of the other times
};

Prediction simulate(const Timeline& timeline, const std::vector<Move>& moves, Budget budget, const Link& link);

// The moves, in the order of the copies in. Only `movable` tensors move; with `compress` they are compressed where that
// is smaller. Without a budget, if the codec takes time, compression is used only to hide tensors that would not hide
// otherwise, to send most bytes, and for at most the share `slowdown` of all run times.
std::vector<Move> plan(const Timeline& timeline, Budget budget, const Link& link, bool compress,
                       const std::vector<bool>& movable, double slowdown = 0);

}  // namespace weft::offload
