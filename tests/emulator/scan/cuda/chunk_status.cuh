// What blocks tell each other by tiles: words arrive late and in any order, but before a status that was published
// after them.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "emulator.h"

namespace weft::scan {

constexpr uint32_t kTotal = 1;
constexpr uint32_t kState = 2;

using Pending = std::shared_ptr<std::function<void()>>;
inline std::map<emulator::Warp*, std::vector<Pending>> put_by;
// 0: they come as they come; 1: totals are seen long before states; 2: states alone are ever seen first.
inline int favoured = 0;

inline void deliver(const Pending& word) {
  if (*word) (*word)();
  *word = nullptr;
}

inline double get_word(const double* from) {
  return *from;
}
inline void put_word(double* to, double word) {
  const auto pending = std::make_shared<std::function<void()>>([=] { *to = word; });
  put_by[emulator::current->warp].push_back(pending);
  emulator::messages.push_back([=] { deliver(pending); });
}
inline void publish_status(uint32_t* status, uint32_t value) {
  if (favoured == 2 && value == kTotal) return;
  const auto before = std::move(put_by[emulator::current->warp]);
  put_by[emulator::current->warp].clear();
  emulator::messages.push_back([=] {
    for (const Pending& word : before) deliver(word);
    *status = std::max(*status, value);
  });
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
