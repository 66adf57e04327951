// What the kernels of weft::rnn_cell take, on the CPU and on CUDA. No torch header.
#pragma once
#include <cstdint>

#include "rnn/cells/cell.h"

namespace weft::rnn {

// What lies in memory; half types are computed in float.
enum class CellElement { kHalf, kBFloat16, kFloat, kDouble };

// All contiguous, as in rnn_cell.h, of one element type.
struct CellForwardArgs {
  Cell cell;
  int64_t B, I, H, P;                                     // H = heads of P units
  const void *input, *h, *c, *w_ih, *w_hh, *b_ih, *b_hh;  // c: all other states; the biases may be null
  const void *in, *rec;                                   // (B,G*H): the products; null where the kernel makes them
  void *h_next, *c_next, *gates;                          // gates may be null
};
struct CellBackwardArgs {
  Cell cell;
  int64_t B, H;
  const void *grad_h_next, *grad_c_next;  // may be null
  const void *h, *c, *h_next, *c_next, *gates;
  void *in, *rec;         // (B,G*H): dgates; rec where a gate's sides stay apart
  void *grad_h, *grad_c;  // like h and c, past the weights, where something flows there
  void *b_ih, *b_hh;      // (G*H): the sums of the columns of dgates on either side, or null
};

}  // namespace weft::rnn
