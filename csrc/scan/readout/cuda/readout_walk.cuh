// y[t] = sum over n of c x[t], x[t] = A x[t-1] + b[t], and its gradients, with states that never leave the chip. B * H
// channels of N states each; the order of processing is that of readout_args.h.
//
// Floor: of a constant A and c and one b for all n, 2 streams of T B H elements forward, and 8 N multiply-adds of four
//   complex numbers' parts, 2 N of real ones, an element: compute binds from some N of 16 on. With N numbers of b, one
//   stream of T B H N elements forward, two with gradients.
//
// Decomposition: a lane has four adjacent states of a channel, so N / 4 lanes (a power of two) have a channel, and a
//   warp 32 to 1 adjacent channels; those of a channel lie 32 / lanes apart, so that what has no n is read by adjacent
//   lanes. Warps run through all steps: nothing is exchanged between them, and the states are those of the recurrence.
// Registers: the states; A and c where they are constant; kSteps steps of what is read. The sums over a channel's lanes
//   are made of kSteps steps at once, halving: log2 rounds of exchanges for all of them together, after which each lane
//   writes a step of its own.
// Gradients: from the last segment of segment_steps() to the first the states are made anew from the one that the
//   forward pass has left, in shared memory, 16 KB of a warp; then lambda walks back over them. Sums over time are kept
//   in the dtype of the state for a segment, in fp64 beyond.
// Cost: forward, per step of a lane, 8 multiply-adds (32 of complex numbers), a load and an exchange, or with a
//   number of b for every state four, with A and c of every step twelve.
#pragma once
#include <cstdint>

#include "scan/linear/cuda/state.cuh"
#include "scan/readout/readout_args.h"

namespace weft::scan {

constexpr int kReadOutStates = 4;  // of a lane

template <typename T>
constexpr DType kTypeOf = sizeof(T) == 16  ? DType::c128
                          : kComplex<T>    ? DType::c64
                          : sizeof(T) == 8 ? DType::f64
                          : sizeof(T) == 4 ? DType::f32
                                           : DType::bf16;

// What is read at every step. kOne: one number of b for all states of a channel; A and c are constant in time. kFull: a
// number of b for every state. kEach: A and c of every step, too, and b of either kind.
enum class Reads { kOne, kFull, kEach };

template <typename T, Reads kReads>
struct ReadOutShape {
  // That are read at once, and with kOne and kFull while those before are walked.
  static constexpr int kSteps = kReads == Reads::kOne                     ? 8
                                : sizeof(T) > 8                           ? 2
                                : kReads == Reads::kFull && sizeof(T) < 8 ? 8
                                                                          : 4;
  static constexpr int kSegment = segment_steps(kTypeOf<T>);
  static constexpr int kSharedBytes = kSegment * kReadOutStates * 32 * int(sizeof(state_t<T>));
  static_assert(kSegment % kSteps == 0);
};

// What one lane has of the problem; a channel has 2^log lanes.
template <typename T>
struct ReadOutLane {
  using State = state_t<T>;
  static constexpr int kStates = kReadOutStates;
  struct States {
    State of[kStates];
  };
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) Four {
    T of[kStates];
  };

  const ReadOut& s;
  int log, lane, n;  // n: its first state
  int owned;         // how many states there are for it; 0 beyond N, and where there is no channel
  int64_t row, h;
  bool whole;  // four at once, aligned

  __device__ ReadOutLane(const ReadOut& s, int log, bool whole, int64_t warp) : s(s), log(log), whole(whole) {
    lane = int(threadIdx.x) % 32;
    const int channels = 32 >> log;
    const int64_t channel = warp * channels + lane % channels;
    n = lane / channels * kStates;
    const bool exists = channel < s.B * s.H;
    row = exists ? channel / s.H : 0, h = exists ? channel % s.H : 0;
    owned = exists ? int(max(int64_t(0), min(int64_t(kStates), s.N - n))) : 0;
  }
  __device__ bool exists() const { return owned > 0; }
  __device__ int64_t at(const Field& f, int64_t t) const { return t * f.t + row * f.b + h * f.h; }

  // Four states of a field at a step, zero where there are none.
  __device__ States load(const Field& f, int64_t t) const {
    States found;
    const T* const from = static_cast<const T*>(f.at) + at(f, t) + n;
    if (whole) {
      Four four{};
      if (owned > 0) four = *reinterpret_cast<const Four*>(from);
#pragma unroll
      for (int r = 0; r < kStates; ++r) found.of[r] = to_state(four.of[r]);
    } else {
#pragma unroll
      for (int r = 0; r < kStates; ++r) found.of[r] = r < owned ? to_state(from[r]) : State{};
    }
    return found;
  }
  // b at a step: four numbers, or one for all. What does not exist must stay zero, whatever b is.
  __device__ States load_b(int64_t t) const {
    if (s.full) return load(s.b, t);
    return same(load_one(s.b, t));
  }
  __device__ State load_one(const Field& f, int64_t t) const {
    return owned > 0 ? to_state(static_cast<const T*>(f.at)[at(f, t)]) : State{};
  }
  __device__ States same(State x) const {
    States all;
#pragma unroll
    for (int r = 0; r < kStates; ++r) all.of[r] = r < owned ? x : State{};
    return all;
  }
  __device__ States start() const {
    if (s.x0.at == nullptr) return States{};
    return load(s.x0, 0);
  }

