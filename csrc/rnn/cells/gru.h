// Gates r, z, n in torch's order:
//   r, z = sigmoid(W_i x + b_i + W_h h + b_h),  m = W_hn h + b_hn,  n = tanh(W_in x + b_in + r m),  h' = n + z (h - n)
#pragma once
#include "rnn/cells/cell.h"
#include "rnn/cells/inline.h"

namespace weft::rnn {

// See cells.h for what the constants and functions of a cell mean. Saved: r, z, n, m. Chain: dr, dz, dn, dm = dn r.
struct Gru {
  static constexpr const char* kName = "gru";
  static constexpr const char* kCosts = "gru";
  static constexpr int kCudnnMode = 3;
  static constexpr int kGates = 3, kSaved = 4, kChain = 4, kStates = 1, kKept = 0;
  static constexpr int kApart = 2, kThroughOutput = -1;
  static constexpr StateName kAfter = StateName::kNone, kBefore = StateName::kH;
  static constexpr bool kSelects = false;
  static constexpr int kScanHidden = 128;

  template <typename M, typename V>
  WEFT_CELL_STEP static void gates(const V* pre, const V& apart, V* saved) {
    saved[0] = M::sigmoid(pre[0]);
    saved[1] = M::sigmoid(pre[1]);
    saved[2] = M::tanh(apart + saved[0] * pre[2]);
    saved[3] = pre[2];
  }

  template <typename M, typename V>
  WEFT_CELL_STEP static V forward(const V* pre, const V& apart, const V& h, V*, V* saved) {
    gates<M>(pre, apart, saved);
    const V &z = saved[1], &n = saved[2];
    return n + z * (h - n);
  }

  template <typename M, typename V, typename Arrive>
  WEFT_CELL_STEP static void backward(const V& dh, const Arrive&, const V* saved, const V*, const V* before, V* d,
                                      V* direct) {
    const V &r = saved[0], &z = saved[1], &n = saved[2], &m = saved[3], &h = before[0];
    const V dn = dh * (M::kOne - z) * (M::kOne - n * n);
    d[0] = dn * m * r * (M::kOne - r);
    d[1] = dh * (h - n) * z * (M::kOne - z);
    d[2] = dn;
    d[3] = dn * r;
    direct[0] = dh * z;
  }
};

}  // namespace weft::rnn
