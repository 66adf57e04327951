// What is known of the recurrent cells: their traits by Cell, for kernels, and as facts, for code that learns the cell
// when it runs. No torch header. On the CPU kernels include it once per instruction set, after cell.h.
//
// A cell's traits:
//   kName           what users and ops call it; torch's kernel of the same cell is aten::<kName>
//   kCosts          the table of a GPU's costs that stands for it
//   kCudnnMode      its cudnnRNNMode_t
//   kGates          G: blocks of H rows in w_ih and w_hh
//   kSaved          values of a unit and step that a forward with save leaves: gates after their nonlinearities
//   kChain          K: blocks of H columns in dgates, the gradients before the nonlinearities: the G of the input side
//                   and, where a gate's sides stay apart, that gate's of the recurrent side
//   kStates         h, and the others: c, or c and more. They lie side by side where a tensor holds them all
//   kKept           how many of the others, the first ones, the derivative reads: `cells` has them at every step
//   kApart          the gate whose input side is added after its recurrent side was multiplied, always the last: its
//                   `pre` is the recurrent side alone. -1: none
//   kAfter, kBefore the state after and before the step that the derivative needs, h or the kept ones; a gradient flows
//                   past the weights to h, or to all of the others
//   kSelects        the derivative is 0 or 1: what arrives at a unit that is off is dropped even where it is inf
//   kScanHidden     H up to which the scan of the backward pass has kernels in float, see rnn/scan; 0 for none. The
//                   scan alone asks for:
//   kThroughOutput  the gate whose gradient comes from dh alone, where others come by way of c. -1: none
//   into_c(saved), kForget  where kStates is 2: c' = saved[kForget] c + into_c(saved)
//   gates(pre, apart, saved)  where kSaved > 0: the part of forward that needs no state
//   forward(pre, apart, h, others, saved) -> h after the step; the others are replaced. pre: (kGates), the sums before
//                   the nonlinearities; apart: the input side of gate kApart
//   backward(dh, arrive, saved, after, before, d, direct): d (kChain) from dh, the gradient of h after the step.
//                   arrive(x, s = 0) returns the gradient of the other state s after the step, of which x comes from
//                   dh. after, before: the states that they name. direct: what flows past the weights to h, or to each
//                   of the others
// over a math M of the caller's, with values V: sigmoid, log_sigmoid, tanh, exp, relu, where_positive(y, x) = y <= 0 ?
// 0 : x, positive(y, a, b) = y > 0 ? a : b, ratio(a, b) = a / b with b >= 1, like(x, y): the number y as a value like
// x, kOne.
#pragma once
#include "common/host_device.h"
#include "rnn/cells/gru.h"
#include "rnn/cells/lstm.h"
#include "rnn/cells/rnn_relu.h"
#include "rnn/cells/rnn_tanh.h"
#include "rnn/cells/slstm.h"
#include "rnn/cells/slstm_exp.h"

namespace weft::rnn {

template <Cell C>
struct TraitsOf;
#define WEFT_TRAITS(Name, _)       \
  template <>                      \
  struct TraitsOf<Cell::k##Name> { \
    using type = Name;             \
  };
WEFT_RNN_CELLS(WEFT_TRAITS, _)
#undef WEFT_TRAITS

template <Cell C>
using Traits = typename TraitsOf<C>::type;

// Traits of a cell that is known when the program runs.
#define WEFT_CELL_QUERY WEFT_HOST_DEVICE constexpr inline __attribute__((always_inline))
#define WEFT_RETURN(Name, member) \
  case Cell::k##Name:             \
    return Name::member;
#define WEFT_QUERY(type, function, member)                \
  WEFT_CELL_QUERY type function(Cell cell) {              \
    switch (cell) { WEFT_RNN_CELLS(WEFT_RETURN, member) } \
    return {};                                            \
  }
WEFT_QUERY(int, gate_blocks, kGates)
WEFT_QUERY(int, saved_blocks, kSaved)
WEFT_QUERY(int, chain_blocks, kChain)
WEFT_QUERY(int, states_of, kStates)
WEFT_QUERY(int, kept_states, kKept)
WEFT_QUERY(int, apart_gate, kApart)
WEFT_QUERY(StateName, state_before, kBefore)
WEFT_QUERY(int, scan_max_hidden, kScanHidden)

WEFT_CELL_QUERY bool has_gates(Cell cell) {
  return saved_blocks(cell) > 0;
}
WEFT_CELL_QUERY bool has_c(Cell cell) {
  return states_of(cell) > 1;
}
// States beside h.
WEFT_CELL_QUERY int other_states(Cell cell) {
  return states_of(cell) - 1;
}
// States before the step that the derivative reads.
WEFT_CELL_QUERY int states_read(Cell cell) {
  return state_before(cell) == StateName::kH ? 1 : state_before(cell) == StateName::kC ? kept_states(cell) : 0;
}
WEFT_CELL_QUERY bool sides_apart(Cell cell) {
  return apart_gate(cell) >= 0;
}
// The block of dgates that the recurrent side of gate g has; the input side has block g.
WEFT_CELL_QUERY int recurrent_block(Cell cell, int g) {
  return g == apart_gate(cell) ? chain_blocks(cell) - 1 : g;
}

#ifndef __CUDACC_RTC__  // which has no host
struct CellNames {
  const char *name, *costs;
  int cudnn_mode;
};
#define WEFT_NAMES(Name, _) {Name::kName, Name::kCosts, Name::kCudnnMode},
constexpr CellNames kCells[] = {WEFT_RNN_CELLS(WEFT_NAMES, _)};
constexpr int kCellCount = sizeof(kCells) / sizeof(kCells[0]);

// f.template operator()<C>() of this cell.
#define WEFT_CALL(Name, _) \
  case Cell::k##Name:      \
    return f.template operator()<Cell::k##Name>();
template <typename F>
inline __attribute__((always_inline)) void with_cell(Cell cell, const F& f) {
  switch (cell) { WEFT_RNN_CELLS(WEFT_CALL, _) }
}
#endif

}  // namespace weft::rnn
