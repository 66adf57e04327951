// h' = tanh(a), a = W_ih x + b_ih + W_hh h + b_hh
#pragma once
#include "rnn/cells/cell.h"
#include "rnn/cells/inline.h"

namespace weft::rnn {

// See cells.h for what the constants and functions of a cell mean.
struct RnnTanh {
  static constexpr const char* kName = "rnn_tanh";
  static constexpr const char* kCosts = "rnn";
  static constexpr int kCudnnMode = 1;
  static constexpr int kGates = 1, kSaved = 0, kChain = 1, kStates = 1, kKept = 0;
  static constexpr int kApart = -1, kThroughOutput = -1;
  static constexpr StateName kAfter = StateName::kH, kBefore = StateName::kNone;
  static constexpr bool kSelects = false;
  static constexpr int kScanHidden = 128;

  template <typename M, typename V>
  WEFT_CELL_STEP static V forward(const V* pre, const V&, const V&, V*, V*) {
    return M::tanh(pre[0]);
  }

  template <typename M, typename V, typename Arrive>
  WEFT_CELL_STEP static void backward(const V& dh, const Arrive&, const V*, const V* after, const V*, V* d, V*) {
    const V& y = after[0];
    d[0] = dh * (M::kOne - y * y);
  }
};

}  // namespace weft::rnn
