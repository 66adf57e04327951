#pragma once
#include "emulator.h"

namespace weft::cluster {

inline void barrier() {
  emulator::meet(emulator::current->block->cluster->meeting);
}

inline unsigned shared_address(unsigned own_address, unsigned of_rank) {
  if (own_address >> emulator::kRankBits) emulator::fail("address that is already one of the cluster");
  return own_address | (of_rank + 1) << emulator::kRankBits;
}

inline void arrivals_init(unsigned barrier) {
  emulator::Block& block = *emulator::current->block;
  emulator::shared_at(barrier, 8);
  if (block.arrivals_at == 0) block.arrivals_at = barrier;
  emulator::Arrivals& arrivals = emulator::arrivals_at(block, barrier);
  if (arrivals.initialised) emulator::fail("a barrier is initialised twice");
  arrivals.initialised = true;
}

inline void arrivals_expect(unsigned barrier, unsigned bytes) {
  emulator::Arrivals& arrivals = emulator::arrivals_at(*emulator::current->block, barrier);
  if (!arrivals.initialised) emulator::fail("a barrier is not initialised");
  if (arrivals.pending == 0) emulator::fail("a second arrival in a phase");
  arrivals.bytes += bytes;
  if (arrivals.bytes >= 1 << 20) emulator::fail("more bytes than a barrier counts");
  --arrivals.pending;
  arrivals.advance();
}

inline void arrivals_wait(unsigned barrier, unsigned parity) {
  const emulator::Arrivals& arrivals = emulator::arrivals_at(*emulator::current->block, barrier);
  for (long i = 0; (arrivals.phase & 1) == parity; ++i) {
    if (i == 10'000'000) emulator::fail("waits for ever");
    emulator::yield();
  }
}

inline void send(unsigned address, uint4 v, unsigned barrier) {
  emulator::Block& to = emulator::block_at(address);
  if (&emulator::block_at(barrier) != &to) emulator::fail("a message and its barrier are in different blocks");
  unsigned char* const at = emulator::shared_at(to, address & ((1u << emulator::kRankBits) - 1), 16);
  emulator::Arrivals& arrivals = emulator::arrivals_at(to, barrier);
  emulator::messages.push_back([=, &to, &arrivals] {
    if (to.running == 0) emulator::fail("a message to a block that has ended");
    std::memcpy(at, &v, 16);
    arrivals.bytes -= 16;
    arrivals.advance();
  });
}

}  // namespace weft::cluster
