// Chunks of time of algorithm "newton", for hosts and kernels: how many, where a walk meets what is stored, and when
// rounds of walks end. Torch-free.
//
// Round 1 walks all chunks at once, chunk 0 from the initial state, the others from zeros, and stores their states. In
// round r + 1 a chunk whose left neighbour's end changed in round r is walked again from that end, until it meets what
// is stored: from there on all is right. Where it does not meet it, its own end has changed. Rounds end when no end
// that another chunk begins with changes, after at most as many as there are chunks: round r makes the r-th chunk
// final. Where few meet or come closer, they end earlier, and one walk from the end of the last chunk that is final
// does the rest, without a look at what is stored: as long as the chain.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "common/integers.h"

namespace weft::rnn {

// All have as many steps but the last, which may have fewer.
struct TimeChunks {
  int64_t count, length;
};

WEFT_HOST_DEVICE constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Of `steps` steps, at least 1: `count`, less those that rounding up their length leaves without steps.
constexpr TimeChunks cut_time(int64_t steps, int64_t count) {
  const int64_t length = ceil_div(steps, least(count < 1 ? 1 : count, steps));
  return {ceil_div(steps, length), length};
}

// As many as give each of so many walkers one of a sequence's, of at least `shortest` steps.
constexpr TimeChunks choose_chunks(int64_t steps, int64_t sequences, int64_t walkers, int64_t shortest) {
  return cut_time(steps, least(walkers / (sequences < 1 ? 1 : sequences), steps / (shortest < 1 ? 1 : shortest)));
}

// A walk on a GPU looks whether it meets what is stored every so many steps, and at the chunk's last.
constexpr int kLookEvery = 8;

// The most steps of a sequence: walks count them in ints, and so many of them too as they load ahead.
constexpr int64_t kMostAhead = 64, kMostSteps = (int64_t{1} << 31) - 1 - kMostAhead;

// So many rounds there are where anything is to meet.
constexpr int64_t kFewRounds = 5;
// And so many tell how fast those that change become fewer.
constexpr int64_t kTellingRounds = 3;

// Whether rounds end after this one, the number `round`, in which so many chunks changed their ends, the last one not
// counted, and `closer` of them by at most half as much as their starts had; `before`: how many had changed in the
// round before. Where nearly all of those that are not final change, and few come closer, the net does not forget, as
// far as its chunks tell; and the front moves by a chunk in a round, as it does alone. Where those that change do not
// become a quarter less from round to round, the rest is walked alone, too: after kTellingRounds where more than half
// change and next to none comes closer, as of a net that stays in the one of two states that it is in; after a
// fourteenth of the rounds that there could be where many still change, after a fifth where few do. A step that looks
// takes up to twice as long, so that the rounds have cost a tenth of the chain or a fifth.
WEFT_HOST_DEVICE constexpr bool few_meet(int64_t round, int64_t chunks, int64_t changed, int64_t closer,
                                         int64_t before) {
  const int64_t rest = chunks - round;
  if (8 * changed > 7 * rest && 2 * closer < changed) return true;
  if (4 * changed <= 3 * before) return false;
  return (round >= kTellingRounds && 2 * changed > rest && 8 * closer < changed) ||
         (round >= kFewRounds && ((4 * changed > rest && 14 * round >= chunks) || 5 * round >= chunks));
}

// How far a unit's state may be from what is stored, over max(1, |h|).
template <typename scalar>
constexpr scalar kMeets = sizeof(scalar) == 4 ? scalar(0x1p-22) : scalar(0x1p-51);

// How far apart two states are, over max(1, |stored|); 0 where they are the same, as NaN and NaN.
template <typename scalar>
WEFT_HOST_DEVICE inline scalar mismatch(scalar found, scalar stored) {
  if (found == stored || (found != found && stored != stored)) return scalar(0);
  const scalar apart = found > stored ? found - stored : stored - found, size = stored < 0 ? -stored : stored;
  return size > scalar(1) ? apart / size : apart;
}

// Whether they are no farther apart than kMeets; not NaN and a number, nor infinity and another. Without mismatch's
// division, which a walk would wait for at each look.
template <typename scalar>
WEFT_HOST_DEVICE inline bool meets(scalar found, scalar stored) {
  if (found == stored || (found != found && stored != stored)) return true;
  const scalar apart = found > stored ? found - stored : stored - found, size = stored < 0 ? -stored : stored;
  const scalar most = size > scalar(1) ? kMeets<scalar> * size : kMeets<scalar>;
  return apart <= most && most - most == scalar(0);
}

}  // namespace weft::rnn
