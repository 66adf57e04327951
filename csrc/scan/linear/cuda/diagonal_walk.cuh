// x[t] = A[t] * x[t-1] + b[t], A diagonal, and its gradients, each channel by one lane in the order of processing
// (linear_scan_args.h): the sequential numbers, bit for bit, wherever there are channels enough to fill the device.
//
// Floor: as of diagonal_tiles.cuh, 3 streams of T B H elements forward and 5 for the gradients, 2 and 3 of a constant
// A.
//
// Decomposition: a block is one warp, which has a slab of adjacent channels of one batch row (rows that lie end to end
//   are one) and runs through all steps. Nothing is exchanged between blocks.
// Shared memory: a ring of kStages stages of kSteps rows of every input, filled by cp.async in pieces of 16 bytes. By
//   Little's law 36 KB on their way per SM carry the bandwidth at 1 us; much more only spoils the order in which the
//   memory's pages are visited.
// Registers: the state, and the rows of a stage that the lane owns; of a slice the product of A, too.
// Cost, on an H200: 115 ns per stage, for a wait and the copies, and per step 11 ns forward, 17 with gradients, of
//   which the dependent FMA is the least part. So few warps take long stages, and need 13 and 24 ns per step. `kMany`
//   of them are bound by the memory, and long stages would only let them drift apart.
#pragma once
#include <cstdint>

#include "common/cuda/ptx.jit.cuh"
#include "scan/linear/cuda/state.cuh"
#include "scan/linear/linear_scan_args.h"
#include "scan/slices/slice_told.h"

namespace weft::scan {

template <typename T, bool kGradients, bool kMany>
struct WalkShape {
  // Of a lane. Wide rows are kind to the memory's pages where there are warps enough without them.
  static constexpr int kChannels = kGradients && kMany && sizeof(T) == 4 ? 2 : 1;
  static constexpr int kLaneBytes = kChannels * int(sizeof(T)), kWidth = 32 * kChannels, kRowBytes = 32 * kLaneBytes;
  static constexpr int kSteps = (kMany ? 16 : kGradients ? 32 : 64) / (kLaneBytes > 4 ? kLaneBytes / 4 : 1);
  static constexpr int kStages = !kMany       ? (kGradients ? 5 : 4)
                                 : kGradients ? (kLaneBytes >= 8 ? 8 : 5)
                                              : (kLaneBytes == 2 ? 12 : 6);
  static constexpr int kInputs = kGradients ? 3 : 2, kInputBytes = kSteps * kRowBytes;
  static constexpr int kStageBytes = kInputs * kInputBytes, kSharedBytes = kStages * kStageBytes;
};

// One input of a warp, as one lane copies it.
template <typename S>
class WalkInput {
  static constexpr int kPieces = S::kRowBytes / 16, kRowsPerCopy = 32 / kPieces;

 public:
  // `row`: the slab's first channel at the first step, or null where there is nothing to copy. `stride`, `left`: bytes.
  __device__ WalkInput(const void* row, int64_t stride, int64_t left, int lane) : stride_(stride) {
    const int piece = lane % kPieces;
    first_ = lane / kPieces;
    exists_ = row != nullptr && piece * 16 < left;
    from_ = static_cast<const char*>(row) + (exists_ ? first_ * stride + piece * 16 : 0);
    offset_ = first_ * S::kRowBytes + piece * 16;
  }

  // Starts copying rows [begin, end) of the next kSteps.
  __device__ void copy(unsigned char* to, int begin, int64_t end) {
    const char* from = from_;
    from_ += S::kSteps * stride_;
    if (!exists_) return;
    to += offset_;
    if (begin == 0 && end >= S::kSteps) {
#pragma unroll
      for (int i = 0; i < S::kSteps; i += kRowsPerCopy) {
        copy_async<16>(to + i * S::kRowBytes, from);
        from += kRowsPerCopy * stride_;
      }
    } else {
      for (int i = 0; i < S::kSteps; i += kRowsPerCopy) {
        if (i + first_ >= begin && i + first_ < end) copy_async<16>(to + i * S::kRowBytes, from);
        from += kRowsPerCopy * stride_;
      }
    }
  }

