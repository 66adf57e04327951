// What backward="newton" tells an open weft.scan.newton_report.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "rnn/rnn.h"
#include "scan/newton/report.h"

namespace weft::rnn {

// Counters of a call, (D * B, 4), sequence b of direction d in row d * B + b; undefined where no report is open.
inline at::Tensor newton_statistics(const RnnArgs& args, const RnnSizes& s, int64_t chunks) {
  scan::NewtonReport* const report = scan::newton_report();
  if (report == nullptr) return {};
  at::Tensor statistics = at::zeros({s.D * s.B, 4}, args.input.options().dtype(at::kLong));
  report->runs.push_back({kCells[int(args.cell)].name, s.T, chunks, statistics});
  return statistics;
}

}  // namespace weft::rnn
