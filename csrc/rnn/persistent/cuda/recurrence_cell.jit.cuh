// A recurrent cell, one thread per (unit, sequence): what it keeps, loads ahead, computes in fp32 and stores.
#pragma once

#include "common/math.jit.cuh"
#include "rnn/persistent/cuda/recurrence_constants.jit.cuh"

namespace weft::rnn {

// What a thread keeps of one of its (unit, sequence) pairs.
struct Pair {
  int unit, column;  // of the layer, of the group
  int length;        // steps of the sequence, 0 where there is no such pair
  int sequence;
  float bias[kGates + (kGru ? 1 : 0)];
  float carried;       // forward: h of a gru. Backward: the part of dh that does not come through the weights
  float carried_cell;  // forward: c. Backward: dc
  float cell;          // backward: c of the step at hand
};

// Loaded a step ahead, and not looked at before: a conversion would wait for the load.
struct Ahead {
  int64_t row;
  Element x[kBackward ? (kSaved > 0 ? kSaved : 1) : kGates];  // backward: gates, of an rnn its output
  Element grad, grad_cell;                                    // of output and cells
  Element before;                                             // h (gru) or c (lstm) before the step
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
        if (!(kGru && g == 2)) pair.bias[g] += widen(load(bh, g * kHidden + pair.unit));
      }
      if constexpr (kGru) pair.bias[3] = widen(load(bh, 2 * kHidden + pair.unit));
      if (kGru) pair.carried = widen(load(args.h0, at));
      if (kLstm) pair.carried_cell = widen(load(args.c0, at));
    } else {
      pair.carried = widen(load(args.grad_h_n, at));
      if constexpr (kLstm) {
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
      if (kLstm) a.grad_cell = load(args.grad_cells, at);
      const Element* const states = kLstm ? args.cells : args.output;
      if (step > 0) {
        const int64_t row = row_of(args, direction, pair.sequence, pair.length, step - 1);
        a.before = states[row * args.output_stride + direction * kHidden + pair.unit];
      } else {
        a.before =
            load(kLstm ? args.c0 : args.h0, int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit);
      }
    } else {
      a.x[0] = args.output[at];
    }
  }
}

// What a step makes of a pair; zeros in the vector where its sequence does not run.
struct Results {
  Element next[kValues];  // its part of the next vector
  Element gates[4];       // forward: what is saved. Backward: gates[2] is dn of a gru
  Element cell;
};

__device__ __forceinline__ Results step_forward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                bool active) {
  Results result = {};
  float pre[kGates];
#pragma unroll
  for (int g = 0; g < kGates; ++g) pre[g] = widen(now.x[g]) + pair.bias[g];
  float h;
  if constexpr (kGru) {
    const float r = sigmoid(pre[0] + product[0]), z = sigmoid(pre[1] + product[1]), m = pair.bias[3] + product[2];
    const float n = hyperbolic_tangent(pre[2] + r * m);
    h = n + z * (pair.carried - n);
    pair.carried = active ? h : pair.carried;
    result.gates[0] = narrow(r), result.gates[1] = narrow(z), result.gates[2] = narrow(n), result.gates[3] = narrow(m);
  } else if constexpr (kLstm) {
    const float in = sigmoid(pre[0] + product[0]), f = sigmoid(pre[1] + product[1]);
    const float g = hyperbolic_tangent(pre[2] + product[2]), o = sigmoid(pre[3] + product[3]);
    const float c = f * pair.carried_cell + in * g;
    h = o * hyperbolic_tangent(c);
    pair.carried_cell = active ? c : pair.carried_cell;
    result.gates[0] = narrow(in), result.gates[1] = narrow(f), result.gates[2] = narrow(g), result.gates[3] = narrow(o);
    result.cell = narrow(pair.carried_cell);
  } else {
    h = pre[0] + product[0];
    h = kCell == Cell::kRnnTanh ? hyperbolic_tangent(h) : h <= 0.0f ? 0.0f : h;
  }
  result.next[0] = active ? narrow(h) : Element(0);
  return result;
}

__device__ __forceinline__ Results step_backward(Pair& pair, const Ahead& now, const float (&product)[kRowsOfUnit],
                                                 bool active) {
  Results result = {};
  const float dh = product[0] + pair.carried + widen(now.grad);
  if constexpr (kGru) {
    const float r = widen(now.x[0]), z = widen(now.x[1]), n = widen(now.x[2]), m = widen(now.x[3]);
    const float dn = dh * (1.0f - z) * (1.0f - n * n);
    pair.carried = active ? dh * z : pair.carried;
    result.next[0] = narrow(dn * m * r * (1.0f - r));
    result.next[1] = narrow(dh * (widen(now.before) - n) * z * (1.0f - z));
    result.next[2] = narrow(dn * r);
    result.gates[2] = narrow(dn);
  } else if constexpr (kLstm) {
    const float in = widen(now.x[0]), f = widen(now.x[1]), g = widen(now.x[2]), o = widen(now.x[3]);
    const float before = widen(now.before), squashed = hyperbolic_tangent(pair.cell);
    const float dc = pair.carried_cell + widen(now.grad_cell) + dh * o * (1.0f - squashed * squashed);
    result.next[0] = narrow(dc * g * in * (1.0f - in));
    result.next[1] = narrow(dc * before * f * (1.0f - f));
    result.next[2] = narrow(dc * in * (1.0f - g * g));
    result.next[3] = narrow(dh * squashed * o * (1.0f - o));
    pair.carried = active ? 0.0f : pair.carried;
    pair.carried_cell = active ? dc * f : pair.carried_cell;
    pair.cell = active ? before : pair.cell;
  } else {
    const float y = widen(now.x[0]);
    result.next[0] = narrow(kCell == Cell::kRnnTanh ? dh * (1.0f - y * y) : y <= 0.0f ? 0.0f : dh);
    pair.carried = active ? 0.0f : pair.carried;
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
    if (kLstm && args.cells) args.cells[at] = result.cell;
    if (kSaved > 0 && args.save) {
      Element* const gates = args.x + direction * args.x_direction + row * args.x_stride + pair.unit;
#pragma unroll
      for (int g = 0; g < kSaved; ++g) gates[g * kHidden] = result.gates[g];
    }
    if (step == pair.length - 1) {
      const int64_t end = int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit;
      args.h_n[end] = result.next[0];
      if (kLstm) args.c_n[end] = result.cell;
    }
  } else {
    Element* const dgates = args.dgates + direction * args.dgates_direction + row * args.dgates_stride + pair.unit;
    if (kGru) dgates[2 * kHidden] = result.gates[2];
    if (stores) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) dgates[(kGru && v == 2 ? 3 : v) * kHidden] = result.next[v];
    }
  }
}

// The gradients of the initial state, behind the last step.
__device__ __forceinline__ void store_initial(const Args& args, int direction, const Pair& pair, float product) {
  if (pair.length == 0) return;
  const int64_t at = int64_t(direction * args.batch + pair.sequence) * kHidden + pair.unit;
  if (args.h_n) args.h_n[at] = narrow(product + pair.carried);
  if (kLstm && args.c_n) args.c_n[at] = narrow(pair.carried_cell);
}

}  // namespace weft::rnn
