// A recurrent cell, one thread per (unit, sequence): what it keeps, loads ahead, computes in fp32 and stores.
#pragma once

#include "rnn/cells/device_math.jit.cuh"
#include "rnn/persistent/cuda/recurrence_constants.jit.cuh"

namespace weft::rnn {

// What a thread keeps of one of its (unit, sequence) pairs.
struct Pair {
  int unit, column;  // of the layer, of the group
  int length;        // steps of the sequence, 0 where there is no such pair
  int sequence;
  float bias[kGates + kApart];  // the last, of the recurrent side that stays apart
  float carried;  // forward: h, where it flows on directly. Backward: the part of dh that does not come through the
                  // weights
  float carried_cell;  // forward: c. Backward: dc
  float cell;          // backward: c of the step at hand
};

// Loaded a step ahead, and not looked at before: a conversion would wait for the load.
struct Ahead {
  int64_t row;
  Element x[kBackward ? (kSaved > 0 ? kSaved : 1) : kGates];  // backward: the saved gates, or the output
  Element grad, grad_cell;                                    // of output and cells
  Element before;                                             // the state that the derivative reads, before the step
};

__device__ __forceinline__ Element load(const Element* p, int64_t at) {
  return p ? p[at] : Element(0);
}

// The pair `index` of a block of a group, before its first step.
__device__ __forceinline__ void start_pair(Pair& pair, const Args& args, int direction, int block, int first_sequence,
                                           int index) {
  pair.column = index / kUnits;
  pair.unit = block * kUnits + index % kUnits;
  pair.sequence = first_sequence + pair.column;
  pair.length = pair.column < kColumns && pair.unit < kHidden ? length_of(args, pair.sequence) : 0;
  pair.carried = pair.carried_cell = pair.cell = 0.0f;
  if (pair.length > 0) {
    const int64_t at = int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit;
    if constexpr (!kBackward) {
      const Element *bi = args.b_ih[direction], *bh = args.b_hh[direction];
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        pair.bias[g] = widen(load(bi, g * kHidden + pair.unit));
        if (g != CellTraits::kApart) pair.bias[g] += widen(load(bh, g * kHidden + pair.unit));
      }
      if constexpr (kApart) pair.bias[kGates] = widen(load(bh, CellTraits::kApart * kHidden + pair.unit));
      if (CellTraits::kBefore == StateName::kH) pair.carried = widen(load(args.h0, at));
      if (kHasC) pair.carried_cell = widen(load(args.c0, at));
    } else {
      pair.carried = widen(load(args.grad_h_n, at));
      if constexpr (kHasC) {
        pair.carried_cell = widen(load(args.grad_c_n, at));
        pair.cell =
            widen(args.cells[row_of(args, direction, pair.sequence, pair.length, pair.length - 1) * args.output_stride +
                             direction * kHidden + pair.unit]);
      }
    }
  }
}

__device__ __forceinline__ void load_ahead(Ahead& a, const Args& args, int direction, const Pair& pair, int step) {
  if (step < 0 || step >= pair.length) return;
  a.row = row_of(args, direction, pair.sequence, pair.length, step);
  const Element* x = args.x + direction * args.x_direction + a.row * args.x_stride + pair.unit;
  if constexpr (!kBackward) {
#pragma unroll
    for (int g = 0; g < kGates; ++g) a.x[g] = x[g * kHidden];
  } else {
    const int64_t at = a.row * args.output_stride + direction * kHidden + pair.unit;
    a.grad = load(args.grad_output, at);
    if constexpr (kSaved > 0) {
#pragma unroll
      for (int g = 0; g < kSaved; ++g) a.x[g] = x[g * kHidden];
      if (kHasC) a.grad_cell = load(args.grad_cells, at);
      const Element* const states = kHasC ? args.cells : args.output;
      if (step > 0) {
        const int64_t row = row_of(args, direction, pair.sequence, pair.length, step - 1);
        a.before = states[row * args.output_stride + direction * kHidden + pair.unit];
      } else {
        a.before =
            load(kHasC ? args.c0 : args.h0, int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit);
      }
    } else {
      a.x[0] = args.output[at];
    }
  }
}

// What a step makes of a pair; zeros in the vector where its sequence does not run.
struct Results {
  Element next[kValues];  // its part of the next vector
  Element gates[4];       // forward: what is saved. Backward: [0] is the input side of a gate whose sides stay apart
  Element cell;
};

