// What a weft.scan.newton_report collects: runs of nonlinear recurrences as chunks of time, as the engines tell of
// them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace weft::scan {

struct NewtonRun {
  std::string op;
  int64_t steps, chunks;
  // (N, 4) int64, a row for each sequence or channel: rounds; steps walked again; the largest mismatch accepted over
  // max(1, |h|), the bits of a float that is not negative, whose order is that of the integers; 1 where it fell back to
  // a walk, else 0. Kernels fill it by atomic maxima and sums of integers, which depend on no order.
  at::Tensor statistics;
};

struct NewtonReport {
  std::vector<NewtonRun> runs;
};

// This thread's innermost report, null without one: then nothing is counted.
NewtonReport* newton_report();

void push_newton_report(std::shared_ptr<NewtonReport> report);
void pop_newton_report();

}  // namespace weft::scan
