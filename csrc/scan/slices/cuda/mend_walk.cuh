// x[k] += v[k], v[k] = A[k] v[k-1], and the same of gradients (SliceMend), each channel by one lane.
//
// Floor: A and x are read, x is written; with gradients the x before is read and grad_A written, too. All as far only
// as v still shows in a float.
//
// Decomposition, shared memory: those of the scan's own walk (scan/linear/cuda/diagonal_walk.cuh). What is on its way
//   when the last channel of a warp ends is read for nothing: all stages of the ring but one.
// Registers: v, in double, which neither leaves its range before a float does nor adds roundings of its own. Of nothing
// an infinite A makes nothing.
#pragma once
#include "scan/linear/cuda/diagonal_walk.cuh"
#include "scan/slices/cuda/mend_walk.h"

namespace weft::scan {

// All addresses, strides and H are multiples of 16 bytes.
template <typename S, bool kGradients>
__device__ void run_mend_walk(const SliceMend& m, const Between<kGradients>& between, int64_t slabs_per_row,
                              unsigned char* ring) {
  using W = WalkShape<S, kGradients, true>;
  using T = acc_t<S>;
  using Number = typename Packed<T>::Number;
  constexpr int kChannels = W::kChannels, kSteps = W::kSteps, kStages = W::kStages, kSize = int(sizeof(S));
  struct alignas(W::kLaneBytes) Lane {
    S of[kChannels];
  };
  struct Others {
    T of[kChannels];
  };
  const int lane = int(threadIdx.x);
  const int64_t row = blockIdx.x / slabs_per_row, h0 = blockIdx.x % slabs_per_row * W::kWidth;
  const int64_t h = h0 + lane * kChannels, left = (m.H - h0) * kSize;
  const bool of_A = kGradients && m.grad_A != nullptr;
  auto slab = [&](const void* base, int64_t offset) { return static_cast<const S*>(base) + offset + h0; };
  WalkInput<W> A(slab(m.A, row * m.A_b), m.A_t * kSize, left, lane);
  WalkInput<W> values(slab(m.x, row * m.x_b), m.x_t * kSize, left, lane);
  WalkInput<W> before(of_A ? slab(m.before, row * m.before_b) : nullptr, m.before_t * kSize, left, lane);
  const int64_t stages = (m.T + kSteps - 1) / kSteps;
  auto fill = [&](int64_t stage, int place) {
    if (stage < stages) {
      unsigned char* const to = ring + place * W::kStageBytes;
      const int64_t steps = m.T - stage * kSteps;
      A.copy(to, 0, steps);
      values.copy(to + W::kInputBytes, 0, steps);
      if constexpr (kGradients) before.copy(to + 2 * W::kInputBytes, 0, steps - 1);  // the last is given m.first
    }
    copy_commit();  // as many groups as stages
  };

  // The first rows are on their way while what comes in is found.
  bool comes = kGradients;
  if (between.messages == nullptr) {
    comes = m.came == nullptr || *m.came != 0;
  } else if constexpr (!kGradients) {
    const int64_t flag = slice_message_numbers(between.B * between.H, between.B * between.H) - 1;
    for (int64_t i = 0; i < between.order; ++i) comes |= between.template message<Number>(i)[flag] != 0;
  }
  for (int i = 0; comes && i < kStages - 1; ++i) fill(i, i);
  double v[kChannels];
  bool live[kChannels];  // whether v still shows
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const int64_t channel = row * m.H + h + c;
    live[c] = h + c < m.H;
    if (live[c] && between.messages != nullptr) {
      if constexpr (kGradients) {
        carry_back_between_slices<T>(between, channel);
      } else {
        carry_between_slices<T>(between, channel);
      }
    }
    v[c] = live[c] ? double(static_cast<const T*>(m.state)[channel]) : 0.0;
  }
  if (!comes) return;

  S* x = static_cast<S*>(m.x) + row * m.x_b + h;
  S* grad_A = static_cast<S*>(m.grad_A) + row * m.grad_A_b + h;
  int place = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    copy_wait<kStages - 2>();
    // What the other lanes have copied is there, and all are done with the place that is filled next.
    __syncwarp();
    fill(stage + kStages - 1, place == 0 ? kStages - 1 : place - 1);
    const unsigned char* const base = ring + place * W::kStageBytes;
    auto read = [&](int input, int i) {
      return reinterpret_cast<const Lane*>(base + input * W::kInputBytes + i * W::kRowBytes)[lane];
    };
    bool shows[kChannels] = {};  // in any step of the stage: that it does not in one may be because x is large there
    // `whole`: all channels of the warp are live, as at first. Known of a stage, so that no step has a branch.
    auto put = [&](S* to, const Lane& value, auto whole) {
      if constexpr (decltype(whole)::value) {
        *reinterpret_cast<Lane*>(to) = value;
      } else {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (live[c]) to[c] = value.of[c];
        }
      }
    };
    auto step = [&](const Lane& a, Lane value, const Others& previous, bool exists, auto whole) {
      Lane gradient;
      bool changes = sizeof(S) == sizeof(T);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if constexpr (!kGradients) v[c] = v[c] == 0 ? 0 : v[c] * double(to_acc(a.of[c]));
        const T old = to_acc(value.of[c]), mended = old + T(v[c]);
        shows[c] |= !(mended == old || old != old);
        value.of[c] = from_acc<S>(mended);
        changes = changes || !(to_acc(value.of[c]) == old);
        if constexpr (kGradients) {
          gradient.of[c] = from_acc<S>(mended * previous.of[c]);
          v[c] = v[c] == 0 ? 0 : v[c] * double(to_acc(a.of[c]));
        }
      }
      put(x, value, whole);
      x += m.x_t;
      if constexpr (kGradients) {
        // Of a narrower type it was made of lambda as it was before it was rounded: it stays where lambda does.
        static_assert(sizeof(S) == sizeof(T) || kChannels == 1);
        if (of_A && exists && changes) put(grad_A, gradient, whole);
        grad_A += m.grad_A_t;
      }
    };
    auto previous = [&](int i) {
      const Lane there = kGradients ? read(2, i) : Lane{};
      Others others;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) others.of[c] = to_acc(there.of[c]);
      return others;
    };
    auto all_steps = [&](auto whole) {
      Lane a[kSteps], value[kSteps];
      Others other[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) a[i] = read(0, i), value[i] = read(1, i), other[i] = previous(i);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) step(a[i], value[i], other[i], true, whole);
    };
    const int64_t steps = m.T - stage * kSteps;
    if (steps > kSteps || (!kGradients && steps == kSteps)) {
      bool all = true;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) all &= live[c];
      if (__all_sync(~0u, all)) {
        all_steps(std::true_type{});
      } else {
        all_steps(std::false_type{});
      }
    } else {
      const int last = int(steps) - 1;
      for (int i = 0; i < last; ++i) step(read(0, i), read(1, i), previous(i), true, std::false_type{});
      // Without a state before the first step its A has no gradient, also where lambda is not finite.
      const bool exists = kGradients && m.first != nullptr;
      Others first;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        first.of[c] = exists && h + c < m.H ? static_cast<const T*>(m.first)[row * m.H + h + c] : T(0);
      }
      step(read(0, last), read(1, last), first, exists, std::false_type{});
    }
    // What is as it was stays so from here on. A channel ends by itself, whatever its neighbours do.
    bool any = false;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) any |= live[c] = live[c] && shows[c];
    if (!__any_sync(~0u, any)) break;
    place = place + 1 == kStages ? 0 : place + 1;
  }
  copy_wait<0>();  // nothing may come into the memory of a block that has ended
}

}  // namespace weft::scan
