// The CPU kernels of weft::rnn_cell: included once per instruction set, with the macros of common/cpu/simd-inl.h, whose
// rule on the standard library's templates holds here, too.
#include "common/cpu/simd-inl.h"
#include "rnn/cells/cell-inl.h"
#include "rnn/step/cpu/rnn_cell_kernels.h"

namespace weft::rnn::WEFT_ISA {
namespace {

using namespace weft::cpu::WEFT_ISA;

// The sums of N vectors, which come in pairs: a, b -> the sums of a's neighbours, then of b's.
template <typename T>
WEFT_INLINE typename Simd<T>::Vec neighbours(typename Simd<T>::Vec a, typename Simd<T>::Vec b) {
  using Int = typename Simd<T>::Int;
  Int even{}, odd{};
  for (int i = 0; i < Simd<T>::kLanes; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// Lane i: the sum of sums[i]'s lanes. Overwrites sums.
template <typename T>
WEFT_INLINE typename Simd<T>::Vec totals(typename Simd<T>::Vec* sums) {
#pragma GCC unroll 4
  for (int count = Simd<T>::kLanes; count > 1; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count / 2; ++i) sums[i] = neighbours<T>(sums[2 * i], sums[2 * i + 1]);
  }
  return sums[0];
}

// sums[b][r] += the products of lanes of w's row r and x's row b, for NR rows of w and NB of x of `depth` elements; x's
// are `stride` apart.
template <typename E, int NR, int NB>
WEFT_INLINE void products(const E* w, const E* x, int64_t depth, int64_t stride,
                          typename Element<E>::S::Vec (*sums)[NR]) {
  using S = typename Element<E>::S;
  for (int64_t k = 0; k < depth; k += S::kLanes) {
    const int64_t count = depth - k;
    typename S::Vec right[NB];
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) right[b] = Element<E>::load(x + b * stride + k, count);
#pragma GCC unroll 8
    for (int r = 0; r < NR; ++r) {
      const typename S::Vec left = Element<E>::load(w + r * depth + k, count);
#pragma GCC unroll 4
      for (int b = 0; b < NB; ++b) sums[b][r] += left * right[b];
    }
  }
}

// out[b][lane] = w's row `lane` times x's row b, plus, where w2 is not null, those of w2 and x2; `rows` of them, the
// others 0.
template <typename E, int NB>
WEFT_INLINE void dot_rows(const E* w, const E* x, int64_t depth, int64_t stride, const E* w2, const E* x2,
                          int64_t depth2, int64_t stride2, int64_t rows,
                          typename Element<E>::Compute (*out)[Element<E>::S::kLanes]) {
  using S = typename Element<E>::S;
  using Vec = typename S::Vec;
  constexpr int kLanes = S::kLanes;
  Vec all[NB][kLanes];
  const auto some = [&]<int NR>(int64_t row) {
    Vec sums[NB][NR] = {};
    products<E, NR, NB>(w + row * depth, x, depth, stride, sums);
    if (w2 != nullptr) products<E, NR, NB>(w2 + row * depth2, x2, depth2, stride2, sums);
    for (int b = 0; b < NB; ++b) {
      for (int r = 0; r < NR; ++r) all[b][row + r] = sums[b][r];
    }
  };
  // As many as registers hold.
  constexpr int kMost = WEFT_REGISTERS / 2 / NB, kRows = kMost < 8    ? kMost < kLanes ? kMost : kLanes
                                                         : 8 < kLanes ? 8
                                                                      : kLanes;
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) some.template operator()<kRows>(row);
  for (; row < rows; ++row) some.template operator()<1>(row);
  for (; row < kLanes; ++row) {
    for (int b = 0; b < NB; ++b) all[b][row] = Vec{};
  }
  for (int b = 0; b < NB; ++b) S::store(out[b], totals<typename Element<E>::Compute>(all[b]));
}

// `lanes` units from j on, of a head that begins at unit `head`, of NB sequences from b on.
template <typename E, Cell C, int NB>
void forward_block(const CellForwardArgs& a, int64_t b0, int64_t j, int64_t head, int64_t lanes) {
  using T = typename Element<E>::Compute;
  using S = typename Element<E>::S;
  using Vec = typename S::Vec;
  constexpr int G = gate_blocks(C), kLanes = S::kLanes;
  constexpr int kOthers = Traits<C>::kStates - 1;
  const int64_t H = a.H, I = a.I, P = a.P;
  const auto at = [](const void* p, int64_t offset) { return static_cast<const E*>(p) + offset; };
  const auto bias = [&](const void* p, int g) {
    return p == nullptr ? Vec{} : Element<E>::load(at(p, g * H + j), lanes);
  };
  alignas(64) T gate[G][NB][kLanes], input_n[NB][kLanes] = {};
  for (int g = 0; g < G; ++g) {
    const bool apart = g == Traits<C>::kApart;
    const int64_t row = g * H + j;
    if (a.in == nullptr) {
      const E *w_ih = at(a.w_ih, row * I), *w_hh = at(a.w_hh, row * P), *x = at(a.input, b0 * I),
              *h = at(a.h, b0 * H + head);
      if (apart) {
        dot_rows<E, NB>(w_ih, x, I, I, nullptr, nullptr, 0, 0, lanes, input_n);
        dot_rows<E, NB>(w_hh, h, P, H, nullptr, nullptr, 0, 0, lanes, gate[g]);
      } else {
        dot_rows<E, NB>(w_ih, x, I, I, w_hh, h, P, H, lanes, gate[g]);
      }
    } else {
      for (int b = 0; b < NB; ++b) {
        const int64_t from = (b0 + b) * G * H + row;
        const Vec in = S::load(static_cast<const T*>(a.in) + from, lanes),
                  rec = S::load(static_cast<const T*>(a.rec) + from, lanes);
        S::store(gate[g][b], apart ? rec : in + rec);
        if (apart) S::store(input_n[b], in);
      }
    }
    const Vec b_ih = bias(a.b_ih, g), b_hh = bias(a.b_hh, g);
    for (int b = 0; b < NB; ++b) {
      S::store(gate[g][b], S::load(gate[g][b]) + (apart ? b_hh : b_ih + b_hh));
      if (apart) S::store(input_n[b], S::load(input_n[b]) + b_ih);
    }
  }
  for (int b = 0; b < NB; ++b) {
    const int64_t from = (b0 + b) * H + j;
    alignas(64) T own[G][kLanes], h[kLanes], c[(kOthers + 1) * kLanes], saved[4 * kLanes];
    for (int g = 0; g < G; ++g) S::store(own[g], S::load(gate[g][b]));
    if (Traits<C>::kBefore == StateName::kH) S::store(h, Element<E>::load(at(a.h, from), lanes));
    const int64_t from_c = (b0 + b) * kOthers * H + j;
    for (int s = 0; s < kOthers; ++s) S::store(c + s * kLanes, Element<E>::load(at(a.c, from_c + s * H), lanes));
    const bool save = has_gates(C) && a.gates != nullptr;
    const Vec next = cell_forward<T, C>(own[0], input_n[b], h, c, kLanes, save ? saved : nullptr, kLanes, kLanes);
    Element<E>::store(static_cast<E*>(a.h_next) + from, next, lanes);
    for (int s = 0; s < kOthers; ++s) {
      Element<E>::store(static_cast<E*>(a.c_next) + from_c + s * H, S::load(c + s * kLanes), lanes);
    }
    if (!save) continue;
    E* const to = static_cast<E*>(a.gates) + (b0 + b) * 4 * H + j;
    for (int g = 0; g < 4; ++g) Element<E>::store(to + g * H, S::load(saved + g * kLanes), lanes);
  }
}

template <typename E, Cell C>
void forward(const CellForwardArgs& a, int64_t j0, int64_t j1) {
  constexpr int kLanes = Element<E>::S::kLanes;
  const int64_t padded = a.P == a.H ? a.H : ceil_div(a.P, kLanes) * kLanes;
  for (int64_t index = j0; index < j1; index += kLanes) {
    const int64_t in_head = index % padded, head = index / padded * a.P, j = head + in_head;
    const int64_t lanes = smaller(a.P - in_head, kLanes);
    int64_t b = 0;
    for (; b + 4 <= a.B; b += 4) forward_block<E, C, 4>(a, b, j, head, lanes);
    for (; b + 2 <= a.B; b += 2) forward_block<E, C, 2>(a, b, j, head, lanes);
    for (; b < a.B; ++b) forward_block<E, C, 1>(a, b, j, head, lanes);
  }
}

template <typename E, Cell C>
void backward(const CellBackwardArgs& a, int64_t j0, int64_t j1) {
  using T = typename Element<E>::Compute;
  using S = typename Element<E>::S;
  using Vec = typename S::Vec;
  constexpr int G = gate_blocks(C), kLanes = S::kLanes, kOthers = Traits<C>::kStates - 1, kKept = Traits<C>::kKept;
  constexpr int kRead = states_read(C);
  const int64_t H = a.H;
  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t j = j0; j < j1; j += kLanes) {
      const int64_t from = b * H + j, lanes = smaller(H - j, kLanes);
      // Of h, or of state s of the others.
      const auto load = [&](const void* p) {
        return p == nullptr ? Vec{} : Element<E>::load(static_cast<const E*>(p) + from, lanes);
      };
      const int64_t from_c = b * kOthers * H + j;
      const auto load_other = [&](const void* p, int s) {
        return p == nullptr ? Vec{} : Element<E>::load(static_cast<const E*>(p) + from_c + s * H, lanes);
      };
      alignas(64) T y[kLanes], gates[4 * kLanes], c[(kKept + 1) * kLanes], before[(kRead + 1) * kLanes],
          carried[kLanes], carried_c[(kOthers + 1) * kLanes];
      if (!has_gates(C)) S::store(y, load(a.h_next));
      if (has_gates(C)) {
        const E* const saved = static_cast<const E*>(a.gates) + b * 4 * H + j;
        for (int g = 0; g < 4; ++g) S::store(gates + g * kLanes, Element<E>::load(saved + g * H, lanes));
      }
      for (int s = 0; s < kKept; ++s) S::store(c + s * kLanes, load_other(a.c_next, s));
      for (int s = 0; s < kOthers; ++s) S::store(carried_c + s * kLanes, load_other(a.grad_c_next, s));
      for (int s = 0; s < kRead; ++s) {
        S::store(before + s * kLanes, Traits<C>::kBefore == StateName::kH ? load(a.h) : load_other(a.c, s));
      }
      const CellGrads<T, C> grads = cell_backward<T, C>(load(a.grad_h_next), y, gates, kLanes, before, c, nullptr,
                                                        carried, carried_c, kLanes, kLanes);
      const auto store = [&](void* p, int g, Vec v) {
        Element<E>::store(static_cast<E*>(p) + b * G * H + g * H + j, v, lanes);
      };
      for (int g = 0; g < G; ++g) {
        store(a.in, g, grads.d[g]);
        if (sides_apart(C)) store(a.rec, g, grads.d[recurrent_block(C, g)]);
      }
      if (Traits<C>::kBefore == StateName::kH)
        Element<E>::store(static_cast<E*>(a.grad_h) + from, S::load(carried), lanes);
      if (Traits<C>::kBefore == StateName::kC) {
        for (int s = 0; s < kOthers; ++s) {
          Element<E>::store(static_cast<E*>(a.grad_c) + from_c + s * H, S::load(carried_c + s * kLanes), lanes);
        }
      }
    }
  }
}

