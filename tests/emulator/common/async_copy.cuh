// Asynchronous copies: each is done at once or as late as its thread's wait allows.
#pragma once
#include <deque>
#include <map>

#include "emulator.h"

namespace weft {

struct Copies {
  std::deque<std::vector<std::function<void()>>> groups{1};
};
inline std::map<const emulator::Fiber*, Copies> copies;
inline std::mt19937 when;

template <int kBytes>
inline void copy_some(void* to, const void* from, int bytes) {
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kBytes != 0; };
  if (misaligned(to) || misaligned(from)) emulator::fail("misaligned copy");
  if (bytes < 0 || bytes > kBytes) emulator::fail("copy of more bytes than it has");
  const auto copy = [=] {
    std::memcpy(to, from, bytes);
    std::memset(static_cast<char*>(to) + bytes, 0, kBytes - bytes);
  };
  if (when() % 2) return copy();
  copies[emulator::current].groups.back().push_back(copy);
}

template <int kBytes>
inline void copy_async(void* to, const void* from) {
  copy_some<kBytes>(to, from, kBytes);
}

inline void copy_async_padded(void* to, const void* from, int bytes) {
  copy_some<16>(to, from, bytes);
}

inline void copy_commit() {
  copies[emulator::current].groups.emplace_back();
}

template <int kPending>
inline void copy_wait() {
  auto& groups = copies[emulator::current].groups;
  for (; groups.size() > kPending + 1; groups.pop_front()) {
    for (const auto& copy : groups.front()) copy();
  }
}

}  // namespace weft
