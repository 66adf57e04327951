// Gates i, f, g, o in torch's order, of a = W_i x + b_i + W_h h + b_h:
//   i, f, o = sigmoid(a), g = tanh(a),  c' = f c + i g,  h' = o tanh(c')
#pragma once
#include "rnn/cells/cell.h"
#include "rnn/cells/inline.h"

namespace weft::rnn {

// See cells.h for what the constants and functions of a cell mean. Saved: i, f, g, o. Chain: di, df, dg, do.
struct Lstm {
  static constexpr const char* kName = "lstm";
  static constexpr const char* kCosts = "lstm";
  static constexpr int kCudnnMode = 2;
  static constexpr int kGates = 4, kSaved = 4, kChain = 4, kStates = 2, kKept = 1;
  static constexpr int kApart = -1, kThroughOutput = 3;
  static constexpr StateName kAfter = StateName::kC, kBefore = StateName::kC;
  static constexpr bool kSelects = false;
  static constexpr int kScanHidden = 64;

  template <typename M, typename V>
  WEFT_CELL_STEP static void gates(const V* pre, const V&, V* saved) {
    saved[0] = M::sigmoid(pre[0]);
    saved[1] = M::sigmoid(pre[1]);
    saved[2] = M::tanh(pre[2]);
    saved[3] = M::sigmoid(pre[3]);
  }

  // What enters c beside f c.
  template <typename V>
  WEFT_CELL_STEP static V into_c(const V* saved) {
    return saved[0] * saved[2];
  }
  static constexpr int kForget = 1;

  template <typename M, typename V>
  WEFT_CELL_STEP static V forward(const V* pre, const V& apart, const V&, V* others, V* saved) {
    gates<M>(pre, apart, saved);
    V& c = others[0];
    c = saved[1] * c + saved[0] * saved[2];
    return saved[3] * M::tanh(c);
  }

  template <typename M, typename V, typename Arrive>
  WEFT_CELL_STEP static void backward(const V& dh, const Arrive& arrive, const V* saved, const V* after,
                                      const V* before, V* d, V* direct) {
    const V &i = saved[0], &f = saved[1], &g = saved[2], &o = saved[3];
    const V &next = after[0], &c = before[0];
    const V squashed = M::tanh(next);
    const V dc = arrive(dh * o * (M::kOne - squashed * squashed));
    d[0] = dc * g * i * (M::kOne - i);
    d[1] = dc * c * f * (M::kOne - f);
    d[2] = dc * i * (M::kOne - g * g);
    d[3] = dh * squashed * o * (M::kOne - o);
    direct[0] = dc * f;
  }
};

}  // namespace weft::rnn
