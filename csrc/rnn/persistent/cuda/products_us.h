// What the products of a layer over all its steps take, those that are not the recurrence's. Torch-free.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/costs.h"
#include "rnn/persistent/cuda/recurrence.h"
#include "rnn/report.h"

namespace weft::rnn {

// Microseconds: what large products of each type reach, and a launch each. `costs` is the table of the products.
inline double products_us(const RecurrenceProblem& p, const RnnCase& c, const costs::Table& costs) {
  const double rows = double(std::max<int64_t>(1, c.T)) * p.batch, hidden = double(p.hidden) * p.heads,
               gates = gate_blocks(p.cell) * hidden;
  const double teraflop = costs(p.type == RecurrenceType::kTF32    ? "tf32_teraflop"
                                : p.type == RecurrenceType::kFloat ? "float_teraflop"
                                                                   : "half_teraflop");
  double flops = 0;
  int launches = 0;
  for (int layer = 0; layer < c.layers; ++layer) {
    const double inputs = layer == 0 ? c.I : hidden * p.directions;
    flops += 2 * rows * gates * (c.trains ? 3 * inputs + p.hidden : inputs) * p.directions;
    launches += c.trains ? 12 : 4;
  }
  return 1e-12 * flops * teraflop + costs("launch") * launches;
}

}  // namespace weft::rnn