template <typename F>
WEFT_INLINE void with_types(CellElement element, Cell cell, F f) {
  const auto of = [&]<typename E>() { with_cell(cell, [&]<Cell C>() { f.template operator()<E, C>(); }); };
  switch (element) {
    case CellElement::kHalf:
      return of.template operator()<Half>();
    case CellElement::kBFloat16:
      return of.template operator()<BFloat16>();
    case CellElement::kFloat:
      return of.template operator()<float>();
    case CellElement::kDouble:
      return of.template operator()<double>();
  }
}

int64_t cell_lanes(CellElement element) {
  return element == CellElement::kDouble ? Simd<double>::kLanes : Simd<float>::kLanes;
}

void cell_forward_any(CellElement element, const CellForwardArgs& a, int64_t j0, int64_t j1) {
  with_types(element, a.cell, [&]<typename E, Cell C>() { forward<E, C>(a, j0, j1); });
}

void cell_backward_any(CellElement element, const CellBackwardArgs& a, int64_t j0, int64_t j1) {
  with_types(element, a.cell, [&]<typename E, Cell C>() { backward<E, C>(a, j0, j1); });
}

}  // namespace
}  // namespace weft::rnn::WEFT_ISA

namespace weft::cpu::WEFT_ISA {
const rnn::RnnCellKernels rnn_cell_kernels = {rnn::WEFT_ISA::cell_lanes, rnn::WEFT_ISA::cell_forward_any,
                                              rnn::WEFT_ISA::cell_backward_any};
}
