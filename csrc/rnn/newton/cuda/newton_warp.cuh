// Algorithm "newton" for H <= 32: a warp per chunk of time and sequence, all resident, so that they may wait for each
// other; see rnn/newton/chunks.h for the rounds.
//
// A warp keeps the recurrent weights in registers for all of its walks. It hears from its left neighbour alone, once a
// round: the end of the chunk there, and whether it has changed. Which message it uses follows from the round, never
// from who was first, so that all runs give the same bits. After each round from the second on all warps of a sequence
// meet at a counter, which tells whether another one follows. Sequences never wait for each other.
//
// Cost: chunk length and memory of the net in steps, and about 2 us for each round. A net that never forgets costs its
// chain, of which the steps of the first two chunks are walked beside others that walk, too.
#pragma once
#include "rnn/newton/cuda/forward_walk.cuh"
#include "rnn/newton/cuda/neighbours.cuh"
#include "rnn/newton/cuda/newton_kernels.h"
#include "scan/newton/counters.jit.cuh"

namespace weft::rnn {
namespace {

// Messages of a sequence, in two slots, of the rounds in turn. Words of a chunk's end, one for each state and half of a
// double, HP lanes wide.
template <Cell cell, int HP, typename scalar>
struct Messages {
  static constexpr int kHalves = sizeof(scalar) / 4, kWords = states_of(cell) * kHalves;
  static constexpr int kSlots = 2, kCounters = 3;

  // What the counters sum up over all rounds of a turn, and how many have arrived.
  static constexpr int kCountBits = 20;
  static_assert(kMostChunks * kMostChunks / 2 < 1 << kCountBits);
  struct Counts {
    int64_t changed, closer;
  };

  uint64_t* counters;  // of the rounds in turn, and of who has left what it stored to the front
  uint64_t* words;     // (kSlots, chunks, kWords, HP)
  int64_t chunks;

  static constexpr int64_t count(int64_t chunks) { return kCounters + kSlots * chunks * kWords * HP; }

  __device__ __forceinline__ Messages(uint64_t* all, int64_t b, int64_t chunks_)
      : counters(all + b * count(chunks_)), words(counters + kCounters), chunks(chunks_) {}

  __device__ __forceinline__ uint64_t* of(int slot, int64_t chunk) const {
    return words + (slot * chunks + chunk) * (kWords * HP) + int(threadIdx.x) % kWarp;
  }

  __device__ __forceinline__ static uint32_t half_of(float x, int) { return __float_as_uint(x); }
  __device__ __forceinline__ static uint32_t half_of(double x, int half) {
    return uint32_t(uint64_t(__double_as_longlong(x)) >> (32 * half));
  }
  __device__ __forceinline__ static void from_halves(const uint32_t* halves, float& x) {
    x = __uint_as_float(halves[0]);
  }
  __device__ __forceinline__ static void from_halves(const uint32_t* halves, double& x) {
    x = __longlong_as_double((long long)(uint64_t(halves[1]) << 32 | halves[0]));
  }

  // The end of a chunk, and whether it has changed: the message of this number, at least 1, in a slot.
  __device__ __forceinline__ void put(int slot, int64_t chunk, uint32_t number, bool changed, scalar h, scalar c,
                                      bool own) const {
    uint64_t* const to = of(slot, chunk);
    const scalar states[2] = {h, c};
    if (!own) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      store_word(to + i * HP, tagged(2 * number + changed, half_of(states[i / kHalves], i % kHalves)));
  }

  // Waits for it; whether the end has changed.
  __device__ __forceinline__ bool wait(int slot, int64_t chunk, uint32_t number, scalar& h, scalar& c, bool own) const {
    const uint64_t* const from = of(slot, chunk);
    uint64_t seen[kWords] = {};
    uint32_t halves[kWords];
    if (own) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) seen[i] = load_word(from + i * HP);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        while (seen[i] >> 33 != number) {
          rest<40>();
          seen[i] = load_word(from + i * HP);
        }
        halves[i] = uint32_t(seen[i]);
      }
      from_halves(halves, h);
      if constexpr (has_c(cell)) from_halves(halves + kHalves, c);
    }
    return __any_sync(~0u, own && (seen[0] >> 32 & 1));
  }

  // All warps of the sequence meet, each with what it has to count; `before` is what the counter had been when they
  // last met there. Returns the sums.
  __device__ __forceinline__ Counts meet(int64_t round, bool changed, bool closer, uint64_t& before) const {
    uint64_t* const counter = counters + round % 2;
    const uint64_t wanted = uint64_t(round / 2 * chunks);
    uint64_t seen = 0;
    if (threadIdx.x % kWarp == 0) {
      add_to_word(counter, uint64_t(1) << 2 * kCountBits | uint64_t(closer) << kCountBits | uint64_t(changed));
      for (seen = load_word(counter); seen >> 2 * kCountBits != wanted; seen = load_word(counter)) rest<100>();
    }
    seen = __shfl_sync(~0u, seen, 0);
    const uint64_t now = seen - before;
    before = seen;
    constexpr uint64_t kMask = (uint64_t(1) << kCountBits) - 1;
    return {int64_t(now & kMask), int64_t(now >> kCountBits & kMask)};
  }

  // What a warp has stored is there before what the front stores in its place, who waits for so many of them.
  __device__ __forceinline__ unsigned* left() const {
    return reinterpret_cast<unsigned*>(counters + 2);
  }
  __device__ __forceinline__ void leave() const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) release_one(left());
  }
  __device__ __forceinline__ void wait_for(int64_t others) const {
    if (threadIdx.x % kWarp == 0) {
      while (acquire(left()) != unsigned(others)) rest<100>();
    }
    __syncwarp();
  }
};

