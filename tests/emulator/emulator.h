// Runs a CUDA kernel on a processor, to test it where there is no GPU: every CUDA thread is a fiber, and a scheduler
// that wants to break things chooses which runs. Blocks run at speeds that differ by a factor of a hundred; what one
// sends another, or publishes in global memory, arrives late and in any order. Accesses to shared memory, barriers in
// shared memory and messages to other blocks are checked; a deadlock, like everything that is wrong, ends the process.
//
// Warps are not in lockstep; their collective operations wait for all 32 lanes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "context.h"

namespace emulator {

[[noreturn]] void fail(const char* why);

struct Index {
  unsigned x;
};
struct Fiber;

// Where `expected` fibers meet.
struct Meeting {
  int expected = 0, arrived = 0;
  std::vector<Fiber*> waiting;
};

constexpr int kWords = 8;  // that a lane brings to a collective operation
struct Warp {
  Meeting meeting;
  uint32_t brought[2][32][kWords];  // two, so that the next operation does not wait for the readers of this one
  int turn[32] = {};
};

// An mbarrier whose phase ends when one arrival and all expected bytes are there.
struct Arrivals {
  bool initialised = false;
  int pending = 1;
  long bytes = 0;
  unsigned phase = 0;
  void advance() {
    if (pending == 0 && bytes == 0) ++phase, pending = 1;
  }
};

struct Block;
struct Cluster {
  Meeting meeting;
  std::vector<Block*> blocks;
};

// Who has stored 16 bytes of shared memory by store_shared, and how often it had fenced by then.
struct Stored {
  const Fiber* by = nullptr;
  unsigned fences = 0;
};

struct Block {
  Cluster* cluster = nullptr;
  std::vector<unsigned char> storage;
  std::vector<Stored> stored;  // by 16 bytes
  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  std::map<uint32_t, Arrivals> arrivals;  // by address
  Meeting meeting, others[16];            // of all threads, and of those that name a barrier
  std::vector<std::unique_ptr<Warp>> warps;
  int running = 0;
  double speed = 1;
};

struct Fiber {
  Context context;
  Index thread, block_index;
  Block* block;
  Warp* warp;
  int lane;
  bool done = false;
  unsigned fences = 0;  // after which others than threads see what it has stored in shared memory
  std::deque<std::vector<std::function<void()>>> copies{1};  // that nobody has waited for, by group
};

inline Fiber* current = nullptr;
inline Context scheduler;
inline std::vector<Fiber*> runnable, polling;        // the others have found nothing yet of what they wait for
inline std::vector<std::function<void()>> messages;  // on their way

// emulator.cpp has these, which are compiled once for all kernels.
void leave();
void yield();
// For whoever asks again and again: those who work have most of the turns, so that little time goes into asking.
void poll();
void meet(Meeting& m);

// Meets without waiting.
inline void arrive(Meeting& m) {
  if (++m.arrived == m.expected) {
    m.arrived = 0;
    runnable.insert(runnable.end(), m.waiting.begin(), m.waiting.end());
    m.waiting.clear();
  }
  yield();
}

using Brought = const uint32_t (*)[kWords];
// What every lane of the warp has brought.
Brought gather(const uint32_t* mine, int count);

// Shared memory is addressed from 0; in the block of rank r of a cluster, from (r + 1) << kRankBits.
constexpr int kRankBits = 26;
inline unsigned char* shared_at(Block& block, uint32_t address, uint32_t bytes) {
  if (address % bytes != 0) fail("misaligned access to shared memory");
  if (address + bytes > block.shared_bytes) fail("access beyond shared memory");
  return block.shared + address;
}
inline unsigned char* shared_at(uint32_t address, uint32_t bytes) {
  if (address >> kRankBits) fail("address of another block in an access to the own one");
  return shared_at(*current->block, address, bytes);
}
inline Stored& stored_at(uint32_t address) {
  Block& block = *current->block;
  if (block.stored.empty()) block.stored.resize(block.shared_bytes / 16);
  return block.stored[address / 16];
}
inline Block& block_at(uint32_t address) {
  const auto& blocks = current->block->cluster->blocks;
  const uint32_t rank = address >> kRankBits;
  if (rank == 0 || rank > blocks.size()) fail("address of no block of the cluster");
  return *blocks[rank - 1];
}
inline Arrivals& arrivals_at(Block& block, uint32_t address) {
  const auto found = block.arrivals.find(address & ((1u << kRankBits) - 1));
  if (found == block.arrivals.end()) fail("no barrier at this address");
  return found->second;
}

// Runs `kernel` in blocks of `threads`, `cluster` of which are a cluster.
void launch(void (*kernel)(), int blocks, int threads, int cluster, size_t shared_bytes, unsigned seed);

}  // namespace emulator

// CUDA, as far as the kernels use it.
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block_index)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
using std::max;
using std::min;

inline unsigned __float_as_uint(float x) {
  unsigned y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline void __nanosleep(unsigned) {
  emulator::poll();
}
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long x) {
  emulator::yield();
  return (*to += x) - x;
}
inline void __syncthreads() {
  emulator::meet(emulator::current->block->meeting);
}
inline void __syncwarp() {
  emulator::meet(emulator::current->warp->meeting);
}
inline float __shfl_xor_sync(unsigned, float x, int lanes) {
  const unsigned mine = __float_as_uint(x);
  return __uint_as_float(emulator::gather(&mine, 1)[emulator::current->lane ^ lanes][0]);
}
// Whoever polls asks this in a loop: true lets others run first.
inline bool __any_sync(unsigned, bool x) {
  const unsigned mine = x;
  const emulator::Brought all = emulator::gather(&mine, 1);
  const bool any = std::any_of(all, all + 32, [](const auto& lane) { return lane[0] != 0; });
  if (any) emulator::poll();
  return any;
}
