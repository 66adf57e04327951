// What the walkers of chunks tell each other: words and arrivals come late and in any order.
#pragma once
#include "emulator.h"

namespace weft::rnn {

// The worst order: what one walker says is heard only when nobody can go on without it.
inline bool latest = false;

inline void say(std::function<void()> message) {
  if (latest && emulator::current->block_index.x % 2 == 0) {
    // A message that comes back as long as there is somebody to run.
    auto late = std::make_shared<std::function<void()>>();
    auto patience = std::make_shared<int>(40);
    *late = [=] {
      if (--*patience > 0 && !emulator::runnable.empty()) {
        emulator::messages.push_back(*late);
      } else {
        message();
      }
    };
    emulator::messages.push_back(*late);
    return;
  }
  emulator::messages.push_back(std::move(message));
}

inline uint64_t tagged(uint32_t tag, uint32_t bits) {
  return uint64_t(tag) << 32 | bits;
}
inline void put_tagged(uint64_t* to, uint64_t word) {
  say([=] { *to = word; });
}
inline uint64_t look_at_tagged(const uint64_t* from) {
  return *from;
}
inline void add_to_counter(uint64_t* counter, uint64_t x) {
  say([=] { *counter += x; });
}
template <int kNanoseconds>
inline void rest() {
  emulator::yield();
}

}  // namespace weft::rnn
