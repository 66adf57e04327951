// sLSTM with an exponential forget gate, see slstm.h.
#pragma once
#include "rnn/cells/slstm.h"

namespace weft::rnn {

struct SlstmExp : SlstmOf<true> {
  static constexpr const char* kName = "slstm_exp";
};

}  // namespace weft::rnn
