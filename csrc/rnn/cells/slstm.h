// sLSTM with a sigmoid forget gate: Beck et al., "xLSTM: Extended Long Short-Term Memory", NeurIPS 2024, equations 9 to
// 18, of a = W_i x + b_i + W_h h + b_h, gates i, f, z, o:
//   z = tanh(a_z), o = sigmoid(a_o),  l = log sigmoid(a_f),  m' = max(l + m, a_i),  i = exp(a_i - m'),
//   f = exp(l + m - m'),  c' = f c + i z,  n' = f n + i,  h' = o c' / n'
// With an exponential forget gate (slstm_exp.h) l = a_f.
//
// n is at least 1 behind any step. A state with n = 0 holds nothing yet, so that zeros are an initial state: its m is
// not looked at, and m' = a_i. What i and f are follows from s = l + m - a_i alone, one exponential, which is what is
// saved: rounded, it keeps the gates' absolute precision, and which of the two m' is.
//
// Derivative. h does not depend on m: D = dm' - dc' c' - dn' n', of the gradients that arrive at the state, is what has
// been asked of m itself; it goes to l + m or to a_i, as max has it (half each where they are equal), and is 0 at every
// step where it was 0 at the last.
#pragma once
#include "rnn/cells/cell.h"
#include "rnn/cells/inline.h"

namespace weft::rnn {

// See cells.h for what the constants and functions of a cell mean. Saved: s, z, o, dl/da_f. Chain: di, df, dz, do.
template <bool kExponential>
struct SlstmOf {
  static constexpr const char* kCosts = "lstm";
  static constexpr int kCudnnMode = -1;
  static constexpr int kGates = 4, kSaved = 4, kChain = 4, kStates = 4, kKept = 2;
  static constexpr int kApart = -1, kThroughOutput = -1;
  static constexpr StateName kAfter = StateName::kC, kBefore = StateName::kC;
  static constexpr bool kSelects = false;
  static constexpr int kScanHidden = 0;

  // Of s above, and n before the step: the larger of i and f is 1. Without a state f is of no consequence but for the
  // gradient of that state, and is kept finite.
  template <typename M, typename V>
  struct Gates {
    V i, f, fed;  // fed: s where there is a state, else 0
    WEFT_CELL_STEP Gates(const V& s, const V& n) {
      const V one = M::like(s, 1), most = M::like(s, 10), minus_size = -(M::relu(s) + M::relu(-s));
      const V other = M::exp(M::positive(n, minus_size, most - M::relu(most - s)));
      fed = M::where_positive(n, s);
      i = M::positive(fed, other, one);
      f = M::positive(fed, one, other);
    }
  };

  template <typename M, typename V>
  WEFT_CELL_STEP static V forward(const V* pre, const V&, const V&, V* others, V* saved) {
    V &c = others[0], &n = others[1], &m = others[2];
    const V l = kExponential ? pre[1] : M::log_sigmoid(pre[1]);
    saved[0] = l + m - pre[0];
    saved[1] = M::tanh(pre[2]);
    saved[2] = M::sigmoid(pre[3]);
    saved[3] = kExponential ? M::like(l, 1) : M::sigmoid(-pre[1]);
    const Gates<M, V> g(saved[0], n);
    m = M::positive(g.fed, l + m, pre[0]);
    c = g.f * c + g.i * saved[1];
    n = g.f * n + g.i;
    return saved[2] * M::ratio(c, n);
  }

  template <typename M, typename V, typename Arrive>
  WEFT_CELL_STEP static void backward(const V& dh, const Arrive& arrive, const V* saved, const V* after,
                                      const V* before, V* d, V* direct) {
    const V &s = saved[0], &z = saved[1], &o = saved[2], &c = before[0], &n = before[1];
    const V one = M::like(s, 1), zero = M::like(s, 0);
    const Gates<M, V> g(s, n);
    const V squashed = M::ratio(after[0], after[1]), to_ratio = M::ratio(dh * o, after[1]);
    const V c_arrives = arrive(zero, 0), n_arrives = arrive(zero, 1);
    const V asked = arrive(zero, 2) - (c_arrives * after[0] + n_arrives * after[1]);
    const V dc = c_arrives + to_ratio, dn = n_arrives - to_ratio * squashed;
    const V above = M::where_positive(s, one), below = M::where_positive(-s, one);
    const V share = M::where_positive(n, (above + one - below) * M::like(s, 0.5));
    const V dl = (dc * c + dn * n) * g.f + share * asked;
    d[0] = (dc * z + dn) * g.i + (one - share) * asked;
    d[1] = dl * saved[3];
    d[2] = dc * g.i * (one - z * z);
    d[3] = dh * squashed * o * (one - o);
    direct[0] = dc * g.f;
    direct[1] = dn * g.f;
    direct[2] = dl;
  }
};

struct Slstm : SlstmOf<false> {
  static constexpr const char* kName = "slstm";
};

}  // namespace weft::rnn
