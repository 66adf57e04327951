// csrc/common/cuda/ptx.jit.cuh for a processor: what the tested kernels use of it, by the same names.
#pragma once
#include "emulator.h"

namespace weft {

using u32 = unsigned int;
using u64 = unsigned long long;

// Conversions.
inline float half_to_float(unsigned short x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return y;
}
inline unsigned short float_to_half(float x) {
  const _Float16 y = x;
  unsigned short z;
  std::memcpy(&z, &y, 2);
  return z;
}
inline float bfloat16_to_float(unsigned short x) {
  return __uint_as_float(u32(x) << 16);
}
inline unsigned short float_to_bfloat16(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float fast_exp2(float x) {
  return std::exp2(x);
}
inline float fast_reciprocal(float x) {
  return 1 / x;
}

// Shared memory.
inline unsigned char* dynamic_shared_memory() {
  return emulator::current->block->shared;
}
inline u32 shared_address(const void* p) {
  return u32(static_cast<const unsigned char*>(p) - emulator::current->block->shared);
}
inline uint4 load_shared(u32 address) {
  uint4 v;
  std::memcpy(&v, emulator::shared_at(address, 16), 16);
  return v;
}
inline void store_shared(u32 address, uint4 v) {
  std::memcpy(emulator::shared_at(address, 16), &v, 16);
  emulator::stored_at(address) = {emulator::current, emulator::current->fences};
}

// Threads of a block.
template <int kBarrier, int kThreads>
inline void named_barrier() {
  emulator::Meeting& meeting = emulator::current->block->others[kBarrier];
  meeting.expected = kThreads;
  emulator::meet(meeting);
}

// Asynchronous copies: each is done at once, before who still reads what it overwrites is ready, or at its thread's
// wait, when who has not waited has read.
inline std::mt19937 when;
inline long long copied_bytes = 0;

template <int kBytes>
inline void copy_some(void* to, const void* from, int bytes) {
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kBytes != 0; };
  if (misaligned(to) || misaligned(from)) emulator::fail("misaligned copy");
  if (bytes < 0 || bytes > kBytes) emulator::fail("copy of more bytes than it has");
  const auto copy = [=] {
    std::memcpy(to, from, bytes);
    std::memset(static_cast<char*>(to) + bytes, 0, kBytes - bytes);
  };
  copied_bytes += bytes;
  if (when() % 2) return copy();
  emulator::current->copies.back().push_back(copy);
}
template <int kBytes>
inline void copy_async(void* to, const void* from) {
  copy_some<kBytes>(to, from, kBytes);
}
inline void copy_async_padded(void* to, const void* from, int bytes) {
  copy_some<16>(to, from, bytes);
}
inline void copy_commit() {
  emulator::current->copies.emplace_back();
}
template <int kPending>
inline void copy_wait() {
  auto& groups = emulator::current->copies;
  for (; groups.size() > kPending + 1; groups.pop_front()) {
    for (const auto& copy : groups.front()) copy();
  }
}

// Barriers in shared memory.
inline void mbarrier_init(u32 barrier) {
  emulator::Block& block = *emulator::current->block;
  emulator::shared_at(barrier, 8);
  emulator::Arrivals& arrivals = block.arrivals[barrier];
  if (arrivals.initialised) emulator::fail("a barrier is initialised twice");
  arrivals.initialised = true;
}
inline void mbarrier_expect(u32 barrier, u32 bytes) {
  emulator::Arrivals& arrivals = emulator::arrivals_at(*emulator::current->block, barrier);
  if (!arrivals.initialised) emulator::fail("a barrier is not initialised");
  if (arrivals.pending == 0) emulator::fail("a second arrival in a phase");
  arrivals.bytes += bytes;
  if (arrivals.bytes >= 1 << 20) emulator::fail("more bytes than a barrier counts");
  --arrivals.pending;
  arrivals.advance();
}
template <bool kFromCluster = false>
inline void mbarrier_wait(u32 barrier, u32 parity) {
  const emulator::Arrivals& arrivals = emulator::arrivals_at(*emulator::current->block, barrier);
  for (long i = 0; (arrivals.phase & 1) == parity; ++i) {
    if (i == 10'000'000) emulator::fail("waits for ever");
    emulator::poll();
  }
}

// Global memory that blocks share: the exchanged tensor, beyond which nothing may be published or polled.
inline const unsigned char *exchanged_begin = nullptr, *exchanged_end = nullptr;
inline void check_exchanged(const void* p) {
  const unsigned char* const at = static_cast<const unsigned char*>(p);
  if (at < exchanged_begin || at + 16 > exchanged_end) emulator::fail("access beyond the exchanged tensor");
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulator::fail("misaligned access to the exchanged tensor");
}
inline uint4 load_relaxed(const void* p) {
  check_exchanged(p);
  uint4 v;
  std::memcpy(&v, p, 16);
  return v;
}
inline void store_relaxed(void* p, uint4 v) {
  check_exchanged(p);
  emulator::messages.push_back([=] { std::memcpy(p, &v, 16); });
}
inline void prefetch_l2(const void* p) {
  if (exchanged_begin != nullptr) return check_exchanged(p);
  *static_cast<const volatile unsigned char*>(p);  // that is there
}
inline void pin(int&) {}

namespace cluster {

inline void barrier() {
  emulator::meet(emulator::current->block->cluster->meeting);
}
inline u32 address_in(u32 of_rank, u32 own_address) {
  if (own_address >> emulator::kRankBits) emulator::fail("address that is already one of the cluster");
  return own_address | (of_rank + 1) << emulator::kRankBits;
}
inline void send(u32 address, uint4 v, u32 barrier) {
  emulator::Block& to = emulator::block_at(address);
  if (to.cluster->blocks.size() < 2) emulator::fail("a message in a cluster of one block");
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

}  // namespace cluster

// Products: the fragments of the PTX manual. times(x, y) is the sum of the products in two registers.
template <typename Times>
inline void mma(float (&d)[4], const u32* a, const u32* b, const Times& times) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const emulator::Brought all = emulator::gather(mine, 6);
  const int row = emulator::current->lane / 4, pair = emulator::current->lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int lower = i / 2, column = pair + i % 2;
    for (int lane = 0; lane < 4; ++lane) {
      for (int half = 0; half < 2; ++half) {
        d[i] += times(all[row * 4 + lane][lower + 2 * half], all[column * 4 + lane][4 + half]);
      }
    }
  }
}
inline void mma_f16(float (&d)[4], const u32* a, const u32* b) {
  mma(d, a, b, [](u32 x, u32 y) {
    return half_to_float(x) * half_to_float(y) + half_to_float(x >> 16) * half_to_float(y >> 16);
  });
}
inline void mma_bf16(float (&d)[4], const u32* a, const u32* b) {
  mma(d, a, b, [](u32 x, u32 y) {
    return bfloat16_to_float(x) * bfloat16_to_float(y) + bfloat16_to_float(x >> 16) * bfloat16_to_float(y >> 16);
  });
}
// Of both operands the tensor core takes 11 significant bits.
inline void mma_tf32(float (&d)[4], const u32* a, const u32* b) {
  mma(d, a, b, [](u32 x, u32 y) { return __uint_as_float(x & 0xffffe000u) * __uint_as_float(y & 0xffffe000u); });
}
inline void mma_half_tf32(float (&d)[4], const u32* a, const u32* b) {
  const u32 left[4] = {a[0], a[1], 0, 0}, right[2] = {b[0], 0};
  mma_tf32(d, left, right);
}
inline void split_tf32(float x, u32& high, u32& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

inline u32 round_tf32(u32 x) {
  return (x + 0x1000) & 0xffffe000u;
}
inline u32 cut_tf32(u32 x) {
  return x & 0xffffe000u;
}
inline u32 cut_off_tf32(u32 x) {
  const u32 rest = __float_as_uint(__uint_as_float(x) - __uint_as_float(cut_tf32(x)));
  return (x & 0x7fffffffu) == 0x7f800000u ? 0u : rest;
}

// The first of x and y as bf16, rounded to nearest; their rests.
inline u32 take_bf16(float& x, float& y) {
  const u32 first = float_to_bfloat16(x), second = float_to_bfloat16(y);
  x -= bfloat16_to_float(first);
  y -= bfloat16_to_float(second);
  return first | second << 16;
}

inline void fence_copy_engine() {
  ++emulator::current->fences;
}
inline void mbarrier_publish() {}

}  // namespace weft
