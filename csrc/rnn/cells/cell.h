// The recurrent cells, without a torch header so that kernels can include it.
#pragma once
#ifndef __CUDACC_RTC__
#include <utility>
#endif

namespace weft::rnn {

enum class Cell { kRnnTanh, kRnnRelu, kGru, kLstm };
#ifndef __CUDACC_RTC__  // which finds no headers
constexpr std::pair<const char*, Cell> kCells[] = {
    {"rnn_tanh", Cell::kRnnTanh}, {"rnn_relu", Cell::kRnnRelu}, {"gru", Cell::kGru}, {"lstm", Cell::kLstm}};
#endif

// G: blocks of H rows in w_ih and w_hh.
constexpr int gate_blocks(Cell cell) {
  return cell == Cell::kGru ? 3 : cell == Cell::kLstm ? 4 : 1;
}

// Whether a forward that saves leaves four values of every unit and step: gru r, z, n, m; lstm i, f, g, o.
constexpr bool has_gates(Cell cell) {
  return cell == Cell::kGru || cell == Cell::kLstm;
}

// K: blocks of H columns in dgates, the gradients before the nonlinearities. rnn: one; gru: dr, dz, dn, dm with dm =
// dn * r, so that columns [0, 3H) belong to the input side and [0, 2H) and [3H, 4H) to the recurrent side; lstm: di,
// df, dg, do.
constexpr int chain_blocks(Cell cell) {
  return has_gates(cell) ? 4 : 1;
}

}  // namespace weft::rnn
