// The offload policy: which of the tensors that a training step saves for its backward go to host memory, and when each
// comes back. Arithmetic on integers and seconds, free of torch and of any device.
//
// The model. Operations run one after another, one copy out and one copy in at a time beside them. Operation k starts
// when k - 1 has ended, every moved tensor with first_backward = k is back, and there is room for the tensors with
// last_forward = k. A tensor counts from the start of last_forward to the end of last_backward, a moved one not from
// the end of its copy out to the start of its copy in. Copies out go in order of (last_forward, index), not before the
// end of last_forward; copies in in order of (first_backward, index), not before operation prefetch - 1 and the
// tensor's copy out have ended, and only where there is room. Room: what counts plus what is new is at most the budget.
// At each instant first all that ends now ends, then an operation starts, then a copy out, then a copy in. If nothing
// runs and nothing can start, the waiting operation that lacks only room starts over the budget; else the first copy
// in.
//
// Three facts that the search rests on. Room is never short for good but where the working set of an operation, with
// all copies in as late as possible, is above the budget: so a choice meets the budget if and only if these working
// sets do, whatever its prefetches. Moving one more tensor makes none of them larger. And the end of every operation is
// a non-decreasing function of every prefetch.
//
// Sources: AutoVM (Chen, 2020), chapter 3: reuse distance, prefetch with known and with unknown run times, working-set
// limit, order of the prefetches; vDNN (Rhu et al., MICRO 2016).
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace weft::offload {

// Bytes of the zero-value compression of `bytes` bytes with that share of non-zeros, or `bytes` where it is not less.
int64_t compressed_bytes(int64_t bytes, double density, int64_t itemsize);
// Of n elements those that are compressed where that share of them is to be, the first ones: whole words of the mask.
int64_t compressed_elements(int64_t n, double share);

struct Saved {
  int64_t bytes, last_forward, first_backward, last_backward;
  double density;
  int64_t itemsize;
};

// Checked: 0 <= last_forward < forward <= first_backward <= last_backward < seconds.size(); nothing negative or NaN.
struct Timeline {
  std::vector<double> seconds;  // of each operation; any numbers where they are not known
  bool known;
  int64_t forward;
  std::vector<Saved> tensors;
};

struct Link {
  double d2h, h2d;  // bytes per second
  // Bytes per second that the codec reads and writes; as long as it does, compute stands still.
  double codec = std::numeric_limits<double>::infinity();
  // What is compressed takes at least this share of the time that it would take as it is: beside compute the codec's
  // kernels wait for a place.
  double least = 0;
};

struct Move {
  int64_t tensor, prefetch;
  bool compressed;
  double share = 1;  // of it that is compressed, if any, from its first element on
};

using Budget = std::optional<int64_t>;

struct Prediction {
  int64_t peak_bytes;
  double seconds, forward_stall, backward_stall;  // 0 where run times are not known
  int64_t moved_bytes, sent_bytes;
  double codec_seconds;  // that compute stands still for the codec, in none of the other times
};

Prediction simulate(const Timeline& timeline, const std::vector<Move>& moves, Budget budget, const Link& link);

// The moves, in the order of the copies in. Only tensors that are `movable` move; `compress` where it is smaller.
// Without a budget, and where the codec takes time, no more is compressed than lets tensors hide that would not, so
// that most bytes are sent, and at most `slowdown` of all run times is the codec's.
std::vector<Move> plan(const Timeline& timeline, Budget budget, const Link& link, bool compress,
                       const std::vector<bool>& movable, double slowdown = 0);

}  // namespace weft::offload