__device__ __forceinline__ Results step_forward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                bool active) {
  Results result = {};
  float pre[kGates], saved[CellTraits::kSaved + 1], input = 0.0f, c = pair.carried_cell;
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    const float entering = widen(now.x[g]) + pair.bias[g];
    if (g == CellTraits::kApart) {
      input = entering;
      pre[g] = pair.bias[kGates - 1 + kApart] + product[g];
    } else {
      pre[g] = entering + product[g];
    }
  }
  const float h = CellTraits::forward<DeviceMath<float>>(pre, input, pair.carried, c, saved);
  if constexpr (CellTraits::kBefore == StateName::kH) pair.carried = active ? h : pair.carried;
  if constexpr (kHasC) {
    pair.carried_cell = active ? c : pair.carried_cell;
    result.cell = narrow(pair.carried_cell);
  }
#pragma unroll
  for (int g = 0; g < CellTraits::kSaved; ++g) result.gates[g] = narrow(saved[g]);
  result.next[0] = active ? narrow(h) : Element(0);
  return result;
}

__device__ __forceinline__ Results step_backward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                 bool active) {
  Results result = {};
  const float dh = product[0] + pair.carried + widen(now.grad);
  float d[CellTraits::kChain], saved[CellTraits::kSaved + 1], after = 0.0f, before = 0.0f, direct = 0.0f;
#pragma unroll
  for (int g = 0; g < CellTraits::kSaved; ++g) saved[g] = widen(now.x[g]);
  if constexpr (CellTraits::kAfter == StateName::kH) after = widen(now.x[0]);
  if constexpr (CellTraits::kAfter == StateName::kC) after = pair.cell;
  if constexpr (CellTraits::kBefore != StateName::kNone) before = widen(now.before);
  const auto arrive = [&](float from_h) { return pair.carried_cell + widen(now.grad_cell) + from_h; };
  CellTraits::backward<DeviceMath<float>>(dh, arrive, saved, after, before, d, direct);
#pragma unroll
  for (int v = 0; v < kValues; ++v) result.next[v] = narrow(d[v == CellTraits::kApart ? CellTraits::kChain - 1 : v]);
  if constexpr (kApart) result.gates[0] = narrow(d[CellTraits::kApart]);
  pair.carried = active ? (CellTraits::kBefore == StateName::kH ? direct : 0.0f) : pair.carried;
  if constexpr (kHasC) {
    pair.carried_cell = active ? direct : pair.carried_cell;
    pair.cell = active ? before : pair.cell;
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) result.next[v] = active ? result.next[v] : Element(0);
  return result;
}

__device__ __forceinline__ void store_results(const Args& args, int direction, const Pair& pair, int64_t row, int step,
                                              const Results& result) {
  if (step < 0 || step >= pair.length) return;
  const bool stores = kShared || !args.publishes_result;
  if constexpr (!kBackward) {
    const int64_t at = row * args.output_stride + direction * kHidden + pair.unit;
    if (stores) args.output[at] = result.next[0];
    if (kHasC && args.cells) args.cells[at] = result.cell;
    if (kSaved > 0 && args.save) {
      Element* const gates = args.x + direction * args.x_direction + row * args.x_stride + pair.unit;
#pragma unroll
      for (int g = 0; g < kSaved; ++g) gates[g * kHidden] = result.gates[g];
    }
    if (step == pair.length - 1) {
      const int64_t end = int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit;
      args.h_n[end] = result.next[0];
      if (kHasC) args.c_n[end] = result.cell;
    }
  } else {
    Element* const dgates = args.dgates + direction * args.dgates_direction + row * args.dgates_stride + pair.unit;
    if (kApart) dgates[CellTraits::kApart * kHidden] = result.gates[0];
    if (stores) {
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        dgates[(v == CellTraits::kApart ? CellTraits::kChain - 1 : v) * kHidden] = result.next[v];
    }
  }
}

// The gradients of the initial state, behind the last step.
__device__ __forceinline__ void store_initial(const Args& args, int direction, const Pair& pair, float product) {
  if (pair.length == 0) return;
  const int64_t at = int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit;
  if (args.h_n) args.h_n[at] = narrow(product + pair.carried);
  if (kHasC && args.c_n) args.c_n[at] = narrow(pair.carried_cell);
}

}  // namespace weft::rnn
