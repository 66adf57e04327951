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
  float carried_cells[kOthers + 1];  // forward: the states beside h. Backward: their gradients
  float cells[kKept + 1];            // backward: the kept ones of the step at hand
};

// Loaded a step ahead, and not looked at before: a conversion would wait for the load.
struct Ahead {
  int64_t row;
  Element x[kBackward ? (kSaved > 0 ? kSaved : 1) : kGates];  // backward: the saved gates, or the output
  Element grad, grad_cells[kKept + 1];                        // of output and cells
  Element before[kRead + 1];                                  // the states that the derivative reads, before the step
};

__device__ __forceinline__ Element load(const Element* p, int64_t at) {
  return p ? p[at] : Element(0);
}

// Where a unit's state `s` of the others lies in an array of them, of `count` for each row.
__device__ __forceinline__ int64_t place_of_state(int64_t row, int count, int s, int unit) {
  return (row * count + s) * kAll + unit;
}
__device__ __forceinline__ int64_t place_in_cells(const Args& args, int64_t row, int direction, int s, int unit) {
  return row * (args.output_stride * kKept) + (direction * kKept + s) * kAll + unit;
}

// The pair `index` of a block of a group, before its first step.
__device__ __forceinline__ void start_pair(Pair& pair, const Args& args, int direction, int head, int block,
                                           int first_sequence, int index) {
  pair.column = index / kUnits;
  const int unit = block * kUnits + index % kUnits;
  pair.unit = head * kHidden + unit;
  pair.sequence = first_sequence + pair.column;
  pair.length = pair.column < kColumns && unit < kHidden ? length_of(args, pair.sequence) : 0;
  pair.carried = 0.0f;
#pragma unroll
  for (int s = 0; s < kOthers; ++s) pair.carried_cells[s] = 0.0f;
#pragma unroll
  for (int s = 0; s < kKept; ++s) pair.cells[s] = 0.0f;
  if (pair.length > 0) {
    const int64_t row = direction * args.batch + pair.sequence, at = row * kAll + pair.unit;
    if constexpr (!kBackward) {
      const Element *bi = args.b_ih[direction], *bh = args.b_hh[direction];
#pragma unroll
      for (int g = 0; g < kGates; ++g) {
        pair.bias[g] = widen(load(bi, g * kAll + pair.unit));
        if (g != CellTraits::kApart) pair.bias[g] += widen(load(bh, g * kAll + pair.unit));
      }
      if constexpr (kApart) pair.bias[kGates] = widen(load(bh, CellTraits::kApart * kAll + pair.unit));
      if (CellTraits::kBefore == StateName::kH) pair.carried = widen(load(args.h0, at));
#pragma unroll
      for (int s = 0; s < kOthers; ++s) {
        pair.carried_cells[s] = widen(load(args.c0, place_of_state(row, kOthers, s, pair.unit)));
      }
    } else {
      pair.carried = widen(load(args.grad_h_n, at));
#pragma unroll
      for (int s = 0; s < kOthers; ++s) {
        pair.carried_cells[s] = widen(load(args.grad_c_n, place_of_state(row, kOthers, s, pair.unit)));
      }
#pragma unroll
      for (int s = 0; s < kKept; ++s) {
        const int64_t last = row_of(args, direction, pair.sequence, pair.length, pair.length - 1);
        pair.cells[s] = widen(args.cells[place_in_cells(args, last, direction, s, pair.unit)]);
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
    for (int g = 0; g < kGates; ++g) a.x[g] = x[g * kAll];
  } else {
    const int64_t at = a.row * args.output_stride + direction * kAll + pair.unit;
    a.grad = load(args.grad_output, at);
    if constexpr (kSaved > 0) {
#pragma unroll
      for (int g = 0; g < kSaved; ++g) a.x[g] = x[g * kAll];
#pragma unroll
      for (int s = 0; s < kKept; ++s) {
        a.grad_cells[s] = load(args.grad_cells, place_in_cells(args, a.row, direction, s, pair.unit));
      }
      const Element* const states = kHasC ? args.cells : args.output;
      if (step > 0) {
        const int64_t row = row_of(args, direction, pair.sequence, pair.length, step - 1);
#pragma unroll
        for (int s = 0; s < kRead; ++s) {
          a.before[s] = states[kHasC ? place_in_cells(args, row, direction, s, pair.unit)
                                     : row * args.output_stride + direction * kAll + pair.unit];
        }
      } else {
#pragma unroll
        for (int s = 0; s < kRead; ++s) {
          a.before[s] = load(kHasC ? args.c0 : args.h0, place_of_state(int64_t(direction * args.batch + pair.sequence),
                                                                       kHasC ? kOthers : 1, s, pair.unit));
        }
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
  Element cells[kOthers + 1];
};

__device__ __forceinline__ Results step_forward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                bool active) {
  Results result = {};
  float pre[kGates], saved[CellTraits::kSaved + 1], input = 0.0f, others[kOthers + 1];
#pragma unroll
  for (int s = 0; s < kOthers; ++s) others[s] = pair.carried_cells[s];
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
  const float h = CellTraits::forward<DeviceMath<float>>(pre, input, pair.carried, others, saved);
  if constexpr (CellTraits::kBefore == StateName::kH) pair.carried = active ? h : pair.carried;
#pragma unroll
  for (int s = 0; s < kOthers; ++s) {
    pair.carried_cells[s] = active ? others[s] : pair.carried_cells[s];
    result.cells[s] = narrow(pair.carried_cells[s]);
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
  float d[CellTraits::kChain], saved[CellTraits::kSaved + 1];
  float after[kKept + 1] = {}, before[kRead + 1] = {}, direct[kOthers + 1] = {};
#pragma unroll
  for (int g = 0; g < CellTraits::kSaved; ++g) saved[g] = widen(now.x[g]);
  if constexpr (CellTraits::kAfter == StateName::kH) after[0] = widen(now.x[0]);
#pragma unroll
  for (int s = 0; s < kKept; ++s) {
    if constexpr (CellTraits::kAfter == StateName::kC) after[s] = pair.cells[s];
  }
#pragma unroll
  for (int s = 0; s < kRead; ++s) before[s] = widen(now.before[s]);
  const auto arrive = [&](float from_h, int s = 0) {
    return s < kKept ? pair.carried_cells[s] + widen(now.grad_cells[s < kKept ? s : 0]) + from_h
                     : pair.carried_cells[s] + from_h;
  };
  CellTraits::backward<DeviceMath<float>>(dh, arrive, saved, after, before, d, direct);
#pragma unroll
  for (int v = 0; v < kValues; ++v) result.next[v] = narrow(d[v == CellTraits::kApart ? CellTraits::kChain - 1 : v]);
  if constexpr (kApart) result.gates[0] = narrow(d[CellTraits::kApart]);
  pair.carried = active ? (CellTraits::kBefore == StateName::kH ? direct[0] : 0.0f) : pair.carried;
#pragma unroll
  for (int s = 0; s < kOthers; ++s) pair.carried_cells[s] = active ? direct[s] : pair.carried_cells[s];
#pragma unroll
  for (int s = 0; s < kKept; ++s) pair.cells[s] = active ? before[s] : pair.cells[s];
#pragma unroll
  for (int v = 0; v < kValues; ++v) result.next[v] = active ? result.next[v] : Element(0);
  return result;
}

__device__ __forceinline__ void store_results(const Args& args, int direction, const Pair& pair, int64_t row, int step,
                                              const Results& result) {
  if (step < 0 || step >= pair.length) return;
  const bool stores = kShared || !args.publishes_result;
  if constexpr (!kBackward) {
    const int64_t at = row * args.output_stride + direction * kAll + pair.unit;
    if (stores) args.output[at] = result.next[0];
    if (kHasC && args.cells) {
#pragma unroll
      for (int s = 0; s < kKept; ++s) args.cells[place_in_cells(args, row, direction, s, pair.unit)] = result.cells[s];
    }
    if (kSaved > 0 && args.save) {
      Element* const gates = args.x + direction * args.x_direction + row * args.x_stride + pair.unit;
#pragma unroll
      for (int g = 0; g < kSaved; ++g) gates[g * kAll] = result.gates[g];
    }
    if (step == pair.length - 1) {
      const int64_t end = direction * args.batch + pair.sequence;
      args.h_n[end * kAll + pair.unit] = result.next[0];
#pragma unroll
      for (int s = 0; s < kOthers; ++s) args.c_n[place_of_state(end, kOthers, s, pair.unit)] = result.cells[s];
    }
  } else {
    Element* const dgates = args.dgates + direction * args.dgates_direction + row * args.dgates_stride + pair.unit;
    if (kApart) dgates[CellTraits::kApart * kAll] = result.gates[0];
    if (stores) {
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        dgates[(v == CellTraits::kApart ? CellTraits::kChain - 1 : v) * kAll] = result.next[v];
    }
  }
}

// The gradients of the initial state, behind the last step.
__device__ __forceinline__ void store_initial(const Args& args, int direction, const Pair& pair, float product) {
  if (pair.length == 0) return;
  const int64_t row = direction * args.batch + pair.sequence;
  if (args.h_n) args.h_n[row * kAll + pair.unit] = narrow(product + pair.carried);
  if (kHasC && args.c_n) {
#pragma unroll
    for (int s = 0; s < kOthers; ++s) {
      args.c_n[place_of_state(row, kOthers, s, pair.unit)] = narrow(pair.carried_cells[s]);
    }
  }
}

}  // namespace weft::rnn