  // (segments or 1, B, H, N) in the dtype of the state.
  __device__ int64_t kept(int64_t segment) const {
    return ((segment * s.B + row) * s.H + h) * s.N + n;
  }
  __device__ void keep(void* to, int64_t segment, const States& x) const {
    State* const place = static_cast<State*>(to) + kept(segment);
#pragma unroll
    for (int r = 0; r < kStates; ++r) {
      if (r < owned) place[r] = x.of[r];
    }
  }
  __device__ States recall(int64_t segment) const {
    const State* const place = static_cast<const State*>(s.starts) + kept(segment);
    States x;
#pragma unroll
    for (int r = 0; r < kStates; ++r) x.of[r] = r < owned ? place[r] : State{};
    return x;
  }
  // Four numbers of a result of every step.
  __device__ void store(const Result& to, int64_t t, const States& x) const {
    T* const place = static_cast<T*>(to.at) + t * to.t + row * to.b + h * s.N + n;
    if (whole) {  // N is a multiple of four, and results are contiguous
      Four four;
#pragma unroll
      for (int r = 0; r < kStates; ++r) four.of[r] = to_element<T>(x.of[r]);
      if (owned > 0) *reinterpret_cast<Four*>(place) = four;
      return;
    }
#pragma unroll
    for (int r = 0; r < kStates; ++r) {
      if (r < owned) place[r] = to_element<T>(x.of[r]);
    }
  }

  // x after a step. Without x0 there is no A before the first.
  __device__ void step(const States& a, const States& b, bool first, States& x) const {
#pragma unroll
    for (int r = 0; r < kStates; ++r) x.of[r] = first ? b.of[r] : fused(a.of[r], x.of[r], b.of[r]);
  }
  __device__ static State dot(const States& a, const States& x) {
    State sum = times(a.of[0], x.of[0]);
#pragma unroll
    for (int r = 1; r < kStates; ++r) sum = fused(a.of[r], x.of[r], sum);
    return sum;
  }
  __device__ static State total(const States& x) {
    State sum = x.of[0];
#pragma unroll
    for (int r = 1; r < kStates; ++r) sum += x.of[r];
    return sum;
  }
};

__device__ __forceinline__ float exchanged(float x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
__device__ __forceinline__ double exchanged(double x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
template <typename R>
__device__ __forceinline__ Complex<R> exchanged(Complex<R> x, int mask) {
  return {exchanged(x.re, mask), exchanged(x.im, mask)};
}

// The sums over the 2^kLog lanes of a channel of kCount numbers each, stored by who ends up with them: f(i, sum).
template <int kLog, int kCount, typename State, typename F>
__device__ void sum_lanes(State (&part)[kCount], int lane, F f) {
  int mask = 16, first = 0;
  bool stores = true;
  auto halve = [&](auto count) {
    constexpr int kHalf = decltype(count)::value / 2;
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const State kept = upper ? part[i + kHalf] : part[i], sent = upper ? part[i] : part[i + kHalf];
      part[i] = kept;
      part[i] += exchanged(sent, mask);
    }
    first += upper ? kHalf : 0;
    mask >>= 1;
  };
  constexpr int kMost = kCount == 8 ? 3 : kCount == 4 ? 2 : 1, kHalvings = kLog < kMost ? kLog : kMost;
  if constexpr (kHalvings > 0) halve(std::integral_constant<int, kCount>{});
  if constexpr (kHalvings > 1) halve(std::integral_constant<int, kCount / 2>{});
  if constexpr (kHalvings > 2) halve(std::integral_constant<int, kCount / 4>{});
#pragma unroll
  for (int round = kHalvings; round < kLog; ++round) {
    stores = stores && !(lane & mask);
    part[0] += exchanged(part[0], mask);
    mask >>= 1;
  }
  if (!stores) return;
#pragma unroll
  for (int i = 0; i < (kCount >> kHalvings); ++i) f(first + i, part[i]);
}
template <int kCount, typename State, typename F>
__device__ __forceinline__ void sum_channel(int log, State (&part)[kCount], int lane, F f) {
  switch (log) {
    case 0:
      return sum_lanes<0>(part, lane, f);
    case 1:
      return sum_lanes<1>(part, lane, f);
    case 2:
      return sum_lanes<2>(part, lane, f);
    case 3:
      return sum_lanes<3>(part, lane, f);
    case 4:
      return sum_lanes<4>(part, lane, f);
    default:
      return sum_lanes<5>(part, lane, f);
  }
}

// b of some steps, from `first` on: a number or four of each, nothing past `end`.
template <typename T, Reads kReads, int kSteps>
struct ReadOutInput {
  using Lane = ReadOutLane<T>;
  std::conditional_t<kReads == Reads::kOne, typename Lane::State, typename Lane::States> at[kSteps];

  __device__ void fetch(const Lane& my, int64_t first, int64_t end) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      at[i] = {};
      if (first + i >= end) continue;
      if constexpr (kReads == Reads::kOne) {
        at[i] = my.load_one(my.s.b, first + i);
      } else if constexpr (kReads == Reads::kFull) {
        at[i] = my.load(my.s.b, first + i);
      } else {
        at[i] = my.load_b(first + i);
      }
    }
  }
  __device__ typename Lane::States states(const Lane& my, int i) const {
    if constexpr (kReads == Reads::kOne) {
      return my.same(at[i]);
    } else {
      return at[i];
    }
  }
};

