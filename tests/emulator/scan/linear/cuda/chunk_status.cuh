// What blocks tell each other by tiles: words and statuses arrive late and in any order.
#pragma once
#include "emulator.h"

namespace weft::scan {

constexpr uint32_t kTotal = 1;
constexpr uint32_t kState = 2;
constexpr uint64_t kTurned = 0x7ff0'5765'6674'0001;

// 0: they come as they come; 1: totals are seen long before states; 2: states alone are ever seen first.
inline int favoured = 0;

inline void put_word(uint64_t* to, double word) {
  uint64_t bits;
  std::memcpy(&bits, &word, 8);
  emulator::messages.push_back([=] { *to = bits ^ kTurned; });
}
inline uint64_t look_at_word(const uint64_t* from) {
  return *from;
}
inline double to_word(uint64_t seen) {
  double word;
  seen ^= kTurned;
  std::memcpy(&word, &seen, 8);
  return word;
}
inline double wait_for_word(const uint64_t* from, uint64_t seen) {
  for (; seen == 0; seen = *from) emulator::yield();
  return to_word(seen);
}
inline void publish_status(uint32_t* status, uint32_t value) {
  if (favoured == 2 && value == kTotal) return;
  emulator::messages.push_back([=] { *status = std::max(*status, value); });
}
inline uint32_t look_at_status(const uint32_t* status) {
  for (int i = favoured == 1 ? 20 : 1; i > 0; --i) emulator::yield();
  return *status;
}
inline int64_t take_tile(unsigned long long* counter) {
  emulator::yield();
  return int64_t((*counter)++);
}

}  // namespace weft::scan