 private:
  const char* from_;
  int64_t stride_;
  int first_, offset_;
  bool exists_;
};

// Forward: `g.scan` alone, which starts from its x0 or from zero; the gradients' scan has none, and `g.x0` is what
// their last step multiplies lambda by. All addresses, strides and H are multiples of 16 bytes. With kTold, of the scan
// in float or double, `message` (slice_args.h) is what the slice's rank tells, in which A of the first step counts,
// also without x0.
template <typename T, bool kGradients, bool kMany, bool kTold = false>
__device__ void run_walk(const DiagonalGradients& g, int64_t slabs_per_row, unsigned char* ring,
                         void* message = nullptr) {
  using S = WalkShape<T, kGradients, kMany>;
  using State = state_t<T>;
  constexpr int kChannels = S::kChannels, kSteps = S::kSteps, kStages = S::kStages, kSize = int(sizeof(T));
  struct alignas(S::kLaneBytes) Lane {
    T of[kChannels];
  };
  const LinearScan& s = g.scan;
  const int lane = int(threadIdx.x);
  const int64_t row = blockIdx.x / slabs_per_row, h0 = blockIdx.x % slabs_per_row * S::kWidth;
  const int64_t h = h0 + lane * kChannels, left = (s.H - h0) * kSize;
  const bool owned = h < s.H;
  auto slab = [&](const void* base, int64_t offset) { return static_cast<const T*>(base) + offset + h0; };
  auto own = [&](const void* base, int64_t offset) { return reinterpret_cast<const Lane*>(slab(base, offset))[lane]; };
  WalkInput<S> A(slab(s.A, row * s.A_b), s.A_t * kSize, left, lane);
  WalkInput<S> b(slab(s.b, row * s.b_b), s.b_t * kSize, left, lane);
  WalkInput<S> before(kGradients && g.x != nullptr ? slab(g.x, row * g.x_b) : nullptr, g.x_t * kSize, left, lane);
  const int64_t stages = (s.T + kSteps - 1) / kSteps;
  const int no_A = s.x0 == nullptr && !kTold ? 1 : 0;
  auto fill = [&](int64_t stage, int place) {
    if (stage < stages) {
      unsigned char* const to = ring + place * S::kStageBytes;
      const int64_t steps = s.T - stage * kSteps;
      A.copy(to, stage == 0 ? no_A : 0, steps);
      b.copy(to + S::kInputBytes, 0, steps);
      if constexpr (kGradients) before.copy(to + 2 * S::kInputBytes, 0, steps - 1);  // the last is given g.x0
    }
    copy_commit();  // as many groups as stages
  };
  for (int i = 0; i < kStages - 1; ++i) fill(i, i);
  // Without x0 there is no A before the first step: zero, which leaves b.
  if (no_A) reinterpret_cast<Lane*>(ring)[lane] = Lane{};

  Lane start{};
  if (owned && s.x0 != nullptr) start = own(s.x0, row * s.x0_b);
  State x[kChannels];
  sum_t<State> sum[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    x[c] = to_state(start.of[c]);
    sum[c] = {};
  }
  T* out = static_cast<T*>(s.out) + row * s.out_b + h;
  T* grad_A = static_cast<T*>(g.grad_A) + row * g.grad_A_b + h;
  const bool writes = owned && s.out != nullptr;
  const bool writes_A = kGradients && owned && g.grad_A != nullptr && !g.summed;
  [[maybe_unused]] Scaled product;
  int place = 0;
  for (int64_t stage = 0; stage < stages; ++stage) {
    copy_wait<kStages - 2>();
    // What the other lanes have copied is there, and all are done with the place that is filled next.
    __syncwarp();
    fill(stage + kStages - 1, place == 0 ? kStages - 1 : place - 1);
    const unsigned char* const base = ring + place * S::kStageBytes;
    auto read = [&](int input, int i) {
      return reinterpret_cast<const Lane*>(base + input * S::kInputBytes + i * S::kRowBytes)[lane];
    };
    State part[kChannels] = {};
    auto step = [&](const Lane& a, Lane value, Lane previous, bool exists) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        x[c] = fused(factor<kGradients>(to_state(a.of[c])), x[c], to_state(value.of[c]));
        value.of[c] = to_element<T>(x[c]);
      }
      if (writes) *reinterpret_cast<Lane*>(out) = value;
      out += s.out_t;
      if constexpr (kGradients) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          const State product = exists ? times(x[c], conjugate(to_state(previous.of[c]))) : State{};
          part[c] += product;
          previous.of[c] = to_element<T>(product);
        }
        if (writes_A) *reinterpret_cast<Lane*>(grad_A) = previous;
        grad_A += g.grad_A_t;
      }
    };
    const int64_t steps = s.T - stage * kSteps;
    if (steps > kSteps || (!kGradients && steps == kSteps)) {
      Lane a[kSteps], value[kSteps], previous[kSteps];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        a[i] = read(0, i), value[i] = read(1, i);
        if constexpr (kGradients) previous[i] = read(2, i);
      }
      if constexpr (kTold) {
        static_assert(!kGradients && kChannels == 1 && kSteps % kFactors == 0 && kFactors == 4);
#pragma unroll
        for (int i = 0; i < kSteps; i += kFactors) {
          multiply_four(product, a[i].of[0], a[i + 1].of[0], a[i + 2].of[0], a[i + 3].of[0]);
        }
        if (stage == 0 && s.x0 == nullptr) a[0] = Lane{};
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) step(a[i], value[i], previous[i], true);
    } else {
      const int last = int(steps) - 1;
      auto factor_of = [&](int i) {
        Lane a = read(0, i);
        if constexpr (kTold) {
          product.multiply(a.of[0]);
          if (i % kFactors == kFactors - 1) product.rescale_if_far();
          if (stage == 0 && i == 0 && s.x0 == nullptr) a = Lane{};
        }
        return a;
      };
      for (int i = 0; i < last; ++i) step(factor_of(i), read(1, i), kGradients ? read(2, i) : Lane{}, true);
      // Without x0 the gradient is zero, also where lambda is not finite.
      const bool exists = kGradients && owned && g.x0 != nullptr;
      step(factor_of(last), read(1, last), exists ? own(g.x0, row * g.x0_b) : Lane{}, exists);
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum[c] += part[c];
    place = place + 1 == kStages ? 0 : place + 1;
  }
  if constexpr (kTold) {
    using Number = typename Packed<State>::Number;
    if (owned) tell<State>(product, x[0], true, row * s.H + h, s.B * s.H, static_cast<Number*>(message));
  }
  if constexpr (kGradients) {
    if (!owned) return;
    Lane first{};
    if (g.grad_x0 != nullptr) first = own(s.A, row * s.A_b + s.T * s.A_t);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int64_t at = row * s.H + h + c;
      if (g.summed && g.grad_A != nullptr) static_cast<State*>(g.grad_A)[at] = rounded<State>(sum[c]);
      if (g.grad_x0 == nullptr) continue;
      const State product = times(conjugate(to_state(first.of[c])), x[c]);
      if (g.wide_x0) {
        static_cast<State*>(g.grad_x0)[at] = product;
      } else {
        static_cast<T*>(g.grad_x0)[at] = to_element<T>(product);
      }
    }
  }
}

}  // namespace weft::scan
