// The arguments of the recurrence kernel (recurrence.jit.cu), for the host that fills them, with void, and for the
// kernel, with its element type.
#pragma once
#include "common/integers.h"

namespace weft::rnn {

template <typename Element>
struct RecurrenceArgsOf {
  const Element* w_hh[2];  // of each direction, (G*H, H of a head)
  const Element* b_ih[2];  // (G*H) or null
  const Element* b_hh[2];
  // Forward: W_ih x on entry, gates on exit where `save`; (directions, rows, x_stride). Backward: gates.
  Element* x;
  int x_stride;
  int64_t x_direction;
  const Element* h0;  // (directions, B, H) or null for zeros
  const Element* c0;  // (directions, B, states beside h, H)
  Element* output;    // (rows, output_stride), direction d in columns [d * H, (d + 1) * H)
  Element* cells;     // (rows, output_stride / H, kept states, H), or null
  int output_stride;
  // Forward: like h0 and c0, written. Backward: the gradients of the initial state, or null.
  Element* h_n;
  Element* c_n;
  // Backward.
  const Element* grad_output;  // like output and so on, or null
  const Element* grad_cells;
  const Element* grad_h_n;
  const Element* grad_c_n;
  // (directions, rows, dgates_stride): rnn d(pre-activation); gru dr, dz, dn, dn r; lstm di, df, dg, do; slstm di, df,
  // dz, do
  Element* dgates;
  int dgates_stride;
  int64_t dgates_direction;
  // Exchange through L2: the vectors, (directions, rows, exchange_stride), each head's H in whole chunks of 16 bytes
  // for each of a unit's values, of which value e is at exchange_value[e].
  Element* exchange;
  int exchange_stride;
  int64_t exchange_direction;
  int exchange_value[4];
  const int* lengths;                // of the sequences, descending; null where all are T
  const int64_t* offsets;            // packed: row of sequence b at step t is offsets[t] + b; null: t * B + b
  int steps, batch, first_sequence;  // of several heads: COLUMNS times the first group, heads inside
  int first_direction, directions;   // of this launch
  int save;                          // forward: leave the gates
  int publishes_result;              // the exchanged tensor is output or dgates itself
  const int* gate;                   // where that is 0 the launch does nothing; null: it does
};

}  // namespace weft::rnn
