// csrc/common/cuda/words.jit.cuh on a processor.
#pragma once
#include "common/cuda/ptx.jit.cuh"

namespace weft {

// Words arrive late, those of one place in order. What a test may ask for:
inline std::function<bool(const void* to, uint64_t word, size_t bytes)> lost;  // words that never arrive
inline int turns_of_a_look = 1;  // how often others run before a word of 32 bits is read
inline bool latest = false;      // what every other block says is heard only when nobody can go on without it

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
template <typename W>
inline W load_word(const W* p) {
  for (int i = sizeof(W) == 4 ? turns_of_a_look : *p == 0; i > 0; --i) emulator::yield();
  return *p;
}
template <typename W>
inline void load_words(const W* p, W& first, W& second) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulator::fail("a pair of words that is not aligned");
  emulator::yield();
  first = *p;
  emulator::yield();
  second = p[1];
}
template <typename W>
inline void store_word(W* p, W word) {
  if (lost && lost(p, word, sizeof(W))) return;
  say([=] { *p = std::max(*p, word); });
}
template <typename W>
inline void add_to_word(W* p, W x) {
  say([=] { *p += x; });
}

inline void release_one(unsigned* counter) {
  ++*counter;
}
inline unsigned acquire(const unsigned* counter) {
  emulator::poll();
  return *counter;
}
inline unsigned arrive(unsigned* counter) {
  emulator::yield();
  return (*counter)++;
}

// Here at once, because the block itself reads it after its next barrier; other blocks find it missing for as long as
// this one is slow.
template <typename Bits>
inline void store_bits(void* to, Bits bits) {
  if (bits == Bits(~Bits(0))) bits = Bits(~Bits(0)) >> 1;
  std::memcpy(to, &bits, sizeof(bits));
}
inline void store_published(float* to, float x) {
  store_bits<unsigned>(to, __float_as_uint(x));
}
inline void store_published(unsigned short* to, unsigned short bits) {
  store_bits<unsigned short>(to, bits);
}
template <typename E, typename Bits>
inline bool load_bits(const E* from, E (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(x) != 0) emulator::fail("misaligned access to what is published");
  std::memcpy(x, from, sizeof(x));
  Bits bits[4];
  std::memcpy(bits, x, sizeof(x));
  return std::any_of(bits, bits + 4, [](Bits b) { return b == Bits(~Bits(0)); });
}
inline bool load_published(const float* from, float (&x)[4]) {
  return load_bits<float, unsigned>(from, x);
}
inline bool load_published(const unsigned short* from, unsigned short (&x)[4]) {
  return load_bits<unsigned short, unsigned short>(from, x);
}

}  // namespace weft