template <typename T, Reads kReads>
__device__ void run_readout(const ReadOut& s, int log, bool whole, int64_t warp) {
  using Lane = ReadOutLane<T>;
  using State = state_t<T>;
  using States = typename Lane::States;
  using Shape = ReadOutShape<T, kReads>;
  constexpr int kSteps = Shape::kSteps;
  constexpr bool kEach = kReads == Reads::kEach;
  const Lane my(s, log, whole, warp);
  // A channel's first lane is always in use: whether there is a channel, for all its lanes.
  const bool channel = __shfl_sync(~0u, int(my.exists()), my.lane % (32 >> log));
  const bool no_x0 = s.x0.at == nullptr;
  T* const y = static_cast<T*>(s.y.at) + my.row * s.y.b + my.h;
  States x = my.start(), a{}, c{};
  if constexpr (!kEach) a = my.load(s.A, 0), c = my.load(s.c, 0);
  ReadOutInput<T, kReads, kSteps> b, next;
  if constexpr (!kEach) next.fetch(my, 0, s.T);
  for (int64_t t = 0; t < s.T; t += kSteps) {
    States as[kSteps], cs[kSteps];
    State part[kSteps];
    if constexpr (kEach) {
      b.fetch(my, t, s.T);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        as[i] = my.load(s.A, min(t + i, s.T - 1)), cs[i] = my.load(s.c, min(t + i, s.T - 1));
      }
    } else {
      b = next;
      next.fetch(my, t + kSteps, s.T);
    }
    if (s.starts != nullptr && t % Shape::kSegment == 0) my.keep(s.starts, t / Shape::kSegment, x);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      my.step(kEach ? as[i] : a, b.states(my, i), no_x0 && t + i == 0, x);
      part[i] = Lane::dot(kEach ? cs[i] : c, x);
    }
    sum_channel(log, part, my.lane, [&](int i, State sum) {
      if (channel && t + i < s.T) y[(t + i) * s.y.t] = to_element<T>(sum);
    });
  }
}

