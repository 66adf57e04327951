// The recurrent cells, without a torch header so that kernels can include it.
#pragma once

namespace weft {

enum class Cell { kRnnTanh, kRnnRelu, kGru, kLstm };

// G: blocks of H rows in w_ih and w_hh.
constexpr int gate_blocks(Cell cell) {
  return cell == Cell::kGru ? 3 : cell == Cell::kLstm ? 4 : 1;
}

// K: blocks of H columns in dgates, see scan_rnn_parameter_grads.
constexpr int chain_blocks(Cell cell) {
  return cell == Cell::kGru || cell == Cell::kLstm ? 4 : 1;
}

}  // namespace weft
