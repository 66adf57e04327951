#include "rnn/persistent/cpu/meeting.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace weft::rnn {
namespace {

// A few microseconds, in which members of equal parts come on a machine of their own.
constexpr int kSpins = 500;
// Nanoseconds. A scheduler takes a processor away for at least a millisecond; interrupts take tens of microseconds.
constexpr int64_t kLate = 200'000;
constexpr int64_t kCrowded = 100'000'000;

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

void arrive(Arrivals& own, int meeting) {
  const std::atomic_ref count(own.count);
  count.store(meeting);
  count.notify_all();
}

// Members that crews of this process begin with until a moment.
std::atomic<int64_t> crowded_until{0};
std::atomic<int> crowded_members{1};

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Waits until a member has come to a meeting: nanoseconds, 0 for a few microseconds. Nobody yields: what else runs on
// this processor would have it for a slice of time, though the other member is about to come.
int64_t wait_for(Arrivals& other, int meeting) {
  const std::atomic_ref count(other.count);
  int64_t begin = 0, waited = 0;
  int spins = 0;
  for (int seen; (seen = count.load(std::memory_order_acquire)) < meeting;) {
    if (waited > kLate) {
      count.wait(seen, std::memory_order_acquire);
    } else if (++spins < kSpins) {
      pause();
    } else if (begin == 0) {
      begin = now();
    } else {
      waited = now() - begin;
    }
  }
  return begin == 0 ? 0 : now() - begin;
}

}  // namespace

void Barrier::wait(int member) const {
  if (size == 1) return;
  const int meeting = members[member].count + 1;
  arrive(members[member], meeting);
  for (int other = 0; other < size; ++other) wait_for(members[other], meeting);
}

int crew_members(int parts) {
  if (parts == 1 || crowded_until.load(std::memory_order_relaxed) < now()) return parts;
  return std::min(parts, crowded_members.load(std::memory_order_relaxed));
}

Crew::Crew(Arrivals* arrivals, Wish* wish, int parts, int members, int member)
    : arrivals_(arrivals), wish_(wish), parts_(parts), members_(members), member_(member) {
  if (members > 1) begin_ = now();
  divide();
}

void Crew::divide() {
  mine_ = member_ < members_ ? split(parts_, members_, member_) : Range{0, 0};
}

void Crew::wish_for_fewer(int meeting) {
  const std::atomic_ref wish(wish_->value);
  // Fails where another has wished it at this meeting, or at the last one and this member did not know.
  int64_t known = wish.load(std::memory_order_relaxed);
  if (known >> 32 == halvings_) wish.compare_exchange_strong(known, int64_t(halvings_ + 1) << 32 | meeting);
  crowded_members.store((members_ + 1) / 2, std::memory_order_relaxed);
  crowded_until.store(now() + kCrowded, std::memory_order_relaxed);
}

void Crew::meet_others() {
  const int meeting = ++meetings_;
  arrive(arrivals_[member_], meeting);
  int64_t waited = 0;
  for (int other = 0; other < members_; ++other) waited = std::max(waited, wait_for(arrivals_[other], meeting));
  if (waited > kLate) {
    // Parts may differ in size, by a good share of what a step takes.
    const int64_t step = (now() - begin_ - waited) / meeting;
    if (waited > 2 * step) wish_for_fewer(meeting);
  }
  // All who come to a meeting know what was wished at an earlier one, and only some of them what is wished at this one.
  const int64_t wish = std::atomic_ref(wish_->value).load(std::memory_order_relaxed);
  const int halvings = static_cast<int>(wish >> 32) - ((wish & 0xffffffff) >= meeting ? 1 : 0);
  if (halvings == halvings_) return;
  for (; halvings_ < halvings; ++halvings_) members_ = (members_ + 1) / 2;
  divide();
}

}  // namespace weft::rnn