// `memory`: kSharedBytes of the warp's own.
template <typename T, Reads kReads>
__device__ void run_readout_gradients(const ReadOutGradients& g, int log, bool whole, int64_t warp,
                                      unsigned char* memory) {
  using Lane = ReadOutLane<T>;
  using State = state_t<T>;
  using States = typename Lane::States;
  using Shape = ReadOutShape<T, kReads>;
  constexpr int kSteps = Shape::kSteps, kSegment = Shape::kSegment, kStates = kReadOutStates;
  constexpr bool kEach = kReads == Reads::kEach;
  const ReadOut& s = g.scan;
  const Lane my(s, log, whole, warp);
  const bool channel = __shfl_sync(~0u, int(my.exists()), my.lane % (32 >> log));
  State* const states = reinterpret_cast<State*>(memory) + my.lane;
  auto place = [&](int i, int r) -> State& { return states[(i * kStates + r) * 32]; };
  const bool no_x0 = s.x0.at == nullptr, each_A = g.A.at != nullptr && !g.sum_A, each_c = g.c.at != nullptr && !g.sum_c;
  States a{}, c{}, lambda{};
  if constexpr (!kEach) a = my.load(s.A, 0), c = my.load(s.c, 0);
  sum_t<State> sum_A[kStates] = {}, sum_c[kStates] = {};
  T* const to_b = static_cast<T*>(g.b.at) + my.row * g.b.b + my.h;
  const int64_t segments = (s.T + kSegment - 1) / kSegment;
  // What a segment begins with is on its way while the one after it is walked back.
  ReadOutInput<T, kReads, kSteps> b, next_b;
  State grads[kSteps], next_grads[kSteps];
  auto fetch_grads = [&](int64_t first) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) next_grads[i] = first + i < s.T ? my.load_one(g.grad, first + i) : State{};
  };
  States next_start = my.recall(segments - 1);
  next_b.fetch(my, (segments - 1) * kSegment, s.T);
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = segment * kSegment;
    const int count = int(min(int64_t(kSegment), s.T - begin)), last = (count - 1) / kSteps * kSteps;
    const States start = next_start;
    States x = start;
    fetch_grads(begin + last);
    for (int i0 = 0; i0 < count; i0 += kSteps) {
      States as[kSteps];
      b = next_b;
      if (i0 + kSteps < count) next_b.fetch(my, begin + i0 + kSteps, s.T);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if constexpr (kEach) as[i] = my.load(s.A, min(begin + i0 + i, s.T - 1));
      }
      // Past the last step a state is made that nobody looks at.
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        my.step(kEach ? as[i] : a, b.states(my, i), no_x0 && begin + i0 + i == 0, x);
#pragma unroll
        for (int r = 0; r < kStates; ++r) place(i0 + i, r) = x.of[r];
      }
    }
    if (segment > 0) {
      next_start = my.recall(segment - 1);
      next_b.fetch(my, begin - kSegment, s.T);
    }
    States few_A{}, few_c{};
    for (int i0 = last; i0 >= 0; i0 -= kSteps) {
      State part[kSteps];
      States as[kSteps], cs[kSteps];  // A of the step that follows
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int64_t t = begin + i0 + i;
        grads[i] = next_grads[i];
        if constexpr (kEach) as[i] = my.load(s.A, min(t + 1, s.T - 1)), cs[i] = my.load(s.c, min(t, s.T - 1));
      }
      if (i0 > 0) fetch_grads(begin + i0 - kSteps);
#pragma unroll
      for (int i = kSteps - 1; i >= 0; --i) {
        const int64_t t = begin + i0 + i;
        part[i] = State{};
        if (t >= s.T) continue;
        States product_A, product_c;
#pragma unroll
        for (int r = 0; r < kStates; ++r) {
          const State a_next = conjugate(kEach ? as[i].of[r] : a.of[r]);
          const State c_now = conjugate(kEach ? cs[i].of[r] : c.of[r]);
          // What does not exist stays zero, whatever the gradient is.
          const State gradient = r < my.owned ? grads[i] : State{};
          const State enters = times(c_now, gradient);
          lambda.of[r] = t + 1 == s.T ? enters : fused(a_next, lambda.of[r], enters);
          const State before = i > 0 || i0 > 0 ? place(i0 + i - (i > 0 || i0 > 0), r) : start.of[r];
          const bool none = t == 0 && no_x0;
          product_A.of[r] = none ? State{} : times(lambda.of[r], conjugate(before));
          product_c.of[r] = times(gradient, conjugate(place(i0 + i, r)));
          few_A.of[r] += product_A.of[r];
          few_c.of[r] += product_c.of[r];
        }
        part[i] = Lane::total(lambda);
        if constexpr (kEach) {
          if (each_A) my.store(g.A, t, product_A);
          if (each_c) my.store(g.c, t, product_c);
        }
        if constexpr (kReads != Reads::kOne) {
          if (g.b.at != nullptr && s.full) my.store(g.b, t, lambda);
        }
      }
      if (g.b.at != nullptr && (kReads == Reads::kOne || !s.full)) {
        sum_channel(log, part, my.lane, [&](int i, State sum) {
          if (channel && i0 + i < count) to_b[(begin + i0 + i) * g.b.t] = to_element<T>(sum);
        });
      }
    }
#pragma unroll
    for (int r = 0; r < kStates; ++r) sum_A[r] += few_A.of[r], sum_c[r] += few_c.of[r];
  }
  States result;
  if (g.A.at != nullptr && g.sum_A) {
#pragma unroll
    for (int r = 0; r < kStates; ++r) result.of[r] = rounded<State>(sum_A[r]);
    my.keep(g.A.at, 0, result);
  }
  if (g.c.at != nullptr && g.sum_c) {
#pragma unroll
    for (int r = 0; r < kStates; ++r) result.of[r] = rounded<State>(sum_c[r]);
    my.keep(g.c.at, 0, result);
  }
  if (g.x0 != nullptr) {
    const States first = my.load(s.A, 0);
#pragma unroll
    for (int r = 0; r < kStates; ++r) result.of[r] = times(conjugate(first.of[r]), lambda.of[r]);
    my.keep(g.x0, 0, result);
  }
}

}  // namespace weft::scan
