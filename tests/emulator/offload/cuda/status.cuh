// What blocks tell each other by tiles: published late, and read when others have run.
#pragma once
#include <set>

#include "emulator.h"

namespace weft::offload {

constexpr uint64_t kOwnCount = uint64_t(1) << 62;
constexpr uint64_t kSumCount = uint64_t(2) << 62;
constexpr uint64_t kCountBits = kOwnCount - 1;

inline uint64_t load_status(const uint64_t* p) {
  emulator::yield();
  return *p;
}
inline void load_statuses(const uint64_t* p, uint64_t& first, uint64_t& second) {
  if (reinterpret_cast<uint64_t>(p) % 16 != 0) emulator::fail("a pair of words that is not aligned");
  first = load_status(p);
  second = load_status(p + 1);
}
// Whether no tile but the first says more than its own count, as if all sums came too late.
inline bool sums_are_late = false;

inline void store_status(uint64_t* p, uint64_t status) {
  static std::set<uint64_t*> said;  // their own
  if (status & kOwnCount) said.insert(p);
  if (status & kSumCount && said.erase(p) && sums_are_late) return;
  // Words of one tile arrive in order.
  emulator::messages.push_back([=] { *p = *p > status ? *p : status; });
}
inline void pause() {}
inline int64_t take_tile(uint64_t* counter) {
  emulator::yield();
  return int64_t((*counter)++);
}

}  // namespace weft::offload