// NaN stays.
template <typename scalar>
__device__ __forceinline__ scalar largest_of_warp(scalar x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const scalar other = __shfl_xor_sync(~0u, x, lanes);
    x = other <= x ? x : other;
  }
  return x;
}

template <Cell cell, int HP, typename scalar>
using ChunkWalk = ForwardWalk<cell, HP, scalar, true>;

template <Cell cell, int HP, typename scalar>
__device__ __forceinline__ void walk_chunk(const ScanShape& shape, const WarpForward<scalar>& a,
                                           const NewtonWarps& warps,
                                           typename ChunkWalk<cell, HP, scalar>::Shared& shared) {
  using Walk = ChunkWalk<cell, HP, scalar>;
  const TimeChunks& chunks = warps.chunks;
  const int64_t chunk = blockIdx.x / shape.B, b = blockIdx.x % shape.B, last = chunks.count - 1;
  const int64_t first = chunk * chunks.length, length = least(chunks.length, shape.T - first);
  const Messages<cell, HP, scalar> messages(warps.messages, b, chunks.count);
  Walk walk(shape, a, shared);
  const bool own = walk.own;
  const int unit = walk.unit;

  const bool given = chunk == 0 && a.h0 != nullptr;
  scalar h = given ? a.h0[b * shape.H + unit] : scalar(0);
  scalar c = has_c(cell) && given ? a.c0[b * shape.H + unit] : scalar(0);
  scalar apart = scalar(0), start_h = h, start_c = c;
  walk.template begin<false>(shape, a, b, first, length);
  walk.template walk<false>(h, c, apart);
  scalar end_h = h, end_c = c;
  // The last chunk has nobody to tell.
  const auto put = [&](int64_t round, bool changed) {
    if (chunk < last) messages.put(int(round % 2), chunk, uint32_t(round), changed, end_h, end_c, own);
  };
  put(1, true);

  int64_t redone = 0, round = 1;
  bool ready = false;  // what a walk reads is on its way
  bool closer = false;
  // How far the lane's states are from those of before.
  const auto moved = [&](scalar from_h, scalar from_c) {
    const scalar by_h = own ? mismatch(h, from_h) : scalar(0),
                 by_c = has_c(cell) && own ? mismatch(c, from_c) : scalar(0);
    return by_c <= by_h ? by_h : by_c;
  };
  // Walks again from the end of the left neighbour, where that changed in the round before; whether the own end then
  // has.
  const auto follow = [&] {
    if (chunk == 0) return false;
    if (!ready) walk.template begin<true>(shape, a, b, first, length);
    ready = true;
    if (!messages.wait(int(round - 1) % 2, chunk - 1, uint32_t(round - 1), h, c, own)) return false;
    // Spare lanes go with the last unit.
    h = __shfl_sync(~0u, h, unit);
    if constexpr (has_c(cell)) c = __shfl_sync(~0u, c, unit);
    const scalar start_by = moved(start_h, start_c);
    start_h = h, start_c = c;
    const typename Walk::End end = walk.template walk<true>(h, c, apart);
    ready = false;
    redone += end.walked;
    if (end.met) return false;
    closer = 2 * largest_of_warp(moved(end_h, end_c)) <= largest_of_warp(start_by);
    end_h = h, end_c = c;
    return true;
  };

  bool alone = false;
  uint64_t before[2] = {};
  int64_t changed_before = last;
#pragma unroll 1
  while (round < chunks.count) {
    ++round;
    const bool changed = follow();
    put(round, changed);
    const bool counts = changed && chunk < last;
    const auto all = round % 2 == 0 ? messages.meet(round, counts, counts && closer, before[0])
                                    : messages.meet(round, counts, counts && closer, before[1]);
    if (all.changed == 0) break;
    if (few_meet(round, chunks.count, all.changed, all.closer, changed_before)) {
      alone = true;
      break;
    }
    changed_before = all.changed;
  }
  const int64_t front = alone ? round - 1 : last;
  if (alone && chunk > front) messages.leave();
  if (alone && chunk == front) {
    const int64_t from = round * chunks.length, rest_of_steps = shape.T - from;
    messages.wait_for(last - front);
    walk.template begin<false>(shape, a, b, from, rest_of_steps);
    walk.template walk<false>(end_h, end_c, apart);
    redone += rest_of_steps;
  }
  copy_wait<0>();

  if (chunk == front && own) {
    a.h_n[b * shape.H + unit] = end_h;
    if constexpr (has_c(cell)) a.c_n[b * shape.H + unit] = end_c;
  }
  if (warps.statistics == nullptr) return;
  apart = largest_of_warp(apart);
  if (walk.lane != 0) return;
  int64_t* const statistics = warps.statistics + 4 * b;
  scan::add_count(statistics + 1, redone);
  scan::raise_count(statistics + 2, int64_t(__float_as_uint(float(apart))));
  if (chunk == front) {
    statistics[0] = round;
    statistics[3] = alone;
  }
}

}  // namespace
}  // namespace weft::rnn
