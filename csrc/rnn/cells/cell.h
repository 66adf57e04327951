// The recurrent cells by name. What each is, in its own header beside this one; what kernels ask about any, in cells.h.
//
// Apart from those, because the CPU's kernels include the cells' arithmetic once per instruction set, and this before.
#pragma once

namespace weft::rnn {

// CELL(name of the traits, ARGUMENT) of every cell, in the order of their numbers.
#define WEFT_RNN_CELLS(CELL, ARGUMENT) \
  CELL(RnnTanh, ARGUMENT)              \
  CELL(RnnRelu, ARGUMENT) CELL(Gru, ARGUMENT) CELL(Lstm, ARGUMENT) CELL(Slstm, ARGUMENT) CELL(SlstmExp, ARGUMENT)

#define WEFT_ENUMERATE(Name, _) k##Name,
enum class Cell { WEFT_RNN_CELLS(WEFT_ENUMERATE, _) };
#undef WEFT_ENUMERATE

// Of the states of a cell: none, h, or the others, c in front.
enum class StateName { kNone, kH, kC };

}  // namespace weft::rnn
